"""What exists once and must stay as it is, from one check to the next: parts of frozen
weights that are divided over the devices.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from keras_distribute.consistency import checksums
from keras_distribute.consistency.copies import groups_of
from keras_distribute.consistency.report import Difference
from keras_distribute.devices.launches import launches
from keras_distribute.devices.mesh import ReplicaMesh
from keras_distribute.devices.names import name_of
from keras_distribute.variables import DistributedVariable, standing


@dataclasses.dataclass(frozen=True)
class _Known:
    """What a variable was at a check."""

    hashes: checksums.OfParts
    assignments: int
    step: int


class Kept:
    """Remembers the checksums of variables of which there are no copies."""

    def __init__(self, mesh: ReplicaMesh) -> None:
        self._mesh = mesh
        self._known: dict[int, _Known] = {}

    @property
    def knows_any(self) -> bool:
        """Whether there was something to remember at the last look."""
        return bool(self._known)

    def look(
        self, variables: Sequence[Any], unchanged: Sequence[Any], step: int
    ) -> list[Difference]:
        """Compares the parts of variables with what they were at the last look. All
        processes take part.

        Args:
            variables: Those with copies are left out.
            unchanged: Those that no step changes. An assignment may.
        """
        ours = {id(v): v for v in variables if isinstance(v, DistributedVariable)}
        with launches.lock:
            arrays = {
                id(each.parts[0].variable): each.array
                for each in standing(ours.values())
                if not each.is_packed and not groups_of(each.array, self._mesh)
            }
            now = checksums.of_arrays(arrays)
        must_stay, found = set(map(id, unchanged)), list[Difference]()
        for key, hashes in now.items():
            variable, before = ours[key], self._known.get(key)
            known = _Known(hashes, variable._assignments, step)
            is_same = before is not None and before.assignments == known.assignments
            if before is not None and is_same and key in must_stay:
                found += self._differences(variable, arrays[key], before, hashes)
            self._known[key] = known
        return found

    def _differences(
        self, variable: Any, array: Any, before: _Known, now: checksums.OfParts
    ) -> list[Difference]:
        own = zip(before.hashes.of_devices, now.of_devices, strict=True)
        size = math.prod(array.sharding.shard_shape(array.shape))
        return [
            Difference(
                path=variable.path,
                replica=self._mesh.replica_at(place),
                device=name_of(self._mesh.devices[place]),
                process=self._mesh.devices[place].process_index,
                beside="",
                is_wrong=True,
                size=size,
                since=before.step,
            )
            for place, (old, new) in enumerate(own)
            if old != new
        ]
