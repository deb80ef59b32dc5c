"""What a program of `run` gathers at its beginning: divided variables, which its
function sees whole.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from keras_distribute.checks import bytes_in_words
from keras_distribute.devices.mesh import REPLICA_AXIS, ReplicaMesh
from keras_distribute.devices.placement import num_bytes
from keras_distribute.errors import OutOfMemoryError
from keras_distribute.variables import MirroredVariable

LARGE = 2**30  # Bytes that are gathered without a word.
_FIX = (
    "model.fit, which gathers one layer after the other, with a train_step of the "
    "model's own where the loop is special"
)


def check_gathered(variables: Sequence[Any], mesh: ReplicaMesh) -> None:
    """Says what it costs to gather the divided ones among the variables of a program,
    where that is much.

    Raises:
        OutOfMemoryError: Where a device does not have as much memory.
    """
    divided = [
        v
        for v in variables
        if isinstance(v, MirroredVariable) and REPLICA_AXIS in v.value_sharding.spec
    ]
    if mesh.num_replicas == 1 or not divided:
        return
    size = sum(map(_bytes_of_whole, divided))
    limit = _memory_of(mesh.local_devices[0])
    what = (
        "A program of strategy.run sees whole variables: those that are divided take "
        f"{bytes_in_words(size)} on each device for the time of the program, and "
        "gradients with respect to them as much again"
    )
    if limit is not None and size > limit:
        raise OutOfMemoryError(
            f"{what}. A device has {bytes_in_words(limit)}.",
            received=f"{len(divided)} variable(s) divided over {mesh.num_replicas} "
            "replicas.",
            fix=f"{_FIX}.",
        )
    if size >= LARGE:
        warnings.warn(f"{what}. Less takes {_FIX}.", stacklevel=4)


def _bytes_of_whole(variable: MirroredVariable) -> int:
    """On one device, which has its part of what is divided over logical devices."""
    spec = PartitionSpec(*variable.logical_axes)
    whole = NamedSharding(variable.replica_mesh.mesh, spec)
    return num_bytes(whole.shard_shape(tuple(variable.shape)), variable._dtype)


def _memory_of(device: jax.Device) -> int | None:
    return (device.memory_stats() or {}).get("bytes_limit")
