"""A check, from the variables to the report: hashes first, and what differs after."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from keras_distribute.cluster import liveness
from keras_distribute.consistency import elements, hashing, words
from keras_distribute.consistency.copies import Group, Verdict, groups_of, verdict
from keras_distribute.consistency.report import ConsistencyReport, Difference, Element
from keras_distribute.consistency.telling import told_by_all
from keras_distribute.devices.launches import launches
from keras_distribute.devices.mesh import ReplicaMesh
from keras_distribute.devices.names import name_of
from keras_distribute.errors import ReplicaConsistencyError
from keras_distribute.variables import Part, Standing, standing

_log = logging.getLogger(__name__)
ACTIONS = ("raise", "report", "repair")
# Arrays up to this size are hashed together: one kernel instead of one each.
_SMALL_BYTES = 64 * 1024
_MOST_COMPARED = 20  # Variables, element by element.


def check(
    mesh: ReplicaMesh,
    variables: Sequence[Any],
    action: str = "raise",
    step: int | None = None,
) -> ConsistencyReport:
    """Compares the copies of variables.

    Args:
        action: One of `ACTIONS`.

    Raises:
        ReplicaConsistencyError: Where copies differ, unless `action` is another.
    """
    with launches.lock:
        return _Check(mesh, variables, step).done(action)


@dataclasses.dataclass(frozen=True)
class _Found:
    """A variable with a copy that differs."""

    standing: Standing
    part: Part
    verdict: Verdict


class _Check:
    """One check. The caller holds `launches.lock`."""

    def __init__(
        self, mesh: ReplicaMesh, variables: Sequence[Any], step: int | None
    ) -> None:
        self._mesh = mesh
        arrays = standing(variables)
        self._groups = {id(each): groups_of(each.array, mesh) for each in arrays}
        self._arrays = [each for each in arrays if self._groups[id(each)]]
        compared = [part.variable for each in self._arrays for part in each.parts]
        ids = set(map(id, compared))
        self._report = ConsistencyReport(
            num_variables=len(compared),
            num_replicas=mesh.num_replicas,
            skipped=tuple(v.path for v in variables if id(v) not in ids),
            step=step,
        )

    def done(self, action: str) -> ConsistencyReport:
        found = self._found()
        if not found:
            return self._report
        differences = [
            difference
            for number, each in enumerate(found)
            for difference in self._differences(each, number < _MOST_COMPARED)
        ]
        report = dataclasses.replace(self._report, differences=tuple(differences))
        if action == "raise":
            raise differing(report)
        if action == "repair":
            report = self._repaired(found, report)
        return report

    def _found(self) -> list[_Found]:
        if not self._arrays:
            return []
        units = list(_units(self._arrays))
        number = {id(each): i for i, each in enumerate(self._arrays)}
        layout = tuple(tuple(number[id(each)] for each in unit) for unit in units)
        hashes = self._hashes(
            hashing.of_arrays([each.array for each in self._arrays], layout)
        )
        found: list[_Found] = []
        for i, unit in enumerate(units):
            groups = self._groups[id(unit[0])]
            said = [verdict(group, hashes[i]) for group in groups]
            places = [place for each in said if each for place in each.differing]
            if places:
                in_unit = self._found_in(unit, groups, hashes[i])
                found += in_unit
                if not in_unit:
                    self._warn_of_hashes(places)
        return found

    def _warn_of_hashes(self, places: Sequence[int]) -> None:
        """Of copies that are the same, of which devices have computed other hashes."""
        _log.warning(
            "The copies of the replicas are the same, but %s computed another hash of "
            "them, once: a device that errs when it computes.",
            " and ".join(map(self._who, places)),
        )

    def _found_in(
        self, unit: Sequence[Standing], groups: Sequence[Group], hashes: list[int]
    ) -> list[_Found]:
        """The variables in arrays that are hashed together."""
        if len(unit) == 1 and not unit[0].is_packed:
            parts = [(unit[0], unit[0].parts[0])]
            of_each = [hashes]
        else:
            pieces = [piece for each in unit for piece in _pieces(each)]
            sizes = [size for _, _, size in pieces]
            every = self._hashes(hashing.of_parts([each.array for each in unit], sizes))
            known = [
                (each, part, own)
                for (each, part, _), own in zip(pieces, every, strict=True)
                if part is not None
            ]
            parts = [(each, part) for each, part, _ in known]
            of_each = [own for _, _, own in known]
        return [
            _Found(each, part, said)
            for (each, part), own in zip(parts, of_each, strict=True)
            for group in groups
            if (said := verdict(group, own)) is not None
        ]

    def _hashes(self, array: jax.Array) -> list[list[int]]:
        """For each thing that was hashed, the hash on each device."""
        liveness.current.begin_program(self._mesh.num_processes)
        (pairs,) = told_by_all(
            "the hashes of a check of consistency", [array], self._mesh.num_processes
        )
        return hashing.as_numbers(pairs).T.tolist()

    def _differences(self, found: _Found, in_detail: bool) -> Iterator[Difference]:
        """The copies that differ, in words; all processes take part."""
        mesh, part, said = self._mesh, found.part, found.verdict
        results: Any = None
        size = part.size
        if in_detail:
            size = _size_on_a_device(found)
            liveness.current.begin_program(mesh.num_processes)
            results = told_by_all(
                "the elements of a check of consistency",
                elements.compared(found.standing, part.start, size, said.reference),
                mesh.num_processes,
            )
        beside = self._who(said.reference)
        for place in said.differing:
            device = mesh.devices[place]
            difference = Difference(
                path=part.variable.path,
                replica=mesh.replica_at(place),
                device=name_of(device),
                process=device.process_index,
                beside=beside,
                is_wrong=said.is_right,
                size=size,
            )
            if results is not None:
                count, first, own, other, largest = (each[place] for each in results)
                difference = dataclasses.replace(
                    difference,
                    num_elements=int(count),
                    largest=float(largest),
                    elements=tuple(
                        _element(found, device, int(i), a, b)
                        for i, a, b in zip(first, own, other, strict=True)
                        if i < size
                    ),
                )
            yield difference

    def _who(self, place: int) -> str:
        device = self._mesh.devices[place]
        replica = self._mesh.replica_at(place)
        return f"replica {replica} ({name_of(device)}, process {device.process_index})"

    def _repaired(
        self, found: Sequence[_Found], report: ConsistencyReport
    ) -> ConsistencyReport:
        if not all(each.verdict.is_right for each in found):
            raise ReplicaConsistencyError(
                f"{report.heading} Nobody knows which copies are right.",
                received="\n    ".join(["", *report.lines]).strip(),
                fix="three replicas or more, of which most agree; or restore the last "
                "checkpoint.",
                report=report,
            )
        # One array may have several variables that differ.
        latest = {id(each.standing): each.standing for each in found}
        for each in found:
            old, said = latest[id(each.standing)], each.verdict
            liveness.current.begin_program(self._mesh.num_processes)
            array = elements.repaired(
                old,
                each.part.start,
                _size_on_a_device(each),
                said.reference,
                said.differing,
            )
            latest[id(each.standing)] = dataclasses.replace(old, array=array)
        for each in latest.values():
            each.replace(each.array)
        return dataclasses.replace(report, is_repaired=True)


def _units(arrays: Sequence[Standing]) -> Iterator[list[Standing]]:
    """The arrays that are hashed together."""
    small: list[Standing] = []
    for each in arrays:
        array = each.array
        is_alone = each.is_packed or not array.sharding.is_fully_replicated
        if is_alone or array.nbytes > _SMALL_BYTES:
            yield [each]
        else:
            small.append(each)
    if small:
        yield small


def _pieces(each: Standing) -> Iterator[tuple[Standing, Part | None, int]]:
    """What an array consists of, in words: its variables, and what is between them."""
    width, end = words.per_element(each.array.dtype), 0
    for part in each.parts:
        if part.start > end:
            yield each, None, width * (part.start - end)
        yield each, part, width * part.size
        end = part.start + part.size
    if each.array.size > end:
        yield each, None, width * (each.array.size - end)


def _size_on_a_device(found: _Found) -> int:
    """How many elements of the variable a device has."""
    if found.standing.is_packed:
        return found.part.size
    array = found.standing.array
    return math.prod(array.sharding.shard_shape(array.shape))


def _element(
    found: _Found, device: jax.Device, number: int, own: Any, other: Any
) -> Element:
    array = found.standing.array
    shape: Any = tuple(found.part.variable.shape)
    begin = [0] * len(shape)
    if not found.standing.is_packed:
        shape = array.sharding.shard_shape(array.shape)
        where = array.sharding.devices_indices_map(array.shape)[device]
        begin = [part.start or 0 for part in where]
    index = np.unravel_index(number, shape)
    width = 8 * np.dtype(array.dtype).itemsize
    apart = [int(a) ^ int(b) for a, b in zip(own, other, strict=True)]
    bits = [
        32 * i + bit
        for i, word in enumerate(apart)
        for bit in range(32)
        if word >> bit & 1
    ]
    return Element(
        index=tuple(int(a) + b for a, b in zip(index, begin, strict=True)),
        value=_value(own, array.dtype),
        other=_value(other, array.dtype),
        bits=tuple(bit for bit in bits if bit < max(width, 8)),
    )


def _value(own: np.ndarray[Any, Any], dtype: Any) -> Any:
    """The number that these words make."""
    dtype = np.dtype(dtype)
    row = np.ascontiguousarray(own, dtype="<u4").tobytes()
    return np.frombuffer(row[: dtype.itemsize], dtype)[0]


def differing(report: ConsistencyReport) -> ReplicaConsistencyError:
    """The error that says what a check found."""
    wrong = [each for each in report.differences if each.is_wrong]
    devices = ", ".join(dict.fromkeys(each.device for each in wrong))
    if any(each.since is not None for each in report.differences):
        fix = (
            "restore the last checkpoint: what exists once cannot be repaired. Without "
            f"{devices}, if it happens again."
        )
    elif devices:
        fix = (
            f'action="repair" takes the copies that most replicas have; without '
            f"{devices}, if it happens again."
        )
    else:
        fix = (
            "restore the last checkpoint. Of two copies nobody knows which is right; "
            "of three, what two say."
        )
    return ReplicaConsistencyError(
        report.heading,
        received="\n    ".join(report.lines),
        fix=fix,
        report=report,
    )
