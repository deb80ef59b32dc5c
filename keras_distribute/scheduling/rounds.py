"""What the coordinator knows of rounds of local steps: the optimizer's slots of each
group, and how the results of the groups become one.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from keras_distribute.errors import DistributeError
from keras_distribute.remote.frames import Array
from keras_distribute.scheduling.kept import Cell, OnCoordinator

Ask = Callable[[int, int, int], list[Array]]
_log = logging.getLogger(__name__)


def blocks(batches: Sequence[Any], size: int) -> list[list[Any]]:
    """Batches in their order, `size` for each group; the last has what is left."""
    return [list(batches[i : i + size]) for i in range(0, len(batches), size)]


def mean(arrays: Iterable[Array], steps: Sequence[int]) -> Array:
    """The mean over groups, each of which counts by its steps."""
    total, dtype = np.zeros((), np.float32), np.dtype(np.float32)
    for array, own in zip(arrays, steps, strict=True):
        dtype = array.dtype
        wide = array.astype(np.promote_types(np.float32, dtype), copy=False)
        total = total + wide * wide.dtype.type(own / sum(steps))
    return np.asarray(total, dtype)


def sum_of(arrays: Sequence[Array]) -> Array:
    """The sum over groups."""
    return np.asarray(sum(arrays[1:], start=arrays[0]), arrays[0].dtype)


class Held:
    """The slots of one optimizer, each group's on the worker that has run it last.

    Args:
        numbered: Says what workers call them.
        cells: What is here of each slot.
        groups: How many.
        ask: From a worker, the number and a group to the slots that it has.
    """

    def __init__(
        self,
        numbered: Callable[[Held], int],
        cells: Sequence[Cell[_Slots]],
        groups: int,
        ask: Ask,
    ) -> None:
        self.number, self._ask = numbered(self), ask
        self._cells = [weakref.ref(cell) for cell in cells]  # They have this.
        self._holders: list[int | None] = [None] * groups
        self._ages = [0] * groups  # Rounds since those here were the last ones.

    def holder_of(self, group: int) -> int | None:
        """The worker that has the slots of a group; `None` where no one has."""
        return self._holders[group]

    def note(self, group: int, worker: int) -> None:
        """A worker has run a group."""
        self._holders[group] = worker
        self._ages[group] += 1

    def collect(self) -> None:
        """Gets the last slots of each group."""
        for group in range(len(self._holders)):
            self._collect(group)

    def spread(self, workers: Iterable[int]) -> None:
        """Takes a group from each worker that has several, for one that has none."""
        free = len(set(workers).difference(self._holders))
        for group, holder in enumerate(self._holders):
            if free and holder in self._holders[:group]:
                self._collect(group)
                self._holders[group] = None
                free -= 1

    def release(self, worker: int) -> None:
        """A worker has nothing any more."""
        for group, holder in enumerate(self._holders):
            if holder != worker:
                continue
            age, self._ages[group], self._holders[group] = self._ages[group], 0, None
            if age:
                _log.warning(
                    "worker:%d took the optimizer's slots of group %d along, which "
                    "goes on with those of %d round(s) before.",
                    worker,
                    group,
                    age,
                )

    def _collect(self, group: int) -> None:
        worker = self._holders[group]
        if worker is None or not self._ages[group]:
            return
        try:
            found = self._ask(worker, self.number, group)
        except DistributeError:
            self.release(worker)
            return
        for known, array in zip(self._cells, found, strict=True):
            cell = known()
            if cell is not None:
                cell.value.of_groups[group] = array
        self._ages[group] = 0


class HeldGroup(NamedTuple):
    """Of which group a function takes the slots first, and makes them first."""

    held: Held
    group: int
    size: int

    @property
    def holder(self) -> int | None:
        """The worker that has them."""
        return self.held.holder_of(self.group)


class _Slots:
    """One slot: of each group what is here, and who may have newer ones."""

    def __init__(self, of_groups: list[Array]) -> None:
        self.of_groups = of_groups
        self.held: Held | None = None


class GroupSlots(OnCoordinator[_Slots]):
    """The slots of optimizers, of which each group has its own. Who reads the variable
    sees the mean; what is assigned to it, all groups begin with.

    Args:
        groups: How many there are.
        ask: As that of `Held`.
    """

    def __init__(self, groups: int, ask: Ask) -> None:
        super().__init__()
        self._groups, self._ask = groups, ask
        self._all_held = weakref.WeakSet[Held]()

    def value_of(self, variable: Any, group: int) -> Array:
        """What a group begins its next round with, if no worker has it."""
        return self._taken(variable).value.of_groups[group]

    def values_of(self, variable: Any) -> list[Array] | None:
        """What each group has; `None` for a variable that is none of theirs."""
        link = variable._link
        if link is None or link[0] is not self:
            return None
        return list(self._collected(link[1].value))

    def set(self, variable: Any, group: int, value: Array) -> None:
        """Notes what a group has ended a round with."""
        slots = self._taken(variable).value
        self._collected(slots)[group] = value
        slots.held = None

    def held(self, variables: Sequence[Any], numbered: Callable[[Held], int]) -> Held:
        """The slots of an optimizer, which workers have.

        Args:
            variables: All of its slots.
            numbered: As that of `Held`.
        """
        cells = [self._taken(variable) for variable in variables]
        known = [cell.value.held for cell in cells]
        first = known[0] if known else None
        if first is not None and all(each is first for each in known):
            return first
        # Some were assigned: all groups begin with what is here now.
        held = Held(numbered, cells, self._groups, self._ask)
        for cell in cells:
            self._collected(cell.value)
            cell.value.held = held
        self._all_held.add(held)
        return held

    def release(self, worker: int) -> None:
        """A worker has nothing any more."""
        for held in list(self._all_held):
            held.release(worker)

    def collect(self) -> None:
        """Gets the last slots from all workers."""
        for held in list(self._all_held):
            held.collect()

    def _collected(self, slots: _Slots) -> list[Array]:
        if slots.held is not None:
            slots.held.collect()
        return slots.of_groups

    def _first(self, value: Array) -> _Slots:
        return _Slots([value] * self._groups)

    def _value(self, kept: _Slots) -> Array:
        found = self._collected(kept)
        inexact = jnp.issubdtype(found[0].dtype, jnp.inexact)
        return mean(found, [1] * len(found)) if inexact else found[0]
