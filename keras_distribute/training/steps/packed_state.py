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
from collections.abc import Callable, Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np

from keras_distribute.devices.mesh import ReplicaMesh, on_host
from keras_distribute.devices.placement import Placement
from keras_distribute.training.steps import buffer_slices

SMALL_BYTES = 64 * 1024
# Fewer small arrays are carried one by one: to take a buffer apart costs time, too.
MANY = 64
# Replicas on CPUs share few cores, and XLA hands what need not wait from thread to
# thread, of which an update has several operations for each array: a few pay as one.
MANY_WEIGHTS_ON_CPUS, MANY_METRICS_ON_CPUS = 3, 2

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
        metrics, scalars = _used_between(state)
        small: defaultdict[Any, list[Place]] = defaultdict(list)
        for place in self._places():
            if place not in taken | scalars and is_small(self._shape(place)):
                key = place in metrics, self._shape(place).dtype
                small[key].append(place)
        many = MANY_METRICS_ON_CPUS if on_few_cores(mesh) else math.inf
        self.buffers += [
            places
            for (are_metrics, _), places in small.items()
            if len(places) >= (many if are_metrics else MANY)
        ]
        self._of_metrics = [places[0] in metrics for places in self.buffers]
        self.is_divided = any(divided)
        shardings = [mesh.split if split else mesh.replicated for split in divided]
        shardings += [mesh.replicated] * (len(self.buffers) - len(shardings))
        self._shardings = list(map(rest.in_programs, shardings))
        self._mesh = mesh
        self._joins: dict[tuple[int, ...], Callable[..., list[Any]]] = {}
        self._split = jax.jit(
            self.parts, static_argnums=0, out_shardings=mesh.replicated
        )

    def __bool__(self) -> bool:
        return bool(self.buffers)

    def pack(self, state: State) -> Packed:
        """The state with its buffers filled; to be called in a compiled program."""
        return Packed(
            [self.joined(state, i) for i in range(len(self.buffers))],
            self.without_packed(state),
        )

    def unpack(self, packed: Packed, first: int = 0) -> State:
        """The state as it was, but for what is in the buffers before `first`."""
        state: State = tuple(list(group) for group in packed.single)
        for i in range(first, len(self.buffers)):
            parts = self.parts(i, packed.buffers[i])
            for (group, index), value in zip(self.buffers[i], parts, strict=True):
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

    def pack_now(self, arrays: Mapping[int, Sequence[Any]]) -> dict[int, Any]:
        """Some of the buffers, by their numbers, on the devices; from their arrays."""
        if self._on_cpu:  # Where the host is, too: nothing has to be compiled.
            return {
                i: self._mesh.put(self._joined_on_host(each), self._shardings[i])
                for i, each in arrays.items()
            }
        brought = [list(map(self._mesh.brought, each)) for each in arrays.values()]
        return dict(zip(arrays, self._join(tuple(arrays))(brought), strict=True))

    def _joined_on_host(self, arrays: Sequence[Any]) -> np.ndarray[Any, Any]:
        parts = [a if isinstance(a, np.ndarray) else on_host(a) for a in arrays]
        extra = self._extra(sum(part.size for part in parts))
        parts.append(np.zeros(extra, parts[0].dtype))
        return np.concatenate([part.ravel() for part in parts])

    def _join(self, buffers: tuple[int, ...]) -> Callable[..., list[Any]]:
        if buffers not in self._joins:
            self._joins[buffers] = jax.jit(
                lambda arrays: list(map(self._joined, arrays)),
                out_shardings=[self._shardings[i] for i in buffers],
            )
        return self._joins[buffers]

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

    def unpack_now(self, buffer: int, value: Any) -> list[Any]:
        """The arrays of one buffer, on the devices; where these are CPUs, on the
        host.
        """
        if not self._on_cpu:
            return self._split(buffer, self._mesh.brought(value))
        shapes = self._shapes(buffer)
        ends = np.cumsum(list(map(math.prod, shapes)))
        parts = np.split(on_host(value).copy(), ends)  # A step will delete it.
        return [p.reshape(s) for p, s in zip(parts[:-1], shapes, strict=True)]

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
        return buffer_slices.joined(arrays, size + self._extra(size))

    def _extra(self, size: int) -> int:
        """How many elements more a buffer has, so that it can be divided."""
        return -size % self._multiple

    def parts(self, buffer: int, value: Any) -> list[Any]:
        """The arrays of one buffer."""
        # Metrics are few, and what follows a call is handed from thread to thread.
        by_calls = self._on_cpu and not self._of_metrics[buffer]
        return buffer_slices.taken_apart(value, self._shapes(buffer), by_calls=by_calls)

    def parts_of_buffers(self) -> list[list[tuple[Place, int, int]]]:
        """Of each buffer its arrays' places, first elements and sizes."""
        found: list[list[tuple[Place, int, int]]] = []
        for buffer, places in enumerate(self.buffers):
            sizes = list(map(math.prod, self._shapes(buffer)))
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

    def _shapes(self, buffer: int) -> list[tuple[int, ...]]:
        return [self._shape(place).shape for place in self.buffers[buffer]]

    def _shape(self, place: Place) -> jax.ShapeDtypeStruct:
        return self.form[place[0]][place[1]]


def _used_between(state: Any) -> tuple[set[Place], set[Place]]:
    """The places of what Keras reads or sets between two steps: metrics, and scalars of
    an optimizer, such as its learning rate. For one of them its whole buffer would be
    taken apart, and filled again: metrics, which are set together, may share their own.
    """
    metrics, scalars = set[Place](), set[Place]()
    for g, (name, group) in enumerate(state._asdict().items()):
        for i, array in enumerate(group):
            if name == "metrics":
                metrics.add((g, i))
            elif name == "slots" and not array.shape:
                scalars.add((g, i))
    return metrics, scalars


def form_of(
    state: Sequence[Sequence[Any]],
) -> tuple[tuple[jax.ShapeDtypeStruct, ...], ...]:
    """The shapes and dtypes of a state."""
    return tuple(
        tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in group) for group in state
    )


def many_weights(mesh: ReplicaMesh) -> int:
    """How many small weights are one long weight."""
    return MANY_WEIGHTS_ON_CPUS if on_few_cores(mesh) else MANY


def on_few_cores(mesh: ReplicaMesh) -> bool:
    """Whether several devices are CPUs, which share its cores."""
    return mesh.platform == "cpu" and mesh.num_replicas > 1


def is_small(array: Any) -> bool:
    """Whether an array costs more to hand over than to copy."""
    return math.prod(array.shape) * array.dtype.itemsize <= SMALL_BYTES
