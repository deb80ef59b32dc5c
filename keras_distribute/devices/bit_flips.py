"""Bits that flip, as in hardware that fails: in one device's copy of an array, and in
what a replica computes.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from keras_distribute.devices.axes import REPLICA_AXIS
from keras_distribute.devices.mesh import ReplicaMesh
from keras_distribute.errors import ValueStructureError

FIX = 'Fault("flip", variable=model.weights[0], replica=1, element=0, bit=31)'
_ASKED = "_keras_distribute_flips"


@dataclasses.dataclass(frozen=True)
class BitFlip:
    """A bit that flips in the next step of `fit`.

    Args:
        what: `"gradient"` or `"batch"`.
        path: Of the variable whose gradient it is.
        replica: Whose.
        element: The number of the element in what the replica has, as one row.
        bit: The number of the bit, 0 the lowest.
    """

    what: str
    path: str | None
    replica: int
    element: int
    bit: int


def ask(model: Any, flip: BitFlip) -> None:
    """Makes a bit flip in the next step of a model."""
    vars(model).setdefault(_ASKED, []).append(flip)


def is_asked(model: Any) -> bool:
    """Whether a bit flips in the next step."""
    return _ASKED in vars(model)


def asked(model: Any) -> list[BitFlip]:
    """The bits that flip in this step."""
    return vars(model).pop(_ASKED, [])


def in_copy(
    array: jax.Array, mesh: ReplicaMesh, replica: int, element: int, bit: int
) -> jax.Array:
    """The array, with another bit in a replica's copy, or its part. Another process's
    replica: as it is.
    """
    within("replica", replica, mesh.num_replicas)
    device = mesh.device_of(replica)
    shards = {shard.device: shard.data for shard in array.addressable_shards}
    if device not in shards:
        return array
    copy = np.array(shards[device])
    within("element", element, copy.size)
    width = copy.dtype.itemsize
    within("bit", bit, 1 if copy.dtype == bool else 8 * width)
    row = copy.reshape(-1).view(np.uint8)
    row[element * width + bit // 8] ^= np.uint8(1 << bit % 8)
    shards[device] = jax.device_put(copy, device)
    return jax.make_array_from_single_device_arrays(
        array.shape, array.sharding, list(shards.values())
    )


def in_replica(array: Any, replica: int, element: int, bit: int) -> Any:
    """The same, in the program of one replica."""
    width = 8 * array.dtype.itemsize
    within("replica", replica, lax.axis_size(REPLICA_AXIS))
    within("element", element, math.prod(array.shape))
    within("bit", bit, width)
    unsigned = jnp.dtype(f"uint{width}")
    row = lax.bitcast_convert_type(array, unsigned).reshape(-1)
    row = row.at[element].set(row[element] ^ unsigned.type(1 << bit))
    flipped = lax.bitcast_convert_type(row.reshape(array.shape), array.dtype)
    return jnp.where(lax.axis_index(REPLICA_AXIS) == replica, flipped, array)


def within(name: str, value: int, count: int) -> None:
    """Raises `ValueStructureError` for a number that is not below `count`."""
    if value >= count:
        raise refused(f"{name} is below {count} here.", f"{name}={value}.")


def refused(what: str, received: str) -> ValueStructureError:
    """The error of a bit that cannot flip."""
    return ValueStructureError(what, received=received, fix=FIX)
