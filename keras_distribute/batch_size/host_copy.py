"""A copy in host memory of all that a training step changes, to the bit, and back.

What each device has is copied by itself, so that copies which differ stay different,
and no process waits for another one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from keras_distribute.training.steps.state import StepState
from keras_distribute.variables import DistributedVariable


class _Copy(NamedTuple):
    """The array of one variable."""

    variable: Any
    shape: tuple[int, ...]
    sharding: Any
    parts: list[tuple[Any, np.ndarray[Any, Any]]]


class HostCopy:
    """The values of variables, while steps that are only tried change them.

    Args:
        variables: Ours, or Keras's own; each has a value.
    """

    def __init__(self, variables: Sequence[Any]) -> None:
        arrays = [_array_of(variable) for variable in variables]
        for array in arrays:
            array.copy_to_host_async()
        self._copies = [
            _copied(variable, array)
            for variable, array in zip(variables, arrays, strict=True)
        ]
        self._is_intact = True

    def give_away(self) -> None:
        """Gives the variables copies of those values, for a step to use up."""
        self._is_intact = False
        own = {id(copy.variable) for copy in self._copies}
        # What the steps of an earlier `fit` left would take memory twice.
        for holder in self._holders():
            if all(id(each) in own for group in holder.groups for each in group):
                holder.delete()
        self._put()

    def restore(self) -> None:
        """The values as they were, unless they still are."""
        if not self._is_intact:
            self._put()
            self._is_intact = True

    def bytes_on(self, device: Any) -> int:
        """What the values take of a device."""
        parts = [part for copy in self._copies for part in copy.parts]
        return sum(part.nbytes for where, part in parts if where == device)

    def _put(self) -> None:
        for copy in self._copies:
            on = partial(SingleDeviceSharding, memory_kind=copy.sharding.memory_kind)
            parts = [
                jax.device_put(part, on(device), may_alias=False)
                for device, part in copy.parts
            ]
            array = jax.make_array_from_single_device_arrays(
                copy.shape, copy.sharding, parts
            )
            if isinstance(copy.variable, DistributedVariable):
                copy.variable._value = array
            else:
                copy.variable.assign(array)

    def _holders(self) -> list[StepState]:
        links = [getattr(copy.variable, "_link", None) for copy in self._copies]
        found = {id(link[0]): link[0] for link in links if link is not None}
        return [each for each in found.values() if isinstance(each, StepState)]


def _array_of(variable: Any) -> jax.Array:
    if isinstance(variable, DistributedVariable):
        stored = variable.stored
        assert stored is not None
        return stored
    return variable.value


def _copied(variable: Any, array: jax.Array) -> _Copy:
    """The parts of an array by their devices; equal ones are one in host memory."""
    by_index: dict[str, np.ndarray[Any, Any]] = {}
    parts: list[tuple[Any, np.ndarray[Any, Any]]] = []
    for shard in array.addressable_shards:
        part, index = np.array(shard.data, copy=True), str(shard.index)
        known = by_index.setdefault(index, part)
        parts.append((shard.device, known if _same_bits(known, part) else part))
    return _Copy(variable, array.shape, array.sharding, parts)


def _same_bits(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> bool:
    first, second = (array.reshape(-1).view(np.uint8) for array in (one, other))
    return np.array_equal(first, second)
