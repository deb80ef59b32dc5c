"""The sum over the replicas of which each keeps a part (a reduce-scatter), in the
program of one replica.

On a slice of TPU chips it goes along one dimension of the slice after the other. libtpu
has a reduce-scatter along a line of chips. Over several dimensions at once it has one
for few slices, such as 2x4 and 4x8. On others (4x4, 8x8, and all of v3, v4 and v5p
that `tests/dry_run/test_tpu.py` compiles) it sums the whole value on each chip, and
then takes the part: twice the bytes, and since it sums all gradients together, all of
them are whole at once.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from keras_distribute.devices.axes import REPLICA_AXIS
from keras_distribute.devices.mesh import ReplicaMesh


def summed_part(value: Any, axis: int, mesh: ReplicaMesh) -> Any:
    """This replica's part of the sum over all replicas.

    Args:
        value: An array of the same shape on each replica.
        axis: The dimension of which a replica keeps its part; the number of replicas
            divides it.
    """
    lines = _lines_of(mesh.first_devices)
    if lines is None:
        return lax.psum_scatter(value, REPLICA_AXIS, scatter_dimension=axis, tiled=True)
    value = _reordered(value, axis, lines.bits)
    for groups in lines.groups:
        value = lax.psum_scatter(
            value,
            REPLICA_AXIS,
            scatter_dimension=axis,
            axis_index_groups=groups,
            tiled=True,
        )
    return value


@dataclasses.dataclass(frozen=True)
class _Lines:
    """The lines of devices along each dimension of a slice.

    Args:
        groups: For each dimension, the replicas of each line, in their order on it.
        bits: The number of a replica's part counts along the dimensions, the first one
            slowest. Its bits, the highest first, as bits of the replica's number.
    """

    groups: list[list[list[int]]]
    bits: tuple[int, ...]


@functools.cache
def _lines_of(devices: Sequence[jax.Device]) -> _Lines | None:
    """Of devices that fill a slice; `None` where one reduce-scatter over all of them is
    as good, or the only one that there is.
    """
    places = np.asarray([_place_of(device) for device in devices])
    places -= places.min(0)
    lengths = places.max(0) + 1
    # From the longest to the shortest, since each step leaves less to the next one.
    order = [i for i in np.argsort(-lengths, kind="stable") if lengths[i] > 1]
    shape = tuple(int(lengths[i]) for i in order)
    if len(shape) < 2 or (len(shape) == 2 and shape[0] != shape[1]):
        return None
    if math.prod(shape) != len(devices):  # Not a whole slice, or more than one.
        return None
    numbers = np.arange(len(devices)).reshape(shape)[tuple(places[:, order].T)]
    bits = _bits_of(numbers)
    if bits is None:
        return None
    grid = np.argsort(numbers).reshape(shape)
    lines = [np.moveaxis(grid, i, -1).reshape(-1, n) for i, n in enumerate(shape)]
    return _Lines([each.tolist() for each in lines], bits)


def _place_of(device: Any) -> tuple[int, ...]:
    """Where a device is in its slice; all others are at one place."""
    if device.platform != "tpu":  # GPUs have coordinates, too, but no lines.
        return (0,)
    return (*device.coords, device.core_on_chip)


def _bits_of(numbers: np.ndarray[Any, Any]) -> tuple[int, ...] | None:
    """Which bit of its index each bit of a number is, the highest first; `None` where
    the numbers are not their indices with other bits in other places.
    """
    count = len(numbers).bit_length() - 1
    if len(numbers) != 1 << count or sorted(numbers) != list(range(len(numbers))):
        return None
    of_bit = {int(numbers[1 << bit]): bit for bit in range(count)}
    bits = tuple(of_bit.get(1 << bit, -1) for bit in reversed(range(count)))
    indices = np.arange(len(numbers))
    made = np.zeros_like(indices)
    for place, bit in enumerate(reversed(bits)):
        made |= (indices >> bit & 1) << place
    return bits if -1 not in bits and np.array_equal(made, numbers) else None


def _reordered(value: Any, axis: int, bits: tuple[int, ...]) -> Any:
    """The parts of the replicas in the order of `_Lines`. Where the replicas are in
    another one it moves the memory of the value once.
    """
    if list(bits) == sorted(bits, reverse=True):
        return value
    before, size, after = value.shape[:axis], value.shape[axis], value.shape[axis + 1 :]
    rest = (size >> len(bits), *after)
    apart = value.reshape(*before, *(2,) * len(bits), *rest)
    moved = [axis + len(bits) - 1 - bit for bit in bits]
    behind = range(axis + len(bits), apart.ndim)
    return jnp.transpose(apart, (*range(axis), *moved, *behind)).reshape(value.shape)
