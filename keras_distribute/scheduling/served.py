"""Which variables the parameter servers have, and what those read."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from keras import constraints

from keras_distribute.devices.launches import launches
from keras_distribute.devices.placement import num_bytes
from keras_distribute.errors import UnavailableError, VariableScopeError
from keras_distribute.remote.frames import Array
from keras_distribute.scheduling import partitioners
from keras_distribute.scheduling.servers import Server
from keras_distribute.servers.programs import exported
from keras_distribute.servers.rows import joined
from keras_distribute.variables import Blocks, DrawnVariable, Holder, drawing

Partitioner = Callable[..., Sequence[int]]
_OF_AXES = constraints.MaxNorm, constraints.MinMaxNorm, constraints.UnitNorm


@dataclasses.dataclass(frozen=True)
class Part:
    """Rows of a variable on one server: all of them, where `stop` is `None`."""

    server: int
    key: int
    start: int = 0
    stop: int | None = None
    num_bytes: int = 0

    def shape_in(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of these rows of an array."""
        whole = tuple(shape)
        return whole if self.stop is None else (self.stop - self.start, *whole[1:])

    def of(self, array: Any) -> Any:
        """These rows."""
        return array if self.stop is None else array[self.start : self.stop]


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a variable is.

    Args:
        parts: On which servers.
        copies: Whether each part is all of it, as of a learning rate.
    """

    parts: tuple[Part, ...]
    copies: bool = False

    @property
    def read(self) -> tuple[Part, ...]:
        """What makes up the value."""
        return self.parts[:1] if self.copies else self.parts


def is_constrained_whole(variable: Any) -> bool:
    """Whether the constraint of a variable may look at several rows of it together."""
    constraint, ndim = getattr(variable, "constraint", None), len(variable.shape)
    if constraint is None or type(constraint) is constraints.NonNeg:
        return False
    if type(constraint) not in _OF_AXES or constraint.axis is None:
        return True
    return bool(np.any(np.atleast_1d(constraint.axis) % ndim == 0))


class Served(Holder):
    """The variables that servers have: read by asking, and sent when assigned.

    A variable goes to the servers when a function first uses it. With a partitioner its
    first axis is divided, unless its constraint looks at more than one row; whole
    variables, and the parts, go each to the server with the fewest bytes. Once nobody
    has a variable any more, its place is free.

    Args:
        servers: All of them.
        partitioner: From `shape` and `dtype` to the number of parts of each axis.
    """

    def __init__(
        self, servers: Sequence[Server], partitioner: Partitioner | None
    ) -> None:
        super().__init__(())
        self._servers, self._partitioner = servers, partitioner
        self._places: dict[int, tuple[weakref.ref[Any], Place]] = {}
        self._gone: list[Part] = []
        self._bytes = [0] * len(servers)
        self._keys = 0
        self._lost: set[int] = set()

    def place_of(self, variable: Any) -> Place | None:
        """Where a variable is; `None` for one that no function has used."""
        found = self._places.get(id(variable))
        return None if found is None or found[0]() is not variable else found[1]

    def where(self, variable: Any) -> Place:
        """Where a variable is that a function has used."""
        place = self.place_of(variable)
        assert place is not None
        return place

    def places(self) -> list[tuple[Any, Place]]:
        """All variables, with their places."""
        found = [(known(), place) for known, place in list(self._places.values())]
        return [(variable, place) for variable, place in found if variable is not None]

    def take_gone(self) -> dict[int, list[int]]:
        """The keys of variables that nobody has any more, of each server, once."""
        for key, (known, _) in list(self._places.items()):
            if known() is None:
                self._free(key)
        gone: dict[int, list[int]] = {}
        for part in self._gone:
            gone.setdefault(part.server, []).append(part.key)
        self._gone = []
        return gone

    def _free(self, key: int) -> None:
        """Frees the place of a variable that is gone."""
        for part in self._places.pop(key)[1].parts:
            self._bytes[part.server] -= part.num_bytes
            self._gone.append(part)
        self._lost.discard(key)

    def lose(self) -> None:
        """Notes that the servers have no values any more."""
        self._lost = self._places.keys() - self.changed.keys()

    def check(self, variables: Callable[[], Sequence[Any]]) -> None:
        """Raises `UnavailableError` for a value that was lost, and not assigned."""
        lost = [v for v in variables() if id(v) in self._lost] if self._lost else []
        if lost:
            raise UnavailableError(
                "A parameter server had a value that was lost with it: "
                f"{', '.join(v.path for v in lost[:10])}.",
                received=f"{len(lost)} variable(s) that nobody has assigned since.",
                fix="restore the last checkpoint, by kd.CheckpointManager or "
                "BackupAndRestore in fit; or assign it.",
            )

    def add(self, variables: Sequence[Any], whole: bool = False) -> None:
        """Chooses places for variables that have none.

        Args:
            variables: Of the strategy.
            whole: Whether they have to be together on one server.
        """
        new = [v for v in variables if self.place_of(v) is None]
        if not new:
            return
        together = self._server_of(variables) if whole else None
        for variable in new:
            sizes = [] if whole else self._sizes(variable)
            servers = [together] * (len(sizes) or 1)
            parts: list[Part] = []
            start = 0
            for server, size in zip(servers, sizes or [None], strict=True):
                stop = None if size is None else start + size
                parts.append(self._part(variable, server, start, stop))
                start = stop or 0
            self._put(variable, Place(tuple(parts)))

    def add_slot(self, slot: Any, weight: Any) -> None:
        """Places a slot of an optimizer where its weight is."""
        if self.place_of(slot) is not None:
            return
        places = self.where(weight).parts
        parts = [self._part(slot, p.server, p.start, p.stop) for p in places]
        self._put(slot, Place(tuple(parts)))

    def add_copies(self, variable: Any, servers: Sequence[int]) -> None:
        """Places a variable on each of some servers."""
        place = self.place_of(variable)
        parts = () if place is None else place.parts
        known = {part.server for part in parts}
        new = tuple(self._part(variable, s) for s in servers if s not in known)
        if not new:
            return
        if parts:
            value = np.asarray(variable.value)
            for part in new:
                told = {"op": "set", "keys": [part.key]}
                self._servers[part.server].call(told, [value])
        self._put(variable, Place((*parts, *new), copies=True), is_new=not parts)

    def send_changed(self) -> None:
        """Tells the servers what was assigned since the last time."""
        for key, variable in list(self.changed.items()):
            assignments = variable._assignments
            undrawn = variable.drawing if isinstance(variable, DrawnVariable) else None
            # What is recorded is what was told.
            if undrawn is not None and all(s.told is None for s in self._servers):
                self._draw(undrawn, self._places[key][1])
                self._take(key, variable, assignments)
                continue
            value = np.asarray(variable.value)
            by_server: dict[int, list[Part]] = {}
            for part in self._places[key][1].parts:
                by_server.setdefault(part.server, []).append(part)
            for server, parts in by_server.items():
                told = {"op": "set", "keys": [part.key for part in parts]}
                self._servers[server].call(told, [part.of(value) for part in parts])
            self._take(key, variable, assignments)

    def _take(self, key: int, variable: Any, assignments: int) -> None:
        """Notes that the servers have the value that a variable had after so many
        assignments: another thread may have assigned it since.
        """
        with launches.lock:
            if variable._assignments == assignments:
                variable._link_to(self, key)
                self.changed.pop(key, None)
        self._lost.discard(key)

    def blocks_of(self, variable: Any) -> Blocks | None:
        """The rows of a large variable that servers have, or will draw."""
        shape, dtype = tuple(variable.shape), variable._dtype
        if num_bytes(shape, dtype) < drawing.LARGE:
            return None
        undrawn = variable.drawing if isinstance(variable, DrawnVariable) else None
        if undrawn is not None:
            return undrawn.blocks()
        if variable._link is None or variable._link[0] is not self:
            return None
        self.check(lambda: [variable])
        parts = self._places[id(variable)][1].read

        def read(start: int, stop: int) -> Array:
            found: list[Array] = []
            for part in parts:
                last = shape[0] if part.stop is None else part.stop
                own = max(start, part.start), min(stop, last)
                if own[0] < own[1]:
                    asked = {"op": "pull_rows", "key": part.key}
                    asked |= {"rows": [row - part.start for row in own]}
                    found += self._servers[part.server].call(asked)[1]
            return joined(found)

        return Blocks(shape, dtype, read)

    def assign_blocks(self, variable: Any, blocks: Blocks) -> bool:
        """Gives the servers the rows of a variable; returns whether they took it.

        Until they have all of them the value is lost.
        """
        place = self._places[id(variable)][1]
        # What is recorded is what was told.
        if place.copies or any(s.told is not None for s in self._servers):
            return False
        assignments = variable._assignments
        self._lost.add(id(variable))
        for part in place.parts:
            shape = part.shape_in(variable.shape)
            told: dict[str, Any] = {"op": "set_rows", "key": part.key}
            told |= {"shape": list(shape), "dtype": str(variable._dtype)}
            server = self._servers[part.server]
            for first, rows in blocks.between(part.start, part.start + shape[0]):
                server.call({**told, "first": first - part.start}, [rows])
        self._take(id(variable), variable, assignments)
        return True

    def _draw(self, undrawn: Any, place: Place) -> None:
        """Lets the servers draw the rows that they have."""
        told = {"op": "draw", "dtype": undrawn.dtype, "fill": undrawn.fill}
        told |= {"rows": undrawn.rows, "shape": list(undrawn.shape[1:])}
        arrays: list[Any] = []
        if undrawn.fill is None:
            shapes = [jax.ShapeDtypeStruct((2,), "uint32")]
            shapes.append(jax.ShapeDtypeStruct((), "uint32"))
            platforms = sorted({server.platform for server in self._servers})
            arrays = [exported(undrawn.block, shapes, platforms)[0], undrawn.key]
        for part in place.parts:
            start, stop = part.start, part.stop or undrawn.shape[0]
            own = {"key": part.key, "start": start, "stop": stop}
            self._servers[part.server].call({**told, **own}, arrays)

    def _server_of(self, variables: Sequence[Any]) -> int:
        """Where some variables are, if they are anywhere."""
        places = [self.place_of(variable) for variable in variables]
        servers = [part.server for place in places if place for part in place.parts]
        return servers[0] if servers else self._emptiest()

    def _emptiest(self) -> int:
        return min(range(len(self._servers)), key=self._bytes.__getitem__)

    def _sizes(self, variable: Any) -> list[int]:
        """The rows of each part; none for a variable that is not divided."""
        shape = tuple(variable.shape)
        if self._partitioner is None or not shape or is_constrained_whole(variable):
            return []
        wanted = list(self._partitioner(shape=shape, dtype=variable._dtype))
        right = len(wanted) == len(shape) and all(n == 1 for n in wanted[1:])
        if not right or (wanted[0] < 1 and shape[0]):
            raise VariableScopeError(
                f"A variable is divided along its first axis: {variable.path!r} has "
                f"the shape {shape}.",
                received=f"{wanted} from {self._partitioner!r}.",
                fix="kd.experimental.partitioners.FixedShardsPartitioner(n).",
            )
        sizes = partitioners.rows_of_parts(shape[0], int(wanted[0]))
        return sizes if len(sizes) > 1 else []

    def _part(
        self, variable: Any, server: int | None, start: int = 0, stop: int | None = None
    ) -> Part:
        server = self._emptiest() if server is None else server
        self._keys += 1
        part = Part(server, self._keys, start, stop)
        size = num_bytes(part.shape_in(variable.shape), variable._dtype)
        self._bytes[server] += size
        return dataclasses.replace(part, num_bytes=size)

    def _put(self, variable: Any, place: Place, is_new: bool = True) -> None:
        if id(variable) in self._places and self.place_of(variable) is None:
            self._free(id(variable))  # Of another one, which had this id.
        self._places[id(variable)] = weakref.ref(variable), place
        if is_new:
            self.changed[id(variable)] = variable

    def read(self, variable: Any) -> Array:
        """The value that the servers have now."""
        self.check(lambda: [variable])
        place = self._places[id(variable)][1]
        found: list[Array] = []
        for part in place.read:
            asked = {"op": "pull", "keys": [part.key]}
            found += self._servers[part.server].call(asked)[1]
        return joined(found)

    def _array(self, place: Any, variable: Any) -> Any:
        return variable._as_stored(jnp.asarray(self.read(variable)))
