"""How the state of a step travels from one step to the next: many small arrays as a few
buffers.

A compiled step costs about 2 µs for each array on each device before it computes
anything, so a thousand small arrays on 8 devices cost more than what is done with them.
A large array costs no more than a small one, and copying it would, so large ones stay
as they are.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from types import SimpleNamespace
from typing import Any

import jax

from keras_distribute.devices.mesh import ReplicaMesh
from keras_distribute.devices.placement import Placement
from keras_distribute.training.steps import buffer_slices

SMALL_BYTES = 64 * 1024
# Fewer small arrays are carried one by one: to take a buffer apart costs time, too.
MANY = 64
# Replicas on CPUs share few cores, and XLA hands what need not wait from thread to
# thread, of which an update has several operations for each weight: a few pay as one.
MANY_WEIGHTS_ON_CPUS = 3

Place = tuple[int, int]
State = tuple[Any, ...]  # Groups of arrays, each a list.


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Packed:
    """A state on its way to the next step.

    Args:
        buffers: The packed arrays, each one-dimensional.
        single: The groups of the state, with `None` in the places of packed arrays.
    """

    buffers: list[Any]
    single: State


def order_of(
    groups: Sequence[Sequence[Any]], packing: Packing | None
) -> tuple[list[Place], Any]:
    """The places of what a step carries, flat (buffers: `(-1, i)`); its structure."""

    def labels(g: int, count: int) -> list[SimpleNamespace]:
        return [SimpleNamespace(place=(g, i)) for i in range(count)]

    carried: Any = tuple(labels(g, len(group)) for g, group in enumerate(groups))
    if packing is not None:
        buffers = labels(-1, len(packing.buffers))
        carried = Packed(buffers, packing.without_packed(carried))
    leaves, structure = jax.tree.flatten(carried)
    return [leaf.place for leaf in leaves], structure


class Packing:
    """Which arrays of a state share a buffer.

    Args:
        state: Groups of arrays, or of anything with their shapes and dtypes; their
            names are those of `TrainState`.
        mesh: The devices the state is on.
        buffers: The places (group, index) of arrays that share a buffer in any case; of
            one dtype each.
        divided: Which of `buffers` are divided among the replicas.
        single: The places of arrays that share none.
        rest: Says where the buffers are between two steps.
    """

    def __init__(
        self,
        state: State,
        mesh: ReplicaMesh,
        buffers: Sequence[Sequence[Place]] = (),
        divided: Sequence[bool] = (),
        *,
        single: Collection[Place],
        rest: Placement,
    ) -> None:
        self.form, self._multiple = form_of(state), mesh.num_replicas
        self._on_cpu = mesh.platform == "cpu"
        self.buffers = [list(places) for places in buffers]
        taken = {place for places in self.buffers for place in places} | set(single)
        taken |= _used_between(state)
        small: defaultdict[Any, list[Place]] = defaultdict(list)
        for place in self._places():
            if place not in taken and is_small(self._shape(place)):
                small[self._shape(place).dtype].append(place)
        self.buffers += [places for places in small.values() if len(places) >= MANY]
        self.is_divided = any(divided)
        shardings = [mesh.split if split else mesh.replicated for split in divided]
        shardings += [mesh.replicated] * (len(self.buffers) - len(shardings))
        self._shardings = list(map(rest.in_programs, shardings))
        self._mesh = mesh
        self._join = jax.jit(
            lambda arrays: list(map(self._joined, arrays)),
            out_shardings=self._shardings,
        )
        self._split = jax.jit(
            lambda buffers: [self.parts(i, value) for i, value in enumerate(buffers)],
            out_shardings=mesh.replicated,
        )

    def __bool__(self) -> bool:
        return bool(self.buffers)

    def pack(self, state: State) -> Packed:
        """The state with its buffers filled; to be called in a compiled program."""
        return Packed(
            [self.joined(state, i) for i in range(len(self.buffers))],
            self.without_packed(state),
        )

    def unpack(self, packed: Packed) -> State:
        """The state as it was."""
        return self._filled(
            packed.single,
            [self.parts(i, value) for i, value in enumerate(packed.buffers)],
        )

    def _filled(self, single: State, arrays: list[list[Any]]) -> State:
        state: State = tuple(list(group) for group in single)
        for places, values in zip(self.buffers, arrays, strict=True):
            for (group, index), value in zip(places, values, strict=True):
                state[group][index] = value
        return state

    def around(
        self, step: Callable[[State, Any], tuple[Any, State]]
    ) -> Callable[[Packed, Any], tuple[Any, Packed]]:
        """A step on the packed state, from one on the state."""

        def packed_step(packed: Packed, data: Any) -> tuple[Any, Packed]:
            logs, state = step(self.unpack(packed), data)
            return logs, self.pack(state)

        return packed_step

    def pack_now(self, state: State) -> Packed:
        """The state packed, on the devices; single arrays are the same objects."""
        arrays = [
            [self._mesh.brought(state[group][index]) for group, index in places]
            for places in self.buffers
        ]
        return Packed(self._join(arrays), self.without_packed(state))

    def form_packed(self, state: State) -> Packed:
        """`pack_now` of shapes alone: `jax.ShapeDtypeStruct`s with shardings."""
        buffers = jax.eval_shape(
            lambda groups: self.pack(groups).buffers, form_of(state)
        )
        placed = [
            jax.ShapeDtypeStruct(buffer.shape, buffer.dtype, sharding=own)
            for buffer, own in zip(buffers, self._shardings, strict=True)
        ]
        return Packed(placed, self.without_packed(state))

    def unpack_now(self, packed: Packed) -> State:
        """The reverse."""
        return self._filled(
            packed.single, self._split(list(map(self._mesh.brought, packed.buffers)))
        )

    def shardings(self, groups: State) -> Packed:
        """Where the packed state is, from where the arrays are."""
        return Packed(self._shardings, self.without_packed(groups))

    def joined(self, state: State, buffer: int) -> Any:
        """One buffer, from the arrays of a state."""
        return self._joined(
            [state[group][index] for group, index in self.buffers[buffer]]
        )

    def _joined(self, arrays: Sequence[Any]) -> Any:
        size = sum(array.size for array in arrays)
        # So that it can be divided.
        return buffer_slices.joined(arrays, size + -size % self._multiple)

    def parts(self, buffer: int, value: Any) -> list[Any]:
        """The arrays of one buffer."""
        shapes = [self._shape(place).shape for place in self.buffers[buffer]]
        return buffer_slices.taken_apart(value, shapes, by_calls=self._on_cpu)

    def parts_of_buffers(self) -> list[list[tuple[Place, int, int]]]:
        """Of each buffer its arrays' places, first elements and sizes."""
        found: list[list[tuple[Place, int, int]]] = []
        for places in self.buffers:
            sizes = [math.prod(self._shape(place).shape) for place in places]
            starts = itertools.accumulate(sizes, initial=0)
            found.append(list(zip(places, starts, sizes, strict=False)))
        return found

    def without_packed(self, state: State) -> State:
        """The groups, with `None` in the places of packed arrays."""
        groups: State = tuple(list(group) for group in state)
        for group, index in itertools.chain(*self.buffers):
            groups[group][index] = None
        return groups

    def _places(self) -> list[Place]:
        return [(g, i) for g, group in enumerate(self.form) for i in range(len(group))]

    def _shape(self, place: Place) -> jax.ShapeDtypeStruct:
        return self.form[place[0]][place[1]]


def _used_between(state: Any) -> set[Place]:
    """The places of what Keras reads or sets between two steps: metrics, and scalars of
    an optimizer, such as its learning rate. For one of them its whole buffer would be
    taken apart, and filled again.
    """
    return {
        (g, i)
        for g, (name, group) in enumerate(state._asdict().items())
        for i, array in enumerate(group)
        if name == "metrics" or (name == "slots" and not array.shape)
    }


def form_of(
    state: Sequence[Sequence[Any]],
) -> tuple[tuple[jax.ShapeDtypeStruct, ...], ...]:
    """The shapes and dtypes of a state."""
    return tuple(
        tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in group) for group in state
    )


def many_weights(mesh: ReplicaMesh) -> int:
    """How many small weights are one long weight."""
    on_cpus = mesh.platform == "cpu" and mesh.num_replicas > 1
    return MANY_WEIGHTS_ON_CPUS if on_cpus else MANY


def is_small(array: Any) -> bool:
    """Whether an array costs more to hand over than to copy."""
    return math.prod(array.shape) * array.dtype.itemsize <= SMALL_BYTES
