"""What a worker does: runs the programs of functions that the coordinator has
scheduled, with values that it pulls from the parameter servers, and pushes what they
make.

Between two steps there is one message to each server: the answer to a push has the
values for the next step, which takes them if nothing has to be seen that is newer. That
may be the first step of the next function, if that has come by then, and its batch is
there or is read in no time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from keras_distribute.devices.exports import platform_of
from keras_distribute.errors import UnavailableError
from keras_distribute.remote.channel import Channel
from keras_distribute.remote.credentials import Credentials
from keras_distribute.remote.endpoint import Answer
from keras_distribute.remote.frames import STAYS, Array, Header
from keras_distribute.servers import rows
from keras_distribute.servers.programs import Program, loaded
from keras_distribute.servers.pulled import NOTHING, Pulled, Wanted
from keras_distribute.servers.reading import Reading, Taken
from keras_distribute.servers.task import Task


@dataclasses.dataclass(frozen=True)
class Function:
    """A program, and what `scheduling.layouts.layout_of` says of it.

    Attributes:
        ids: From its arguments to the ids that it looks up of each table.
    """

    program: Program
    layout: Mapping[str, Any]
    ids: Program | None

    def looked_up(self, given: Sequence[Any]) -> list[rows.Found]:
        """The rows that a call takes of each table."""
        if self.ids is None:
            return []
        return list(map(rows.found, self.ids(*given), self.layout["tables"]))


def function_of(
    layout: Mapping[str, Any], blobs: Sequence[Array], num_devices: int
) -> Function:
    """A function, from what the coordinator sends, for some devices of this process."""
    program = loaded(blobs[0], layout["divided"], num_devices)
    return Function(program, layout, loaded(blobs[1]) if blobs[1:] else None)


@dataclasses.dataclass(frozen=True)
class _Call:
    """One step of a function.

    Attributes:
        given: What it takes beside variables.
        looked_up: The rows that it takes of each table.
        wanted: What it reads of each server.
    """

    given: list[Any]
    looked_up: list[rows.Found]
    wanted: list[Wanted]


class _Slots(NamedTuple):
    """The first arguments, and the first results, that stay here.

    Attributes:
        number: Of the optimizer.
        group: Whose they are.
        first: Where they are among the arguments.
        size: How many there are.
        makes: The round.
        has: Of which round they are taken, which are here; `None`: they are given.
    """

    number: int
    group: int
    first: int
    size: int
    makes: int
    has: int | None

    @property
    def key(self) -> tuple[int, int]:
        """Their name here."""
        return self.number, self.group


class _Ahead(NamedTuple):
    """What is known of the function that comes next.

    Attributes:
        header: What the coordinator says of it.
        batches: What it takes of iterators.
        call: Its first step.
    """

    header: Header
    batches: Taken | None
    call: _Call | None


_NOTHING_AHEAD = _Ahead({}, None, None)
_Next = tuple[list[Any], list[Any], "_Call | None"]
"""After a step: the coordinator's variables, what has become of them in all, and the
next call.
"""


class Runner(Task):
    """One worker.

    Args:
        credentials: Of the job.
        upcoming: The message that comes next, if it is there.
    """

    kind = "worker"

    def __init__(
        self,
        credentials: Credentials,
        upcoming: Callable[[], tuple[Header, list[Array]] | None],
    ) -> None:
        super().__init__()
        self._credentials, self._upcoming = credentials, upcoming
        self._servers: list[Pulled] = []
        self._begin_with(0, 0)

    def _begin_with(self, worker: int, incarnation: int) -> None:
        self._worker, self._incarnation = worker, incarnation
        self._functions: dict[int, Function] = {}
        self._reading = Reading(worker)
        # By their round: those that a function takes count until its round has ended.
        self._slots: dict[tuple[int, int], dict[int, list[Any]]] = {}
        self._ahead = _NOTHING_AHEAD
        for server in self._servers:
            server.channel.close()
        self._servers = []

    def _begin(self, header: Header, arrays: list[Array]) -> Answer:
        del arrays
        self._begin_with(header["worker"], header["incarnation"])
        self._servers = [
            Pulled(Channel(address, f"ps:{i}", self._credentials, header["timeout"]))
            for i, address in enumerate(header["servers"])
        ]
        devices = jax.local_devices()
        found = {"platform": platform_of(devices[0]), "devices": len(devices)}
        return {**found, "jax": jax.__version__}, []

    def _take_program(self, header: Header, arrays: list[Array]) -> Answer:
        number, layout = header["id"], header["layout"]
        known = self._functions.get(number)
        self._functions[number] = (
            function_of(layout, arrays, jax.local_device_count())
            if known is None
            else dataclasses.replace(known, layout=layout)  # Things are elsewhere now.
        )
        return None

    def _compute(self, header: Header, arrays: list[Array]) -> Answer:
        """What a program makes of values of the coordinator, which replays a step."""
        made = self._functions[header["id"]].program(*arrays)
        return {}, list(map(np.asarray, made))

    def _take_dataset(self, header: Header, arrays: list[Array]) -> Answer:
        self._reading.take_dataset(header["id"], arrays[0], header["x64"])
        return None

    def _take_iterator(self, header: Header, arrays: list[Array]) -> Answer:
        del arrays
        self._reading.begin(header["id"], header["dataset"])
        return None

    def _drop(self, header: Header, arrays: list[Array]) -> Answer:
        del arrays
        for number in header["ids"]:
            self._drop_slots(number, [])
            self._reading.drop(number)
            self._functions.pop(number, None)
        return None

    def _run(self, header: Header, arrays: list[Array]) -> Answer:
        """One function, of one step or several."""
        function = self._functions[header["program"]]
        layout, first = function.layout, header["first"]
        ahead = self._ahead if self._ahead.header is header else _NOTHING_AHEAD
        batches = ahead.batches or self._reading.taken_by(header, layout)
        if batches is None:
            return {"again": True}, []
        if not batches.has(first):
            return self._needs(batches, 0, [])
        kept, given = arrays[: layout["num_kept"]], arrays[layout["num_kept"] :]
        slots = _Slots(*header["slots"]) if "slots" in header else None
        if slots is not None:
            self._drop_slots(slots.number, header["groups"])
            self._slots[slots.key] = had = _only(self._slots.get(slots.key), slots.has)
            for each in had.values():
                given[slots.first : slots.first + slots.size] = each
        totals: list[Any] = []
        results: Sequence[Any] = []

        def call_of(step: int, kept: list[Any]) -> _Call:
            count = layout["num_args"]
            args = given[step * count : (step + 1) * count]
            return self._call(function, [*kept, *args, *batches[step]])

        def advanced(step: int, outputs: Sequence[Any]) -> _Next:
            is_last = step + 1 == header["steps"]
            # While the devices compute.
            is_ready = not is_last and batches.has_early(step + 1)
            changes = outputs[len(outputs) - len(layout["changes"]) :]
            new = changed(layout["changes"], kept, totals, changes)
            if is_ready:
                return *new, call_of(step + 1, new[0])
            return *new, self._upcoming_call() if is_last and layout["tables"] else None

        call = ahead.call
        for step in range(first, header["steps"]):
            if not batches.has(step):
                return self._needs(batches, step - first, totals)
            call = call or call_of(step, kept)
            outputs, after = self._step(function, header, step, call, advanced)
            results = outputs[: layout["num_results"]]
            kept, totals, call = after
        if slots is not None:
            self._slots[slots.key][slots.makes] = list(results[: slots.size])
            results = [*[STAYS] * slots.size, *results[slots.size :]]
        made = [*map(np.asarray, results), *totals]
        return self._done(header["steps"] - first), made

    def _done(self, steps: int) -> Header:
        """What the coordinator is told of so many steps."""
        versions = [server.version for server in self._servers]
        return {"steps": steps, "versions": versions}

    def _needs(self, batches: Taken, steps: int, totals: list[Any]) -> Answer:
        """Asks for the program for the batches that were read, which wait for it.

        Args:
            batches: Of the function.
            steps: How many are done.
            totals: What has become of the coordinator's variables.
        """
        return {"needs": batches.waiting_forms, **self._done(steps)}, totals

    def _drop_slots(self, number: int, groups: Sequence[int]) -> None:
        """Drops those of an optimizer that other workers have by now.

        Args:
            groups: Those whose slots are kept.
        """
        for key in [key for key in self._slots if key[0] == number]:
            if key[1] not in groups:
                del self._slots[key]

    def _send_slots(self, header: Header, arrays: list[Array]) -> Answer:
        """The slots that a group of local steps has here."""
        del arrays
        of_rounds = self._slots.get((header["id"], header["group"]), {})
        found = of_rounds.get(header["round"])
        if found is None:
            raise UnavailableError(
                f"The worker has no slots of group {header['group']}: it was started "
                "again, or taken by another coordinator since."
            )
        return {}, list(map(np.asarray, found))

    def _upcoming_call(self) -> _Call | None:
        """The first step of the function that comes next, where its batch is read in no
        time: else that would hold up what this one has made.
        """
        header, arrays = self._upcoming() or ({}, [])
        function = self._functions.get(header.get("program", 0))
        is_ours = header.get("coordinator") == self._coordinator
        if function is None or not is_ours or header["first"]:
            return None
        if "slots" in header:  # Which this function may make.
            return None
        if self._ahead.header is not header:
            layout, call = function.layout, None
            batches = self._reading.taken_by(header, layout)
            if batches is not None and batches.has_early(0):
                given = arrays[: layout["num_kept"] + layout["num_args"]]
                call = self._call(function, [*given, *batches[0]])
            self._ahead = _Ahead(header, batches, call)
        return self._ahead.call

    def _call(self, function: Function, given: list[Any]) -> _Call:
        """A call with some arguments."""
        looked_up = function.looked_up(given)
        wanted = [Wanted(keys, []) for keys in function.layout["wanted"]]
        for each in looked_up:
            for server, key, ids in each.parts():
                wanted[server].rows.append((key, ids))
        return _Call(given, looked_up, wanted)

    def _step(
        self,
        function: Function,
        header: Header,
        step: int,
        call: _Call,
        advanced: Callable[[int, Sequence[Any]], _Next],
    ) -> tuple[Sequence[Any], _Next]:
        """One step: pulls, computes, and pushes, again where it took too long."""
        pending = None
        while True:
            outputs = self._computed(function, header["floor"], call)
            after = advanced(step, outputs)
            pending = self._push(
                function, header, step, outputs, call, after[-1], pending
            )
            if not pending:
                return outputs, after
            for server in self._servers:
                server.time = 0.0  # What came is too old: pull.

    def _computed(
        self, function: Function, floor: Sequence[Sequence[int]], call: _Call
    ) -> Sequence[Any]:
        """What a call makes, from values that it has or pulls."""
        asked: dict[int, int] = {}
        for i, (server, wanted) in enumerate(
            zip(self._servers, call.wanted, strict=True)
        ):
            if wanted and not server.has(wanted, floor[i]):
                told = {"op": "pull", "coordinator": self._coordinator, **wanted.told}
                asked[i] = server.channel.send(told, wanted.ids)
        for i, number in asked.items():
            header, arrays = self._servers[i].channel.answer(number)
            self._servers[i].note(header, call.wanted[i], arrays)
        values = {
            (i, key): value
            for i, server in enumerate(self._servers)
            for key, value in server.values.items()
        }
        reads = rows.values_of(function.layout, values, call.looked_up)
        places = [each.places for each in call.looked_up]
        return function.program(*reads, *call.given, *places)

    def _push(
        self,
        function: Function,
        header: Header,
        step: int,
        outputs: Sequence[Any],
        call: _Call,
        following: _Call | None,
        only: list[int] | None,
    ) -> list[int]:
        """Pushes what a step has made; returns the servers that it was too late for.

        The answers have what the next step reads. Where its lookups are not known yet,
        it will ask, for everything, so that it is of one time.
        """
        if not function.layout["pushes"]:
            return []
        next_wanted = call.wanted if following is None else following.wanted
        if following is None and call.looked_up:
            next_wanted = [NOTHING for _ in self._servers]
        common = {
            "op": "push",
            "coordinator": self._coordinator,
            "worker": self._worker,
            "incarnation": self._incarnation,
            "closure": header["closure"],
            "step": step,
            "done": header["done"],
            "bound": header.get("bound"),
            "pulled_of_all": [[each.version, each.writes] for each in self._servers],
        }
        asked: dict[int, int] = {}
        for push in function.layout["pushes"]:
            i = push["server"]
            if only is not None and i not in only:
                continue
            arrays = rows.pushed(outputs, push["outputs"], call.looked_up)
            told = {key: push[key] for key in ("updates", "adds", "sets")}
            told |= {**next_wanted[i].told, "pulled": self._servers[i].version}
            asked[i] = self._servers[i].channel.send(
                {**common, **told}, [*arrays, *next_wanted[i].ids]
            )
        late: list[int] = []
        for i, number in asked.items():
            answer, arrays = self._servers[i].channel.answer(number)
            self._servers[i].note(answer, next_wanted[i], arrays)
            if answer["stale"]:
                late.append(i)
        return late


def _only(
    of_rounds: Mapping[int, list[Any]] | None, number: int | None
) -> dict[int, list[Any]]:
    """The slots of one round, if they are wanted."""
    return {} if of_rounds is None or number is None else {number: of_rounds[number]}


def changed(
    kinds: Sequence[Sequence[Any]],
    kept: list[Any],
    totals: list[Any],
    changes: Sequence[Any],
) -> tuple[list[Any], list[Any]]:
    """What the coordinator's variables are for the next step, and what has become of
    them in all.
    """
    kept, new = list(kept), list[Any]()
    for i, ((kind, place), change) in enumerate(zip(kinds, changes, strict=True)):
        change = np.asarray(change)
        if kind == "set":
            new.append(change)
            value = change
        else:
            new.append(totals[i] + change if totals else change)
            value = None if place is None else kept[place] + change
        if place is not None:
            kept[place] = value
    return kept, [np.asarray(each) for each in new]


Runner.operations = {
    "begin": Runner._begin,
    "program": Runner._take_program,
    "compute": Runner._compute,
    "dataset": Runner._take_dataset,
    "iterator": Runner._take_iterator,
    "drop": Runner._drop,
    "run": Runner._run,
    "slots": Runner._send_slots,
    "end": Task.end,
}
