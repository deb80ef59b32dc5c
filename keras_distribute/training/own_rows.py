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
    is_mapped = context.frame().per_replica or mesh.series is not None
    if is_mapped or len(mesh.devices) == 1:
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
    mapped = jax.shard_map(
        kernel,
        mesh=mesh.mesh,
        in_specs=tuple(split if has else PartitionSpec() for has in has_rows),
        out_specs=split,
        check_vma=False,
    )
    outputs = mapped(*arrays)
    return jax.tree.map(lambda each: each[:rows], outputs) if missing else outputs
