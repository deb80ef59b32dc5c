"""Values divided over the logical devices of a replica: sharding constraints on the
mesh's other axes.

XLA's partitioner divides what is computed from a value as the value is, and inserts the
communication. A constraint changes where numbers are computed, never which.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.core
import keras
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from keras_distribute import checks, context
from keras_distribute._compat import layers as compat
from keras_distribute.devices.mesh import REPLICA_AXIS, ReplicaMesh
from keras_distribute.errors import StructureTypeError, ValueStructureError
from keras_distribute.values.arrays import as_array
from keras_distribute.values.per_replica import DistributedValues

_FREE = PartitionSpec.UNCONSTRAINED


def split(mesh: ReplicaMesh, tensor: Any, partition_dimensions: Sequence[int]) -> Any:
    """`tensor`, whose dimensions are divided into so many parts each."""
    value = _as_array(tensor, "experimental_split_to_logical_devices")
    parts = _numbers(partition_dimensions)
    if len(parts) != value.ndim:
        raise ValueStructureError(
            "partition_dimensions has a number for each dimension of the tensor.",
            received=f"{parts} for the shape {tuple(value.shape)}.",
            fix=f"{[1] * (value.ndim - 1) + [mesh.num_logical]}",
        )
    product = math.prod(parts)
    if min(parts, default=1) < 1 or product != mesh.num_logical:
        raise ValueStructureError(
            "The product of partition_dimensions is the number of logical devices of a "
            "replica.",
            received=f"{parts}, whose product is {product}, for {mesh.num_logical} "
            "logical device(s).",
            fix=f"{[1] * (value.ndim - 1) + [mesh.num_logical]}",
        )
    # Keras is looking at shapes; an unknown one has some number here.
    if compat.is_symbolic():
        return value
    for i, (size, number) in enumerate(zip(value.shape, parts, strict=True)):
        # XLA divides the rows of a global batch, too.
        if size % number and not (i == 0 and _is_batch(value)):
            raise ValueStructureError(
                f"Dimension {i} of the tensor does not divide into {number} parts.",
                received=f"partition_dimensions={parts} for the shape "
                f"{tuple(value.shape)}.",
                fix=f"a multiple of {number}, or another dimension.",
            )
    return _constrained(mesh, value, _axes_of(mesh, parts))


def replicate(
    mesh: ReplicaMesh,
    tensor: Any,
    method: str = "experimental_replicate_to_logical_devices",
) -> Any:
    """`tensor`, whole on each logical device."""
    value = _as_array(tensor, method)
    return (
        value if compat.is_symbolic() else _constrained(mesh, value, [()] * value.ndim)
    )


def _numbers(partition_dimensions: Any) -> list[int]:
    given = checks.items(partition_dimensions)
    if given is None or not all(map(checks.is_integer, given)):
        raise StructureTypeError(
            "partition_dimensions is an integer for each dimension of the tensor.",
            received=f"partition_dimensions={checks.shown(partition_dimensions)}.",
            fix="[1, 2, 1, 1], which divides the second dimension by two.",
        )
    return [int(number) for number in given]


def _as_array(tensor: Any, method: str) -> Any:
    if isinstance(tensor, keras.KerasTensor):
        raise StructureTypeError(
            "A symbolic tensor of a functional model has no devices.",
            received=f"{method}({tensor!r}).",
            fix=f"keras.layers.Lambda(lambda x: strategy.{method}(x, ...)), or a layer "
            "whose call does it.",
        )
    if isinstance(tensor, keras.Variable):
        tensor = tensor.value
    if isinstance(tensor, DistributedValues) and not hasattr(tensor, "value"):
        raise StructureTypeError(
            "A value that differs per replica is divided in a replica.",
            received=f"{method}({tensor!r}).",
            fix=f"strategy.run(lambda x: strategy.{method}(x, ...), args=(value,))",
        )
    return as_array(tensor, "Only an array has logical devices to be divided over.")


def _axes_of(mesh: ReplicaMesh, parts: Sequence[int]) -> list[tuple[str, ...]]:
    """The mesh axes that divide each dimension; the first dimension gets the slowest
    ones, as in TensorFlow.
    """
    left = [(name, mesh.mesh.shape[name]) for name in mesh.logical_axes]
    axes: list[tuple[str, ...]] = []
    for number in parts:
        own: list[str] = []
        for name, size in list(left):
            if number % size == 0:
                own.append(name)
                left.remove((name, size))
                number //= size
        axes.append(tuple(own))
    return axes


def _is_batch(value: Any) -> bool:
    """Whether `value` has the rows of a step's global batch, or several of each."""
    batch = context.frame().batch
    rows = 0 if batch is None else batch.rows
    return (
        rows > 0
        and value.ndim > 0
        and value.shape[0] > 0
        and value.shape[0] % rows == 0
    )


def _constrained(mesh: ReplicaMesh, value: Any, axes: Sequence[tuple[str, ...]]) -> Any:
    if not mesh.logical_axes:
        return value
    current = context.frame()
    # In `run`: the program is one replica's, and its own axis is out of reach.
    if current.per_replica:
        return lax.with_sharding_constraint(
            value, NamedSharding(mesh.inside, PartitionSpec(*map(_entry, axes)))
        )
    if current.batch is None and not isinstance(value, jax.core.Tracer):
        return mesh.put(
            value, NamedSharding(mesh.mesh, PartitionSpec(*map(_entry, axes)))
        )
    if _is_batch(value):
        spec = [
            _entry(_axes_of_rows(mesh, value.shape[0], axes[0])),
            *map(_entry, axes[1:]),
        ]
    else:
        # It is not known which dimension is divided over the replicas; that stays as it
        # is.
        spec = [_entry(names) if names or not any(axes) else _FREE for names in axes]
    return lax.with_sharding_constraint(
        value, NamedSharding(mesh.mesh, PartitionSpec(*spec))
    )


def _axes_of_rows(
    mesh: ReplicaMesh, rows: int, logical: tuple[str, ...]
) -> tuple[str, ...]:
    """Axes that divide a global batch's rows, logical ones where it is even then."""
    batch = context.frame().batch
    replicas = () if batch is not None and batch.replicated else (REPLICA_AXIS,)
    parts = math.prod(mesh.mesh.shape[name] for name in (*replicas, *logical))
    return (*replicas, *logical) if rows % parts == 0 else replicas


def _entry(names: tuple[str, ...]) -> Any:
    return names[0] if len(names) == 1 else names or None
