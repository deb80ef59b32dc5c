"""What stays with the coordinator of variables that functions use: the values that it
sends along, and changes when a function is scheduled, or has returned.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import jax.numpy as jnp
import numpy as np

from keras_distribute.devices.launches import launches
from keras_distribute.remote.frames import Array
from keras_distribute.scheduling.additions import Change
from keras_distribute.scheduling.programs import Traced
from keras_distribute.variables import Holder

_T = TypeVar("_T")


class Cell(Generic[_T]):
    """The place of a variable's value, which nobody else has: it goes with it."""

    def __init__(self, value: _T) -> None:
        self.value = value


class OnCoordinator(Holder, Generic[_T]):
    """Variables whose values are here, each as a `_T`; one that is assigned leaves it,
    and is taken again when it is used.
    """

    def __init__(self) -> None:
        super().__init__(())
        self.changed = weakref.WeakValueDictionary()

    def _first(self, value: Array) -> _T:
        """What a variable begins with."""
        raise NotImplementedError

    def _value(self, kept: _T) -> Any:
        """What who reads the variable sees."""
        raise NotImplementedError

    def _taken(self, variable: Any) -> Cell[_T]:
        """What is here of a variable, which is taken if it is not."""
        link = variable._link
        if link is None or link[0] is not self:
            with launches.lock:  # Another thread may assign it.
                cell = Cell(self._first(np.asarray(variable.value)))
                variable._link_to(self, cell)
                self.changed.clear()
            return cell
        return link[1]

    def _array(self, place: Any, variable: Any) -> Any:
        return variable._as_stored(jnp.asarray(self._value(place.value)))


class Kept(OnCoordinator[Array]):
    """The variables that stay with the coordinator, such as metrics: workers return
    what is to be added to them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.RLock()

    def value_of(self, variable: Any) -> Array:
        """The value, to send."""
        with self.lock:
            return self._taken(variable).value

    def add(self, variable: Any, change: Array) -> None:
        """Adds to a variable."""
        with self.lock:
            cell = self._taken(variable)
            cell.value = np.asarray(cell.value + change, cell.value.dtype)

    def set(self, variable: Any, value: Array) -> None:
        """Sets a variable."""
        with self.lock:
            self._taken(variable).value = value

    def are_assigned(self, variables: Sequence[Any]) -> bool:
        """Whether no function has changed any of them since all were assigned."""
        return not any(map(self._has, variables))

    def values_of(self, variables: Sequence[Any]) -> list[Any]:
        """Their values at one moment: NumPy's arrays of those that are here."""
        with self.lock:
            return [
                self.value_of(each) if self._has(each) else each.value
                for each in variables
            ]

    def taken_by(self, program: Traced) -> list[Array]:
        """The values that a program takes, but for what goes on with each step."""
        with self.lock:
            return list(map(self.value_of, program.kept))

    def advance(self, program: Traced) -> list[Array]:
        """What one step takes of seeds and counters, which go on."""
        with self.lock:
            values = list(map(self.value_of, program.advanced))
            for variable, constant in program.constants:
                self.add(variable, constant)
            return values

    def exchange(
        self,
        before: Traced,
        program: Traced,
        taken: tuple[Sequence[Array], Sequence[Array]],
    ) -> tuple[list[Array], list[Array]]:
        """What a step takes with another program than that it was scheduled with:
        values that it has not taken yet are those of now, without what it has added
        itself.

        Args:
            before: What it was scheduled with.
            program: For a batch of another form, as a number of rows is: what is added
                for the step may be something else.
            taken: What it has taken: the values, and those of seeds and counters.
        """
        known = dict(zip(map(id, before.kept), taken[0], strict=True))
        known |= zip(map(id, before.advanced), taken[1], strict=True)
        old = {id(variable): constant for variable, constant in before.constants}
        new = {id(variable): constant for variable, constant in program.constants}

        def value_of(variable: Any) -> Array:
            if id(variable) in known:
                return known[id(variable)]
            value = self.value_of(variable)
            return value - old[id(variable)] if id(variable) in old else value

        # Of seeds, which are unsigned.
        with self.lock, np.errstate(over="ignore"):
            values = list(map(value_of, program.kept))
            seeds = list(map(value_of, program.advanced))
            variables = {id(v): v for v, _ in (*before.constants, *program.constants)}
            for key, variable in variables.items():
                zero = np.zeros(variable.shape, variable._dtype)
                change = new.get(key, zero) - old.get(key, zero)
                if np.any(change):
                    self.add(variable, change)
            return values, seeds

    def finish(self, program: Traced, changes: Sequence[Array]) -> None:
        """Takes what a function has made: who looks sees all of a step, or nothing."""
        with self.lock:
            for (kind, variable), change in zip(program.changes, changes, strict=True):
                if kind is Change.SET:
                    self.set(variable, change)
                else:
                    self.add(variable, change)

    def _has(self, variable: Any) -> bool:
        return variable._link is not None and variable._link[0] is self

    def _first(self, value: Array) -> Array:
        return value

    def _value(self, kept: Array) -> Array:
        return kept
