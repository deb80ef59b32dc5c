"""What the coordinator knows of rounds of local steps: the optimizer's slots of each
group, and how the results of the groups become one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from keras_distribute.remote.frames import Array
from keras_distribute.variables import Holder


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


class GroupSlots(Holder):
    """The slots of an optimizer, of which each group has its own. Who reads the
    variable sees the mean; what is assigned to it, all groups begin with.

    Args:
        groups: How many there are.
    """

    def __init__(self, groups: int) -> None:
        super().__init__(())
        self._groups = groups
        self._values: dict[int, tuple[Any, list[Array]]] = {}

    def value_of(self, variable: Any, group: int) -> Array:
        """What a group begins its next round with."""
        self._take(variable)
        return self._values[id(variable)][1][group]

    def values_of(self, variable: Any) -> list[Array] | None:
        """What each group has; `None` for a variable that is none of theirs."""
        link = variable._link
        own = link is not None and link[0] is self
        return list(self._values[id(variable)][1]) if own else None

    def set(self, variable: Any, group: int, value: Array) -> None:
        """Notes what a group has ended a round with."""
        self._take(variable)
        self._values[id(variable)][1][group] = value

    def _take(self, variable: Any) -> None:
        link = variable._link
        if link is None or link[0] is not self:
            value = np.asarray(variable.value)
            self._values[id(variable)] = variable, [value] * self._groups
            variable._link_to(self, id(variable))
            self.changed.clear()

    def _array(self, place: Any, variable: Any) -> Any:
        values = self._values[place][1]
        first = values[0]
        if jnp.issubdtype(first.dtype, jnp.inexact):
            first = mean(values, [1] * len(values))
        return variable._as_stored(jnp.asarray(first))
