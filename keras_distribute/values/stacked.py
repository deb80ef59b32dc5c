"""Distributed values as what a program over all replicas takes: arrays whose axis 0 is
the replicas.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from keras_distribute import checks, context
from keras_distribute.devices.launches import launches
from keras_distribute.devices.mesh import REPLICA_AXIS, ReplicaMesh, mesh_of_array
from keras_distribute.devices.over_replicas import over_replicas
from keras_distribute.errors import StructureTypeError, ValueStructureError
from keras_distribute.values.arrays import checked_arrays
from keras_distribute.values.per_replica import Mirrored, PerReplica


def mesh_of(destinations: Any) -> ReplicaMesh | None:
    """The mesh of a value, a variable or a strategy; `None` for a plain value."""
    if isinstance(destinations, ReplicaMesh):
        return destinations
    if isinstance(destinations, PerReplica):
        destinations = (
            destinations.padded
            if destinations.stacked is None
            else destinations.stacked
        )
    if isinstance(destinations, Mirrored):
        destinations = destinations.value
    own = getattr(destinations, "replica_mesh", None)
    if isinstance(own, ReplicaMesh):
        return own
    sharding = getattr(destinations, "sharding", None)
    if isinstance(sharding, jax.sharding.NamedSharding):
        return ReplicaMesh(mesh_of_array(destinations))
    return None


def as_per_replica(value: Any) -> PerReplica:
    """What each replica has of a distributed value or variable.

    Raises:
        StructureTypeError: For anything else.
    """
    own = getattr(value, "components", None)  # Of a variable that differs per replica.
    if isinstance(value, PerReplica):
        return value
    mesh = mesh_of(value)
    if mesh is None or not hasattr(value, "value"):
        raise StructureTypeError(
            "Only distributed values and variables can be reduced.",
            received=f"{checks.shown(value)}.",
            fix="pass a result of strategy.run, or "
            "strategy.experimental_distribute_values_from_function.",
        )
    if context.frame().per_replica:
        return PerReplica(local=value.value)
    if isinstance(own, PerReplica):
        return own
    return PerReplica(stacked=_copied(mesh)(value.value))


@functools.lru_cache(maxsize=64)
def _copied(mesh: ReplicaMesh) -> Callable[[Any], jax.Array]:
    """Each replica's copy of an array that all have."""

    def copies(array: jax.Array) -> jax.Array:
        return jnp.broadcast_to(array, (mesh.num_replicas, *array.shape))

    return jax.jit(copies, out_shardings=mesh.split)


def stacked_array(value: PerReplica) -> jax.Array:
    if value.stacked is None:
        known = value.shapes or [
            np.shape(part) for part in checked_arrays(value.values, "reduced")
        ]
        shapes = ", ".join(map(str, known))
        raise ValueStructureError(
            "Components of different shapes cannot be reduced element by element.",
            received=f"the shapes {shapes}.",
            fix="reduce over the axis whose size differs: strategy.reduce(op, value, "
            "axis=0).",
        )
    return value.stacked


def of_this_replica(value: Any) -> Any:
    """A value that may be another one on each replica, inside a program.

    JAX sums a number that it knows while tracing by multiplying it, which is wrong
    where each shape is traced by itself: where shapes differ, no number counts as
    known.
    """
    known = not isinstance(value, jax.core.Tracer)
    if known and context.in_ragged_program():
        return lax.optimization_barrier(value)
    return value


@functools.lru_cache(maxsize=512)
def compiled(
    function: Callable[..., Any], mesh: jax.sharding.Mesh, *fixed: Any
) -> Callable[..., Any]:
    """`function(*fixed, *local)` as a program on stacked values, compiled once."""
    split = PartitionSpec(REPLICA_AXIS)

    def body(*stacked: jax.Array) -> Any:
        return function(*fixed, *(x[0] for x in stacked))

    replicas = ReplicaMesh(mesh)
    mapped = over_replicas(replicas, body, in_specs=split, out_specs=PartitionSpec())
    options = replicas.compiler_options
    return launches.ordered(jax.jit(mapped, compiler_options=options))
