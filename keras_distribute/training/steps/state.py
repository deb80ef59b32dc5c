"""The state of a step between two calls of it, and what Keras sees of it.

The step has the values of a model's variables from its first call on;
`variables/holding.py` says how the variables find them. Keras, which hands a step its
state and takes the new one back, gets `StateGroup`s: sequences that show the variables'
present values to whoever looks, and cost nothing where nobody does.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from keras_distribute._compat import trees
from keras_distribute.devices.launches import Landing, launches
from keras_distribute.devices.mesh import ReplicaMesh
from keras_distribute.devices.placement import Placement
from keras_distribute.errors import ContextError
from keras_distribute.training.steps.packed_state import Packing, Place, State, order_of
from keras_distribute.variables import (
    DistributedVariable,
    Holder,
    Part,
    Standing,
    first_deleted,
)


class StateGroup(Sequence[Any]):
    """The values of some variables as a sequence, in place of Keras's list of arrays.

    Args:
        variables: Whose values it shows. It holds none itself.
    """

    def __init__(self, variables: Sequence[Any]) -> None:
        self.variables = variables

    def __len__(self) -> int:
        return len(self.variables)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [variable.value for variable in self.variables[index]]
        return self.variables[index].value

    def synchronized(self) -> None:
        """Lets the variables show, as Keras names it, that they have values."""
        for variable in self.variables[:1]:
            if variable._link is not None:
                variable._link[0].is_running = False

    def __repr__(self) -> str:
        return f"StateGroup({len(self)} variables)"


trees.register_sequence(StateGroup)


class StepState(Holder):
    """The state that a step takes and returns, as a flat list of arrays.

    Args:
        packing: Which of them share a buffer; `None` if none do.
        components: Those whose components on the replicas the step takes.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[DistributedVariable]],
        packing: Packing | None,
        components: Collection[Place],
        placement: Placement,
    ) -> None:
        super().__init__(
            (
                ((g, i), variable)
                for g, group in enumerate(groups)
                for i, variable in enumerate(group)
            ),
            placement,
        )
        self.groups, self._packing = groups, packing
        self._components = frozenset(components)
        self._unpacked: tuple[Any, dict[int, list[Any]]] = (None, {})
        self._stored: dict[Place, Any] = {}
        places, _ = order_of(groups, packing)
        self._index = {place: i for i, place in enumerate(places)}
        self._in_buffer = {
            place: (buffer, i)
            for buffer, places in enumerate(packing.buffers if packing else ())
            for i, place in enumerate(places)
        }

    def is_of(self, groups: Sequence[Sequence[Any]]) -> bool:
        """Whether it holds the values of these variables, in this order."""
        return groups is self.groups or ids_of(groups) == ids_of(self.groups)

    def take(self) -> Any:
        # The arrays end with their step.
        self._unpacked, self._stored = (None, {}), {}
        return super().take()

    def put(self, groups: State) -> None:
        """Takes new values from a step that is not compiled."""
        variables = [variable for group in self.groups for variable in group]
        values = [value for group in groups for value in group]
        rested = [v.rested(a) for v, a in zip(variables, values, strict=True)]
        self.landing[:] = [(None, rested)]

    def delete(self) -> None:
        """Frees the arrays: its variables have no value before they are assigned."""
        with launches.lock:
            launches.settle()
            self._unpacked, self._stored = (None, {}), {}
            for _, arrays in self.landing:
                for array in arrays:
                    if array is not None:
                        array.delete()

    def forget(self, place: Place) -> None:
        self._stored.pop(place, None)
        if place in self._index:
            self.landing[-1][1][self._index[place]] = None

    def standing(
        self, links: Sequence[tuple[Place, DistributedVariable]]
    ) -> list[Standing]:
        arrays, asked, found = self.landing[-1][1], dict(links), list[Standing]()
        for place, variable in links:
            if place in self._index:
                index = self._index[place]
                whole = Part(variable, 0, arrays[index].size)
                found.append(self._standing_at(index, [whole]))
        packing = self._packing
        for i, places in enumerate(packing.parts_of_buffers() if packing else ()):
            parts = [
                Part(asked[place], start, size)
                for place, start, size in places
                if place in asked
            ]
            if parts:
                found.append(self._standing_at(self._index[-1, i], parts))
        return found

    def across(self, place: Place, variable: DistributedVariable) -> Any:
        if place in self._components:
            return None
        return self._read(place, variable, self._element_of)

    def _element_of(self, place: Place, _: DistributedVariable) -> Any:
        state = self.landing[-1][1]
        if self._unpacked[0] is not state:
            self._unpacked, self._stored = (state, {}), {}
        return self._element_in(state, place)

    def _with(self, changed: dict[Place, DistributedVariable]) -> list[Any]:
        state: list[Any] = [None] * len(self._index)
        leaves = list(self.landing[-1][1]) if self.landing else state
        arrays = dict[int, list[Any]]()
        for place, variable in changed.items():
            if place in self._index:
                value = self._element(place, variable)
                if isinstance(value, np.ndarray):
                    value = variable.replica_mesh.put(value, variable.value_sharding)
                leaves[self._index[place]] = value
            elif (buffer := self._in_buffer[place][0]) not in arrays:
                assert self._packing is not None
                arrays[buffer] = [
                    self._element((g, i), self.groups[g][i])
                    for g, i in self._packing.buffers[buffer]
                ]
        if self._packing is not None and arrays:
            for buffer, value in self._packing.pack_now(arrays).items():
                leaves[self._index[-1, buffer]] = value
        return leaves

    def _element(self, place: Place, variable: DistributedVariable) -> Any:
        """What the step takes for a variable."""
        return variable.stored if place in self._components else variable.in_step

    def _name_at(self, index: int, array: Any) -> str:
        g, i = next(place for place, at in self._index.items() if at == index)
        if g < 0:
            assert self._packing is not None
            g, i = self._packing.buffers[i][0]  # Where its first variable is.
        variable: Any = self.groups[g][i]
        return repr(variable.path)

    def _array(self, place: Place, variable: DistributedVariable) -> Any:
        if self._unpacked[0] is not self.landing[-1][1] or place not in self._stored:
            element = self._element_of(place, variable)
            if element is None:
                return None
            if place not in self._components:
                element = variable._as_stored(element)
            self._stored[place] = element
        return self._stored[place]

    def _element_in(self, state: list[Any], place: Place) -> Any:
        """An array of the state; `None` for one that was deleted."""
        if place in self._index:
            array = state[self._index[place]]
            return None if array is None or array.is_deleted() else array
        assert self._packing is not None
        buffer, i = self._in_buffer[place]
        if buffer not in self._unpacked[1]:
            value = state[self._index[-1, buffer]]
            if value.is_deleted():
                return None
            self._unpacked[1][buffer] = self._packing.unpack_now(buffer, value)
        return self._unpacked[1][buffer][i]


class ArrayState:
    """The state of one step of a model that keeps it by itself, as a `Holder`'s."""

    def __init__(self, groups: State, mesh: ReplicaMesh) -> None:
        self._sizes = [len(group) for group in groups]
        arrays = [array for group in groups for array in group]
        leaves = [
            array
            if getattr(array, "sharding", None) == mesh.replicated
            else mesh.put_replicated(array)
            for array in arrays
        ]
        self.landing: Landing = [(None, leaves)]

    def take(self) -> list[Any]:
        """The arrays."""
        arrays = self.landing[-1][1]
        deleted = first_deleted(arrays)
        if deleted is not None:
            raise ContextError(
                "A step deletes the state that it is given; one of its arrays is "
                "deleted already.",
                received=f"an array of shape {arrays[deleted].shape}.",
                fix="the state that the last step has returned: logs, state = "
                "model.train_function(state, iterator).",
            )
        return arrays

    def landed(self) -> Any:
        return self.landing[-1][0]

    def groups(self) -> State:
        """The new values."""
        left = iter(self.landing[-1][1])
        return tuple([next(left) for _ in range(size)] for size in self._sizes)


def ids_of(groups: Sequence[Sequence[Any]]) -> tuple[tuple[int, ...], ...]:
    """Which variables these are, while somebody has them."""
    return tuple(tuple(map(id, group)) for group in groups)


def is_held(state: Sequence[Any]) -> bool:
    """Whether a state that Keras handed over only shows what a `StepState` holds."""
    return all(isinstance(group, StateGroup) for group in state)
