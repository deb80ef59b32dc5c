"""Kernels that treat each row alone, which nobody can look into: each replica has its
own rows computed.

A step over the global batch maps such a kernel over the replicas, which a program of
one replica's rows then unpacks (`devices/by_rows/`): XLA cannot divide the one, and
neither is it seen in an operation of the other that it treats each row alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from keras_distribute import context
from keras_distribute.devices.axes import REPLICA_AXIS
from keras_distribute.devices.mesh import ReplicaMesh


def is_of_gpus(mesh: ReplicaMesh) -> bool:
    """Whether the devices are GPUs, whose kernels come from cuDNN."""
    return mesh.platform == "gpu"


def is_in_program(mesh: ReplicaMesh) -> bool:
    """Whether the code that is traced is of a step, or of one replica, and no replica
    is divided over logical devices, whose layouts XLA alone follows.
    """
    current = context.frame()
    return mesh.num_logical == 1 and (current.per_replica or current.batch is not None)


def of_rows(
    mesh: ReplicaMesh,
    kernel: Callable[..., Any],
    arrays: Sequence[Any],
    has_rows: Sequence[bool],
) -> Any:
    """What a kernel makes of the rows, each device of its own.

    Args:
        kernel: From arrays to one, or several, whose first dimension is the rows.
        arrays: The first has all rows.
        has_rows: Which of them have one entry for each row; the others are for all.
    """
    if context.frame().per_replica or _is_whole(mesh):
        return kernel(*arrays)
    rows, split = arrays[0].shape[0], PartitionSpec(REPLICA_AXIS)
    missing = -rows % mesh.num_replicas
    if missing:
        arrays = [
            jnp.pad(array, [(0, missing), *[(0, 0)] * (array.ndim - 1)])
            if has
            else array
            for array, has in zip(arrays, has_rows, strict=True)
        ]
    if mesh.series is not None:
        mapped = _in_turn(kernel, has_rows, mesh.num_replicas)
    else:
        mapped = jax.shard_map(
            kernel,
            mesh=mesh.mesh,
            in_specs=tuple(split if has else PartitionSpec() for has in has_rows),
            out_specs=split,
            check_vma=False,
        )
    outputs = mapped(*arrays)
    return jax.tree.map(lambda each: each[:rows], outputs) if missing else outputs


def _in_turn(
    kernel: Callable[..., Any], has_rows: Sequence[bool], count: int
) -> Callable[..., Any]:
    """A kernel on the rows of one replica after the other: there are more replicas than
    devices to map it over. A program of one replica's rows has one turn.
    """

    def apart(array: Any, has: bool) -> Any:
        if not has:
            return jnp.broadcast_to(array, (count, *array.shape))
        return array.reshape((count, array.shape[0] // count, *array.shape[1:]))

    def mapped(*arrays: Any) -> Any:
        groups = list(map(apart, arrays, has_rows))
        outputs = lax.map(lambda own: kernel(*own), groups)
        return jax.tree.map(lambda each: lax.collapse(each, 0, 2), outputs)

    return mapped


def _is_whole(mesh: ReplicaMesh) -> bool:
    """Whether each device has all rows, in what is traced."""
    if mesh.series is None:
        return len(mesh.devices) == 1
    batch = context.frame().batch
    return batch is None or batch.replicated
