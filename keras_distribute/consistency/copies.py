"""Which devices have copies of the same, and which of the copies is right."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Sequence

import jax

from keras_distribute.devices.mesh import ReplicaMesh

Group = tuple[int, ...]
"""The places of devices in a mesh that have copies of the same."""


def groups_of(array: jax.Array, mesh: ReplicaMesh) -> list[Group]:
    """The devices that have copies of each part of an array; none for a part that only
    one device has, and for an array that is not in the devices' own memory.
    """
    sharding = array.sharding
    shape = () if sharding.is_fully_replicated else array.shape
    return _groups(sharding, shape, mesh)


@functools.lru_cache(maxsize=4096)
def _groups(
    sharding: jax.sharding.Sharding, shape: tuple[int, ...], mesh: ReplicaMesh
) -> list[Group]:
    if sharding.device_set != set(mesh.devices) or not is_in_own_memory(sharding):
        return []
    if sharding.is_fully_replicated:
        groups = [tuple(range(len(mesh.devices)))]
    else:
        where = sharding.devices_indices_map(shape)
        by_index: dict[str, list[int]] = {}
        for place, device in enumerate(mesh.devices):
            by_index.setdefault(str(where[device]), []).append(place)
        groups = list(map(tuple, by_index.values()))
    return [group for group in groups if len(group) > 1]


def is_in_own_memory(sharding: jax.sharding.Sharding) -> bool:
    """Whether devices keep it in their own memory, and not in the host's."""
    device = next(iter(sharding.device_set))
    return sharding.memory_kind in (None, device.default_memory().kind)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What the hashes of the copies of one thing say, where they differ.

    Args:
        reference: The place of a device with the copy that the others are compared
            with.
        differing: The places of the devices with other copies.
        is_right: Whether more than half of the copies are that one.
    """

    reference: int
    differing: Group
    is_right: bool


def verdict(group: Group, hashes: Sequence[int]) -> Verdict | None:
    """Compares copies; `None` where they are the same.

    Args:
        hashes: Of every device of the mesh.
    """
    own = [hashes[place] for place in group]
    if len(set(own)) == 1:
        return None
    most, count = collections.Counter(own).most_common(1)[0]
    is_right = 2 * count > len(group)
    reference = group[own.index(most) if is_right else 0]
    differing = tuple(p for p in group if hashes[p] != hashes[reference])
    return Verdict(reference, differing, is_right)
