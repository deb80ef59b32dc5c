"""What a replica can ask inside `Strategy.run`: its number, and values from the other
replicas. Knows no Keras.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from keras_distribute import context
from keras_distribute.context import AnyStrategy, Frame, Mode
from keras_distribute.devices.mesh import REPLICA_AXIS
from keras_distribute.errors import (
    ContextError,
    StructureTypeError,
    ValueStructureError,
)
from keras_distribute.types import CommunicationOptions, ReduceOp
from keras_distribute.values import reductions, structures
from keras_distribute.values.per_replica import Mirrored, PerReplica, is_distributed


class ReplicaContext:
    """The running replica, as `kd.get_replica_context()` returns it inside
    `Strategy.run`.

    Source: `tf.distribute.ReplicaContext`. Differs from TF: the function is traced once
    for all replicas, so `replica_id_in_sync_group` is a traced integer: use it in `jnp`
    or `keras.ops`, not in a Python `if`.
    """

    def __init__(
        self, strategy: AnyStrategy, replica_id_in_sync_group: Any = None
    ) -> None:
        self._strategy = strategy
        self._replica_id = replica_id_in_sync_group

    @property
    def strategy(self) -> Any:
        """The strategy whose replica this is."""
        return self._strategy

    @property
    def num_replicas_in_sync(self) -> int:
        """How many replicas run this program together."""
        return self._strategy.num_replicas_in_sync

    @property
    def replica_id_in_sync_group(self) -> Any:
        """The number of this replica, from 0: an int32 scalar that is traced, or 0
        outside a program.
        """
        if self._replica_id is not None:
            return self._replica_id
        return lax.axis_index(REPLICA_AXIS) if context.frame().per_replica else 0

    def all_reduce(
        self,
        reduce_op: ReduceOp | str,
        value: Any,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """Sums or averages `value` over all replicas; each of them gets the result.

        Args:
            reduce_op: `ReduceOp.SUM` or `ReduceOp.MEAN`, or its name.
            value: An array, or a structure of arrays, of the same shapes on every
                replica.
            options: How to pack and communicate.

        Returns:
            The structure of `value`, reduced. Its gradient is the same reduction of the
            gradients, as in TensorFlow.

        Raises:
            ContextError: Outside `Strategy.run`.

        Example:
            >>> import keras_distribute as kd
            >>> strategy = kd.MirroredStrategy(["cpu:0", "cpu:1"])
            >>> def fn():
            ...     context = kd.get_replica_context()
            ...     number = context.replica_id_in_sync_group + 1
            ...     return context.all_reduce("SUM", number)
            >>> [int(v) for v in strategy.run(fn).values]
            [3, 3]
        """
        self._require("all_reduce", 'strategy.reduce("SUM", value, axis=None)')
        op = ReduceOp.parse(reduce_op)
        leaves, structure = structures.flatten(value)
        if not context.frame().per_replica:
            alone = [reductions.reduce_alone(op, leaf) for leaf in leaves]
            return jax.tree.unflatten(structure, alone)
        reduced = reductions.reduce_locals(
            self._strategy.extended.cross_device_ops, op, leaves, options
        )
        return jax.tree.unflatten(structure, reduced)

    def all_gather(
        self, value: Any, axis: int, options: CommunicationOptions | None = None
    ) -> Any:
        """Joins the replicas' values along `axis`, in replica order; each replica gets
        the result.

        Args:
            value: An array of at least one dimension, or a structure of them. Along
                `axis` the replicas' arrays may differ in size; some may have no rows.
            axis: The axis to join along.
            options: Accepted for compatibility.

        Returns:
            The structure of `value`, along `axis` as long as those of all replicas
            together. Its gradient is the sum of the replicas' gradients of this
            replica's part.

        Raises:
            ContextError: Outside `Strategy.run`.
            ValueStructureError: For a value without that axis, and for values that
                differ in size along another one, in rank or in dtype.

        Example:
            >>> import numpy as np, keras_distribute as kd
            >>> strategy = kd.MirroredStrategy(["cpu:0", "cpu:1"])
            >>> rows = strategy.experimental_distribute_values_from_function(
            ...     lambda context: np.arange(context.replica_id_in_sync_group + 1.0))
            >>> def fn(x):
            ...     return kd.get_replica_context().all_gather(x, axis=0)
            >>> joined = strategy.run(fn, args=(rows,))
            >>> [v.tolist() for v in joined.values]
            [[0.0, 0.0, 1.0], [0.0, 0.0, 1.0]]
        """
        self._require("all_gather", "strategy.gather(value, axis=0)")

        leaves, structure = structures.flatten(value)
        leaves = list(map(jnp.asarray, leaves))
        for leaf in leaves:
            if leaf.ndim == 0:
                raise ValueStructureError(
                    "A value without dimensions cannot be gathered along an axis.",
                    received=f"a scalar and axis={axis}.",
                    fix="value[None], or keras.ops.reshape(value, (1,)).",
                )
            reductions.check_axis(axis, leaf.ndim)
        gathered = (
            reductions.all_gather_locals(leaves, axis)
            if context.frame().per_replica
            else leaves
        )
        return jax.tree.unflatten(structure, gathered)

    def merge_call(
        self,
        merge_fn: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: Any = None,
    ) -> Any:
        """Calls `merge_fn(strategy, *args, **kwargs)` once, in the cross-replica
        context, amid the replicas' program.

        Args:
            merge_fn: Gets the strategy, then the arguments, whose arrays are
                `PerReplica`. `strategy.run` in it calls a function for each replica
                again, as a part of the same program.
            args: Arguments of this replica.
            kwargs: Named arguments of this replica.

        Returns:
            What `merge_fn` returns; of a `PerReplica`, this replica's component.

        Raises:
            ContextError: Outside `Strategy.run`.
        """
        self._require("merge_call", "call merge_fn(strategy, ...) directly")
        if not callable(merge_fn):
            raise StructureTypeError(
                "merge_call calls a function.",
                received=f"{merge_fn!r}.",
                fix="merge_call(lambda strategy, x: ..., args=(x,))",
            )
        per_replica = context.frame().per_replica
        args, kwargs = tuple(args), dict(kwargs or {})
        if per_replica:
            args, kwargs = structures.mapped(_wrapped, (args, kwargs), is_distributed)
        with context.entered(
            Frame(self._strategy, Mode.CROSS, per_replica=per_replica)
        ):
            result = merge_fn(self._strategy, *args, **kwargs)
        return structures.mapped(_unwrapped, result, is_distributed)

    def _require(self, what: str, fix: str) -> None:
        current = context.frame()
        if current.mode is not Mode.REPLICA or current.strategy is not self._strategy:
            raise ContextError(
                f"{what} was called outside Strategy.run.",
                received=context.describe(current),
                fix=f"{fix}, or move the call into the function given to run.",
            )

    def __repr__(self) -> str:
        return f"ReplicaContext({self._strategy!r})"


def run_in_merge_call(
    strategy: AnyStrategy,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """`strategy.run` in a `merge_call`: calls `function` in this replica, in the
    program that is being traced.
    """
    args, kwargs = structures.mapped(own_part, (args, kwargs), is_distributed)
    with context.entered(
        Frame(strategy, Mode.REPLICA, strategy.make_replica_context(), per_replica=True)
    ):
        result = function(*args, **kwargs)
    return structures.mapped(_wrapped, result, is_distributed)


def _wrapped(leaf: Any) -> Any:
    """This replica's array as one that differs per replica."""
    if isinstance(leaf, jax.Array | np.ndarray | np.generic):
        return PerReplica(local=jnp.asarray(leaf))
    return leaf


def _unwrapped(leaf: Any) -> Any:
    return (
        leaf.local if isinstance(leaf, PerReplica) and leaf.local is not None else leaf
    )


def own_part(leaf: Any) -> Any:
    """What this replica has of a value, in a `merge_call`."""
    if isinstance(leaf, PerReplica) and leaf.local is None:
        raise ValueStructureError(
            "A value from outside of the program was passed to a replica's function in "
            "merge_call.",
            received=f"{leaf!r}.",
            fix="pass it to the outer strategy.run, strategy.run(fn, args=(value,)), "
            "and on to merge_call.",
        )
    return leaf.value if isinstance(leaf, Mirrored) else _unwrapped(leaf)
