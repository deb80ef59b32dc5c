"""What the coordinator knows of rounds of local steps: the optimizer's slots of each
group, and how the results of the groups become one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from keras_distribute.remote.frames import Array
from keras_distribute.scheduling.kept import OnCoordinator


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


class GroupSlots(OnCoordinator[list[Array]]):
    """The slots of an optimizer, of which each group has its own. Who reads the
    variable sees the mean; what is assigned to it, all groups begin with.

    Args:
        groups: How many there are.
    """

    def __init__(self, groups: int) -> None:
        super().__init__()
        self._groups = groups

    def value_of(self, variable: Any, group: int) -> Array:
        """What a group begins its next round with."""
        return self._taken(variable).value[group]

    def values_of(self, variable: Any) -> list[Array] | None:
        """What each group has; `None` for a variable that is none of theirs."""
        link = variable._link
        if link is None or link[0] is not self:
            return None
        return list(link[1].value)

    def set(self, variable: Any, group: int, value: Array) -> None:
        """Notes what a group has ended a round with."""
        self._taken(variable).value[group] = value

    def _first(self, value: Array) -> list[Array]:
        return [value] * self._groups

    def _value(self, kept: list[Array]) -> Array:
        inexact = jnp.issubdtype(kept[0].dtype, jnp.inexact)
        return mean(kept, [1] * len(kept)) if inexact else kept[0]
