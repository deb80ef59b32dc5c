"""One value of `Strategy.reduce` and `Strategy.gather`: what differs per replica, or is
the same on all.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import keras
import numpy as np

from keras_distribute import context
from keras_distribute.cluster import liveness
from keras_distribute.context import AnyStrategy
from keras_distribute.errors import (
    ContextError,
    StructureTypeError,
    ValueStructureError,
)
from keras_distribute.types import ReduceOp
from keras_distribute.values import arrays, reductions
from keras_distribute.values.arrays import as_array
from keras_distribute.values.per_replica import Mirrored, PerReplica


def reduce_one(
    strategy: AnyStrategy, op: ReduceOp, leaf: Any, axes: tuple[int, ...]
) -> Any:
    """`reduce` of one value, for both halves of a strategy."""
    if isinstance(leaf, PerReplica):
        _check_complete(strategy, leaf)
        return reductions.reduce_values(
            strategy.extended.cross_device_ops, op, leaf, axes
        )
    array = _plain(leaf)
    is_traced = isinstance(array, jax.core.Tracer)
    # A function that a worker runs is that of one replica.
    if is_traced and context.scheduled_trace() is None:
        _check_is_of_all(leaf)
    axes = reductions.check_axes(axes, array.ndim)
    if op is ReduceOp.MEAN and not axes:
        return array
    arrays.check_adds(array)
    if op is ReduceOp.MEAN:
        return jnp.mean(array, axes)
    several = strategy.num_replicas_in_sync > 1
    if several and (is_traced or bool(np.any(np.asarray(array) != 0))):
        raise ValueStructureError(
            "The sum of a value that is the same on every replica is not defined.",
            received=f"{leaf!r} in the cross-replica context of "
            f"{strategy.num_replicas_in_sync} replicas.",
            fix="of a number that a replica counts, as of its rows, return an array: "
            "keras.ops.convert_to_tensor(x.shape[0]); of one that is meant to be the "
            'same, multiply: value * strategy.num_replicas_in_sync; "MEAN" works.',
        )
    return jnp.sum(array, axes)


def _check_is_of_all(leaf: Any) -> None:
    """Raises for a value that is no `PerReplica`, in a trace, unless it is known to be
    the same on all replicas: a number or a variable, in a merge_call.
    """
    if not context.frame().per_replica:
        raise ContextError(
            "In a step of fit, and in any other traced function, there is nothing "
            "to reduce.",
            received=f"{leaf!r} in {context.describe(context.frame())}",
            fix="use the value as it is: a step of fit sees the global batch.",
        )
    if isinstance(leaf, jax.core.Tracer):
        raise ContextError(
            "In a merge_call, only what it is given is a value of each replica.",
            received=f"{leaf!r}.",
            fix="pass it on, merge_call(merge_fn, args=(value,)); what reduce returns "
            "is the same on all replicas, and used as it is.",
        )


def gather_one(strategy: AnyStrategy, leaf: Any, axis: int) -> Any:
    """`gather` of one value."""
    if isinstance(leaf, PerReplica):
        _check_complete(strategy, leaf)
        return reductions.gather_values(leaf, axis)
    array = _plain(leaf)
    reductions.check_axis(axis, array.ndim)
    return array


def _check_complete(strategy: AnyStrategy, value: PerReplica) -> None:
    """Raises for components that only their own processes know."""
    liveness.current.begin_program(strategy.replica_mesh.num_processes)
    if strategy.replica_mesh.num_processes > 1 and value.is_on_host:
        raise ValueStructureError(
            "The components of other processes can be had only of arrays of one "
            "rank and one dtype.",
            received=f"{value!r} on process {strategy.replica_mesh.process_index}.",
            fix="arrays that differ in the sizes of their dimensions only, on all "
            "replicas.",
        )


def _plain(leaf: Any) -> jax.Array:
    if isinstance(leaf, Mirrored | keras.Variable):
        leaf = leaf.value
    what = "Only arrays can be reduced or gathered over the replicas."
    if not arrays.is_array(leaf) and not hasattr(leaf, "__array__"):
        raise StructureTypeError(
            what,
            received=f"a {type(leaf).__name__}.",
            fix="strategy.experimental_local_results(value) gives the objects "
            "themselves.",
        )
    return as_array(leaf, what)
