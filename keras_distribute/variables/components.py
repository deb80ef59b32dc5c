"""Between one value and the components of the replicas: inside a program, and as
programs of their own.

This is how a metric is reduced over the replicas: its totals, which Keras creates
`on_read` with the aggregation `"sum"`, are summed when its result is read across
replicas, and so is the mean of batch normalization's moving statistics taken. In a step
of `fit` there is nothing to reduce: a metric is computed over the global batch.
`choice.py` says which variables have components.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from keras_distribute.devices.launches import launches
from keras_distribute.devices.mesh import REPLICA_AXIS, ReplicaMesh
from keras_distribute.devices.over_replicas import over_replicas
from keras_distribute.types import ReduceOp
from keras_distribute.values.arrays import summed
from keras_distribute.values.cross_device_ops import widened
from keras_distribute.values.stacked import of_this_replica


def of_first(value: Any) -> Any:
    """The value on the first replica, zeros on the others; inside a program."""
    return jnp.where(lax.axis_index(REPLICA_AXIS) == 0, value, jnp.zeros_like(value))


def combined(aggregation: str, value: Any) -> Any:
    """The replicas' values as one, by an aggregation but `"none"`; in a program."""
    value = of_this_replica(value)
    if aggregation == "mean":
        (total,) = summed([widened(ReduceOp.MEAN, value)])
        return (total / lax.axis_size(REPLICA_AXIS)).astype(value.dtype)
    own = of_first(value) if aggregation == "only_first_replica" else value
    return summed([own])[0].astype(value.dtype)


def strong(value: Any) -> Any:
    """Without JAX's weak type, which a Python number leaves: the programs that follow
    would compile twice.
    """
    if getattr(value, "weak_type", False):
        return lax.convert_element_type(value, value.dtype)
    return value


@functools.lru_cache(maxsize=256)
def spread_over(mesh: ReplicaMesh, first_only: bool, axes: tuple[Any, ...]) -> Any:
    """A program from one value to the stored components: the value for each, or for the
    first and zeros.
    """

    def spread(value: jax.Array) -> jax.Array:
        shape = (mesh.num_replicas, *value.shape)
        if first_only:
            return jnp.zeros(shape, value.dtype).at[0].set(value)
        return jnp.broadcast_to(value, shape)

    sharding = mesh.stacked(axes) if any(axes) else mesh.split
    return launches.ordered(jax.jit(spread, out_shardings=sharding))


def _sum(mesh: ReplicaMesh, stacked: jax.Array) -> jax.Array:
    if mesh.series is None:
        return jnp.sum(stacked, 0, dtype=stacked.dtype)
    split, same = PartitionSpec(REPLICA_AXIS), PartitionSpec()
    return over_replicas(mesh, lambda own: lax.psum(own[0], REPLICA_AXIS), split, same)(
        stacked
    )


@functools.lru_cache(maxsize=256)
def aggregated(mesh: ReplicaMesh, aggregation: str, sharding: NamedSharding) -> Any:
    """A program from the stored components to what a read across replicas gives."""

    def aggregate(stacked: jax.Array) -> jax.Array:
        if aggregation == "only_first_replica":
            return stacked[0]
        if aggregation == "sum":
            return _sum(mesh, stacked)
        mean = _sum(mesh, widened(ReduceOp.MEAN, stacked)) / mesh.num_replicas
        # XLA multiplies by 1 / n: the mean of three equal numbers would be another
        # number.
        equal = jnp.all(stacked == stacked[:1], 0)
        return jnp.where(equal, stacked[0], mean.astype(stacked.dtype))

    return launches.ordered(jax.jit(aggregate, out_shardings=sharding))
