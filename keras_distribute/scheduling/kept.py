"""What stays with the coordinator of variables that functions use: the values that it
sends along, and changes when they have returned.
"""

from __future__ import annotations

import threading
from typing import Any, Generic, TypeVar

import jax.numpy as jnp
import numpy as np

from keras_distribute.remote.frames import Array
from keras_distribute.variables import Holder

_T = TypeVar("_T")


class OnCoordinator(Holder, Generic[_T]):
    """Variables whose values are here, each as a `_T`; one that is assigned leaves it,
    and is taken again when it is used.
    """

    def __init__(self) -> None:
        super().__init__(())
        self._values: dict[int, tuple[Any, _T]] = {}

    def _first(self, value: Array) -> _T:
        """What a variable begins with."""
        raise NotImplementedError

    def _value(self, kept: _T) -> Any:
        """What who reads the variable sees."""
        raise NotImplementedError

    def _taken(self, variable: Any) -> _T:
        """What is here of a variable, which is taken if it is not."""
        link = variable._link
        if link is None or link[0] is not self:
            self._values[id(variable)] = (
                variable,
                self._first(np.asarray(variable.value)),
            )
            variable._link_to(self, id(variable))
            self.changed.clear()
        return self._values[id(variable)][1]

    def _array(self, place: Any, variable: Any) -> Any:
        return variable._as_stored(jnp.asarray(self._value(self._values[place][1])))


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
            return self._taken(variable)

    def add(self, variable: Any, change: Array) -> None:
        """Adds to a variable."""
        with self.lock:
            old = self._taken(variable)
            new = np.asarray(old + change, old.dtype)
            self._values[id(variable)] = variable, new

    def set(self, variable: Any, value: Array) -> None:
        """Sets a variable."""
        with self.lock:
            self._taken(variable)
            self._values[id(variable)] = variable, value

    def _first(self, value: Array) -> Array:
        return value

    def _value(self, kept: Array) -> Array:
        return kept
