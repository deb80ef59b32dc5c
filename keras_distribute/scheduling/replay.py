"""Asynchronous training computed again, one step after the other: the proof that what
the servers have is what their log says.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from keras_distribute import checks
from keras_distribute.errors import ContextError, DistributeError, UnavailableError
from keras_distribute.remote.channel import Channel
from keras_distribute.remote.frames import Array, Header
from keras_distribute.scheduling.cluster import Cluster
from keras_distribute.scheduling.programs import Traced
from keras_distribute.scheduling.queue import Closure
from keras_distribute.scheduling.servers import Told
from keras_distribute.servers import rows
from keras_distribute.servers.runner import Function, changed, function_of
from keras_distribute.servers.store import Values, update_of

_State = tuple[int, int]  # Pushes and writes.


class RecordedUpdates:
    """Records the updates of a `kd.ParameterServerStrategy`, and computes them again.

    In which order workers push is chance; but servers log it, with the values that each
    push was computed from. The same programs on the same batches, in that order, give
    the same bits on the same kind of machine, with as many threads: a worker computes
    each step again, and this process the updates.

    Args:
        strategy: Whose updates.

    Attributes:
        log: After the `with` block, for each server what it did, in order: `["push",
            function, step, worker, [[pushes, writes] of each server]]`, where the last
            is what the worker had pulled, and `["set", number]` for what the
            coordinator assigned.

    Raises:
        StructureTypeError: For another strategy.
        ContextError: For functions with batches that workers read themselves.
        UnavailableError: From `replayed`, without a worker of as many devices as had
            the one that computed a step.

    Example:
        >>> import keras, numpy as np, keras_distribute as kd
        >>> strategy = kd.ParameterServerStrategy()
        >>> with strategy.scope():
        ...     model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        ...     model.compile("adam", "mse")
        >>> x = np.random.default_rng(0).normal(size=(50, 2))
        >>> with kd.testing.RecordedUpdates(strategy) as updates:
        ...     history = model.fit(x, x[:, 0], batch_size=5, verbose=0)
        >>> again = updates.replayed()
        >>> all((again[v.path] == v.numpy()).all() for v in model.trainable_variables)
        True
        >>> strategy.close()
    """

    def __init__(self, strategy: Any) -> None:
        cluster = getattr(strategy, "cluster", None)
        checks.instance(
            "strategy",
            strategy,
            object if isinstance(cluster, Cluster) else (),
            "The updates of parameter servers are recorded.",
            "kd.testing.RecordedUpdates(kd.ParameterServerStrategy(...))",
        )
        self._cluster: Cluster = strategy.cluster
        self.log: list[list[list[Any]]] = []
        self._closures: dict[int, Closure] = {}
        self._first: list[dict[int, Array]] = []
        self._writes: list[int] = []
        self._told: list[list[Told]] = []

    def __enter__(self) -> RecordedUpdates:
        cluster = self._cluster
        cluster.join()
        for server in cluster.servers:
            keys = [
                part.key
                for _, place in cluster.served.places()
                for part in place.parts
                if part.server == server.index
            ]
            _, arrays = server.call({"op": "pull", "keys": keys})
            found = [np.array(array) for array in arrays]
            self._first.append(dict(zip(keys, found, strict=True)))
            state, _ = server.call({"op": "log", "keep": True})
            self._writes.append(state["writes"])
            self._told.append([])
            server.told = self._told[-1]
        self._versions = [server.version for server in cluster.servers]
        cluster.recorded = self._closures
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        cluster, first = self._cluster, error
        cluster.recorded = None
        if first is None:
            try:
                cluster.join()
            except BaseException as of_join:
                first = of_join
        for server in cluster.servers:
            server.told = None
            try:
                told, _ = server.call({"op": "log", "keep": False})
                self.log.append(told["log"])
            except DistributeError as of_server:
                first = first or of_server
        if first is not None and error is None:
            raise first

    def replayed(self) -> dict[str, np.ndarray[Any, Any]]:
        """The values of all variables on servers, by their paths, computed again."""
        begun = list(zip(self._versions, self._writes, strict=True))
        with contextlib.closing(_Computers(self._cluster)) as computers:
            replay = _Replay(
                self._cluster, computers, self._closures, self._first, self._told, begun
            )
            replay.run(self.log)
        return replay.values()


class _Computers:
    """Workers that compute steps again: results depend on their devices and threads."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._channels: dict[int, Channel] = {}
        self._told: set[tuple[int, int]] = set()

    def outputs(
        self,
        worker: int,
        program: Traced,
        layout: Mapping[str, Any],
        given: Sequence[Any],
    ) -> list[Array]:
        """What a program makes on a worker, or on one like it."""
        index = self._present(worker)
        channel = self._channel(index)
        told = {"id": program.number, "coordinator": self._cluster.coordinator}
        if (index, program.number) not in self._told:
            channel.send({"op": "program", "layout": layout, **told}, program.blobs)
            self._told.add((index, program.number))
        _, found = channel.call({"op": "compute", **told}, list(map(np.asarray, given)))
        return [np.array(array) for array in found]

    def close(self) -> None:
        """Ends the conversations with workers."""
        for channel in self._channels.values():
            channel.close()

    def _present(self, worker: int) -> int:
        """That worker, if it is there, or another one with as many devices."""
        workers = self._cluster.workers
        wanted = workers[worker].num_devices
        for each in (workers[worker], *workers):
            if each.is_ready and each.num_devices == wanted:
                return each.index
        raise UnavailableError(
            "To the bit, updates are computed again on as many devices as a worker "
            "had.",
            received=f"no worker with {wanted} device(s), as worker:{worker} had.",
            fix="replayed() before strategy.close(), while the workers are there.",
        )

    def _channel(self, index: int) -> Channel:
        if index not in self._channels:
            worker = self._cluster.workers[index]
            self._channels[index] = Channel(
                worker.address, worker.name, self._cluster.credentials, timeout=5.0
            )
        return self._channels[index]


class _Replay:
    """The servers, in this process, with all their states so far.

    Args:
        now: Of each server, what it had when the recording began.
    """

    def __init__(
        self,
        cluster: Cluster,
        computers: _Computers,
        closures: dict[int, Closure],
        first: Sequence[dict[int, Array]],
        told: Sequence[list[Told]],
        now: list[_State],
    ) -> None:
        self._cluster, self._computers, self._closures = cluster, computers, closures
        self._values = [_Remembered(values) for values in first]
        self._told = [list(each) for each in told]
        self._states = [
            {state: dict(values)} for state, values in zip(now, first, strict=True)
        ]
        self._now = now
        self._functions: dict[int, Function] = {}
        self._layouts: dict[int, Header] = {}
        self._kept: dict[tuple[int, int], list[Any]] = {}
        self._outputs: dict[Any, tuple[Sequence[Any], list[rows.Found]]] = {}

    def run(self, log: Sequence[Sequence[list[Any]]]) -> None:
        """Does what the servers did, each in its order."""
        left = [list(entries) for entries in log]
        while any(left):
            before = sum(map(len, left))
            for server, entries in enumerate(left):
                while entries and self._is_possible(entries[0]):
                    self._do(server, entries.pop(0))
            assert sum(map(len, left)) < before, "an effect before its cause"

    def _is_possible(self, entry: list[Any]) -> bool:
        if entry[0] == "set":
            return True
        _, number, _, _, pulled = entry
        layout = self._layout(self._closures[number].program)
        read = {server for server, keys in enumerate(layout["wanted"]) if keys}
        for table in layout["tables"]:
            read |= {server for server, *_ in table["parts"]}
        return all(tuple(pulled[server]) in self._states[server] for server in read)

    def _do(self, server: int, entry: list[Any]) -> None:
        version, writes = self._now[server]
        values = self._values[server]
        if entry[0] == "set":
            number, keys, arrays = self._told[server][0]
            if number == entry[1]:  # Else its answer was lost, and it was told again.
                del self._told[server][0]
            values.update(zip(keys, arrays, strict=True))
            self._now[server] = version, writes + 1
        else:
            _, number, step, worker, pulled = entry
            outputs, looked_up = self._computed(number, step, worker, pulled)
            layout = self._layout(self._closures[number].program)
            push = next(p for p in layout["pushes"] if p["server"] == server)
            self._apply(server, push, rows.pushed(outputs, push["outputs"], looked_up))
            self._now[server] = version + 1, writes
        self._states[server][self._now[server]] = dict(values)

    def _computed(
        self, number: int, step: int, worker: int, pulled: Sequence[Sequence[int]]
    ) -> tuple[Sequence[Any], list[rows.Found]]:
        """What one step of a function made of what it had pulled, and its rows."""
        closure = self._closures[number]
        if closure.program.elements:
            raise ContextError(
                "What workers read themselves cannot be computed again here.",
                received="a function that takes next(iterator).",
                fix="pass the batch as an argument, or use fit.",
            )
        function = self._function(closure.program)
        layout = function.layout
        key = number, step, tuple(map(tuple, pulled))
        if key not in self._outputs:
            states = [
                states.get((version, writes), {})
                for (version, writes), states in zip(pulled, self._states, strict=True)
            ]
            count = layout["num_args"]
            args = closure.args(worker)[step * count : (step + 1) * count]
            kept = self._kept.get((number, step), closure.kept)
            looked_up = function.looked_up([*kept, *args])
            reads = _reads(layout, states, looked_up)
            places = [each.places for each in looked_up]
            outputs = self._computers.outputs(
                worker, closure.program, layout, [*reads, *kept, *args, *places]
            )
            self._outputs[key] = outputs, looked_up
            if layout["changes"]:
                changes = outputs[len(outputs) - len(layout["changes"]) :]
                new, _ = changed(layout["changes"], kept, [], changes)
                self._kept[number, step + 1] = new
        return self._outputs[key]

    def _function(self, program: Traced) -> Function:
        if program.number not in self._functions:
            layout = self._layout(program)
            self._functions[program.number] = function_of(layout, program.blobs, 1)
        return self._functions[program.number]

    def _layout(self, program: Traced) -> Header:
        if program.number not in self._layouts:
            self._layouts[program.number] = self._cluster.layout_of(program)
        return self._layouts[program.number]

    def _apply(self, server: int, push: Header, arrays: list[Array]) -> None:
        """By the server's own code."""
        values = self._values[server]
        for number in push["updates"]:
            if number not in values.updates:
                told, blobs = self._cluster.updates.sent[server, number]
                values.updates[number] = update_of(told, blobs)
        values.apply(push, arrays)

    def values(self) -> dict[str, np.ndarray[Any, Any]]:
        """Of all variables that servers have."""
        found: dict[str, np.ndarray[Any, Any]] = {}
        for variable, place in self._cluster.served.places():
            parts = [
                np.asarray(self._values[part.server][part.key]) for part in place.read
            ]
            found[variable.path] = rows.joined(parts)
        return found


class _Remembered(Values):
    """Values whose earlier states are still looked at."""

    def changing(self, key: int) -> Array:
        self[key] = np.array(self[key])
        return self[key]


def _reads(
    layout: Mapping[str, Any],
    states: Sequence[Mapping[int, Array]],
    looked_up: Sequence[rows.Found],
) -> list[Any]:
    """What a program took of the servers in some states."""
    values = {
        (server, key): np.asarray(states[server][key])
        for server, keys in enumerate(layout["wanted"])
        for key in keys
    }
    values |= {
        (server, key): np.asarray(states[server][key])[ids]
        for each in looked_up
        for server, key, ids in each.parts()
    }
    return rows.values_of(layout, values, looked_up)
