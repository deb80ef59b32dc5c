"""What the coordinator knows of rounds of local steps: the optimizer's slots of each
group, and how the results of the groups become one.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from keras_distribute.errors import DistributeError
from keras_distribute.remote.frames import Array
from keras_distribute.scheduling.kept import Cell, OnCoordinator

Ask = Callable[[int, int, int, int], list[Array]]
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

    They are those of the last round that has ended: what groups make in the one that is
    under way counts when `end` says so, together with what becomes of the weights; of a
    round that was broken off, never.

    Args:
        numbered: Says what workers call them.
        cells: What is here of each slot.
        groups: How many.
        ask: From a worker, the number, a group and a round to the slots that it has.
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
        self._lock = threading.Lock()
        self._begun = 0
        self._holders: list[int | None] = [None] * groups
        self._rounds = [0] * groups  # That made what its holder has.
        self._ages = [0] * groups  # Rounds since those here were the last ones.
        self._made: dict[int, int | None] = {}  # In this round, by which worker.

    def begin(self) -> int:
        """The number of a round that begins."""
        with self._lock:
            self._made = {}
            self._begun += 1
            return self._begun

    def note(self, group: int, number: int, worker: int) -> None:
        """A worker has run a group in a round."""
        with self._lock:
            if number == self._begun:
                self._made[group] = worker

    def end(self) -> None:
        """The round has ended: what its groups have made are their slots."""
        with self._lock:
            for group, worker in self._made.items():
                self._holders[group], self._rounds[group] = worker, self._begun
                self._ages[group] += 1
            self._made = {}

    def holder_of(self, group: int) -> int | None:
        """The worker that has the slots of a group; `None` where no one has."""
        return self._holders[group]

    def round_of(self, group: int, worker: int) -> int | None:
        """The round that made the slots of a group, if a worker has them."""
        with self._lock:
            return self._rounds[group] if self._holders[group] == worker else None

    def groups_of(self, worker: int) -> list[int]:
        """The groups whose slots a worker has, of the last round or of this one."""
        with self._lock:
            groups = range(len(self._holders))
            return [
                group
                for group in groups
                if worker in (self._holders[group], self._made.get(group))
            ]

    def here(self, group: int) -> list[Array] | None:
        """What is here of a group's slots; `None` where some are gone."""
        with self._lock:
            cells = [known() for known in self._cells]
            found = [cell.value.of_groups[group] for cell in cells if cell is not None]
        return found if len(found) == len(cells) else None

    def collect(self) -> None:
        """Gets the last slots of each group."""
        for group in range(len(self._holders)):
            self._collect(group)

    def spread(self, workers: Iterable[int]) -> None:
        """Takes a group from each worker that has several, for one that has none."""
        free = len(set(workers).difference(self._holders))
        free -= self._holders.count(None)  # They take those that no one has.
        for group, holder in enumerate(self._holders):
            if free > 0 and holder is not None and holder in self._holders[:group]:
                self._collect(group)
                with self._lock:
                    self._holders[group] = None
                free -= 1

    def release(self, worker: int) -> None:
        """A worker has nothing any more."""
        lost: dict[int, int] = {}
        with self._lock:
            for group, holder in enumerate(self._holders):
                if holder == worker:
                    lost[group], self._ages[group] = self._ages[group], 0
                    self._holders[group] = None
            for group, maker in self._made.items():
                if maker == worker:
                    lost[group] = lost.get(group, 0) + 1
                    self._made[group] = None
        for group, age in lost.items():
            if age:
                _log.warning(
                    "worker:%d took the optimizer's slots of group %d along, which "
                    "goes on with those of %d round(s) before.",
                    worker,
                    group,
                    age,
                )

    def _collect(self, group: int) -> None:
        while True:
            with self._lock:
                worker, number = self._holders[group], self._rounds[group]
                if worker is None or not self._ages[group]:
                    return
            try:
                found = self._ask(worker, self.number, group, number)
            except DistributeError:
                self.release(worker)
                return
            with self._lock:
                # Another thread may have ended a round meanwhile.
                if (self._holders[group], self._rounds[group]) != (worker, number):
                    continue
                for known, array in zip(self._cells, found, strict=True):
                    cell = known()
                    if cell is not None:
                        cell.value.of_groups[group] = array
                self._ages[group] = 0
                return


class HeldGroup(NamedTuple):
    """Of which group a function takes the slots first, and makes them first.

    Attributes:
        number: Of the round.
        size: How many slots there are.
    """

    held: Held
    group: int
    number: int
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
        self._lock = threading.Lock()  # Workers' threads look at all.

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
        with self._lock:
            self._all_held.add(held)
        return held

    def release(self, worker: int) -> None:
        """A worker has nothing any more."""
        for held in self._listed():
            held.release(worker)

    def collect(self) -> None:
        """Gets the last slots from all workers."""
        for held in self._listed():
            held.collect()

    def _listed(self) -> list[Held]:
        with self._lock:
            return list(self._all_held)

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
