"""What stays with the coordinator of variables that functions use: the values that it
sends along, and changes when they have returned.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, Generic, TypeVar

import jax.numpy as jnp
import numpy as np

from keras_distribute.devices.launches import launches
from keras_distribute.remote.frames import Array
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

    def _first(self, value: Array) -> Array:
        return value

    def _value(self, kept: Array) -> Array:
        return kept
