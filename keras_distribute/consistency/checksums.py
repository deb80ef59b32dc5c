"""Checksums of what exists once: of arrays that are divided over the devices, and have
no copies to compare.

The checksum of an array is the sum of its parts' hashes, each computed by the device
that has the part. It does not depend on how the array is divided, so it can be carried
to the host, to a file, and to other devices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from keras_distribute.cluster import liveness
from keras_distribute.consistency import hashing, words
from keras_distribute.consistency.copies import is_in_own_memory
from keras_distribute.consistency.telling import told_by_all
from keras_distribute.devices.launches import launches

_BLOCK = 1 << 20  # Elements that are hashed at once on the host.
_WORD = 2**32


@dataclasses.dataclass(frozen=True)
class OfParts:
    """The hashes of an array's parts.

    Args:
        of_devices: The hash of the part on each device of the mesh.
        indices: Which part that is.
    """

    of_devices: tuple[int, ...]
    indices: tuple[str, ...]

    @property
    def whole(self) -> int | None:
        """The checksum of the array; `None` where copies of a part differ."""
        of_parts = set(zip(self.indices, self.of_devices, strict=True))
        if len(of_parts) > len(set(self.indices)):
            return None
        return _summed(own for _, own in of_parts)


def of_arrays(arrays: Mapping[Any, Any]) -> dict[Any, OfParts]:
    """The hashes of the parts of arrays on several devices, by one program for each
    mesh; others are left out. All processes take part.
    """
    meshes: dict[Mesh, dict[Any, jax.Array]] = {}
    for key, array in arrays.items():
        if can_have(array):
            meshes.setdefault(array.sharding.mesh, {})[key] = array
    found: dict[Any, OfParts] = {}
    for mesh, own in meshes.items():
        num_processes = len({device.process_index for device in mesh.devices.flat})
        with launches.lock:
            liveness.current.begin_program(num_processes)
            (pairs,) = told_by_all(
                "checksums", [hashing.of_own_parts(list(own.values()))], num_processes
            )
        columns = hashing.as_numbers(pairs).T.tolist()
        for hashes, (key, array) in zip(columns, own.items(), strict=True):
            where = array.sharding.devices_indices_map(array.shape)
            indices = [str(where[device]) for device in mesh.devices.flat]
            found[key] = OfParts(tuple(hashes), tuple(indices))
    return found


def can_have(array: Any) -> bool:
    """Whether a program can compute the checksum of what this is."""
    return (
        isinstance(array, jax.Array)
        and isinstance(array.sharding, NamedSharding)
        and isinstance(array.sharding.mesh, Mesh)
        and is_in_own_memory(array.sharding)
        and array.size > 0
    )


def on_host(array: np.ndarray[Any, Any]) -> int:
    """The checksum of an array in the memory of this process."""
    row, totals = np.ascontiguousarray(array).reshape(-1), []
    width = words.per_element(row.dtype)
    for begin in range(0, row.size, _BLOCK):
        block = words.of_numpy(row[begin : begin + _BLOCK])
        index = np.arange(len(block), dtype=np.uint32)
        index += np.uint32(begin * width % _WORD)
        pair = [int(m.sum(dtype=np.uint32)) for m in hashing.mixed(block, index)]
        totals.append(_joined(*pair))
    return _summed(totals)


def _joined(first: int, second: int) -> int:
    return first * _WORD + second


def _summed(hashes: Iterable[int]) -> int:
    """Both halves added up, each without a carry."""
    pairs: Sequence[tuple[int, int]] = [divmod(each, _WORD) for each in hashes]
    first, second = (sum(each) % _WORD for each in zip(*pairs, strict=True))
    return _joined(first, second)
