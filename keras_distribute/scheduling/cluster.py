"""The cluster of one strategy: its servers, its workers, its variables, and the
programs that they run.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from keras_distribute._compat import building
from keras_distribute._compat import optimizer as optimizer_compat
from keras_distribute.cluster.resolvers.cluster_spec import ClusterSpec
from keras_distribute.devices.launches import launches
from keras_distribute.devices.placement import num_bytes
from keras_distribute.errors import DistributeError, UnavailableError
from keras_distribute.remote.channel import Channel
from keras_distribute.remote.credentials import Credentials
from keras_distribute.remote.frames import Array, Header
from keras_distribute.run.arguments import Call
from keras_distribute.scheduling.kept import Kept
from keras_distribute.scheduling.layouts import layout_of
from keras_distribute.scheduling.programs import Traced, is_sum_of_replicas, traced
from keras_distribute.scheduling.queue import Closure, Queue
from keras_distribute.scheduling.rounds import GroupSlots, Held, HeldGroup
from keras_distribute.scheduling.served import Partitioner, Served
from keras_distribute.scheduling.servers import Server
from keras_distribute.scheduling.tasks import Tasks
from keras_distribute.scheduling.updates import Updates
from keras_distribute.scheduling.values import (
    IteratorArgument,
    PerWorkerDataset,
    PerWorkerIterator,
    PerWorkerValues,
    RemoteValue,
)
from keras_distribute.scheduling.workers import Worker
from keras_distribute.threads import dropped
from keras_distribute.threads.condition import Condition
from keras_distribute.variables import Blocks

_SECONDS_TO_START = 120.0
_SECONDS_TO_ANSWER = 600.0  # Of a worker that may be in the middle of a round.
_SECONDS_TO_ASK_AGAIN = 5.0  # A server that comes back may do so elsewhere.
_LARGE_TABLE = 32 * 10**6  # Bytes.
_log = logging.getLogger(__name__)


class Cluster:
    """The servers and workers that one coordinator has.

    Args:
        strategy: Whose they are.
        cluster: Their addresses.
        ask: Says them anew: a worker that was gone may come back elsewhere.
        credentials: Of the job.
        partitioner: How large variables are divided over the servers.
        max_staleness: How many pushes may have been applied since a step pulled.
        lazy_rows: Whether an optimizer changes those rows of a table alone that were
            looked up.
        communication_dtype: In which gradients travel; `None`: in that of the weight.

    Attributes:
        dropped: The numbers of programs, datasets and iterators that are gone.
        recorded: The functions that were scheduled, while updates are recorded.

    Raises:
        UnavailableError: Where a server does not answer.
    """

    def __init__(
        self,
        strategy: Any,
        cluster: ClusterSpec,
        ask: Callable[[], ClusterSpec],
        credentials: Credentials,
        partitioner: Partitioner | None,
        max_staleness: int | None,
        lazy_rows: bool,
        communication_dtype: str | None,
    ) -> None:
        self._strategy, self._ask = strategy, ask
        self.credentials, self.coordinator = credentials, ""
        self.server_addresses = list(cluster.job_tasks("ps"))
        self._max_staleness = max_staleness
        self._condition = Condition()
        self.queue = Queue(self._condition)
        self.servers = [
            Server(i, address, credentials, self.queue.lost)
            for i, address in enumerate(self.server_addresses)
        ]
        self.served, self.kept = Served(self.servers, partitioner), Kept()
        self.slots = GroupSlots(
            len(list(cluster.job_tasks("worker"))), self._slots_on_worker
        )
        self.updates = Updates(
            self.servers, self.served, lazy_rows, communication_dtype
        )
        self._versions: list[int] = []
        self._floor: list[list[int]] = []
        self._lives: dict[int, int] = {}
        self._lock = threading.RLock()
        self._warned: set[str] = set()
        self.dropped: list[int] = []
        self._numbers = itertools.count(1)  # Of programs, datasets and iterators.
        self._arguments = weakref.WeakValueDictionary[Any, IteratorArgument]()
        self.recorded: dict[int, Closure] | None = None
        self.workers: list[Worker] = []
        self._begin([(each, 0) for each in cluster.job_tasks("worker")])
        self._tasks = Tasks(self.queue, self.workers, self.servers)
        dropped.when_dropped(self, self._tasks.close)

    def _begin(
        self, workers: Sequence[tuple[str, int]], timeout: float = _SECONDS_TO_START
    ) -> None:
        """Takes the servers, which are empty, and the workers.

        Args:
            workers: Their addresses, with how many steps each has done.
            timeout: Seconds to wait for each server.
        """
        coordinator = uuid.uuid4().hex
        for server in self.servers:
            server.begin(coordinator, timeout)
        self.coordinator = coordinator
        self._versions = [0] * len(self.servers)
        self._floor = [[0, 0] for _ in self.servers]
        self.workers[:] = [
            Worker(i, address, self, steps)
            for i, (address, steps) in enumerate(workers)
        ]
        for worker in self.workers:
            worker.start()

    def begin_again(self, timeout: float) -> None:
        """Takes the servers anew, where one was lost, wherever they are now: all are
        empty, and what they had has to be assigned.

        Raises:
            UnavailableError: Where one does not answer.
        """
        self.slots.collect()
        for worker in self.workers:
            worker.close(end_task=False)
        for worker in self.workers:
            worker.join(5.0)
            self.slots.release(worker.index)
        with self._lock:
            self.served.lose()
            self.updates.forget()
            workers = [(worker.address, worker.steps) for worker in self.workers]
            end = time.monotonic() + timeout
            while True:
                self.queue.begin_again()
                left = end - time.monotonic()
                try:
                    self.server_addresses = list(self._ask().job_tasks("ps"))
                    for server, address in zip(
                        self.servers, self.server_addresses, strict=True
                    ):
                        server.address = address
                    self._begin(workers, min(left, _SECONDS_TO_ASK_AGAIN))
                    return
                except BaseException as error:
                    is_unavailable = isinstance(error, UnavailableError)
                    if is_unavailable and left >= _SECONDS_TO_ASK_AGAIN:
                        continue
                    self.queue.lost(_not_taken(error))
                    raise

    def is_on_servers(self, variable: Any) -> bool:
        """Whether a variable is one of those that servers keep: weights, and what
        layers and optimizers know; metrics and seeds stay here.
        """
        if self.served.place_of(variable) is not None:
            return True
        floating = jax.numpy.issubdtype(variable._dtype, jax.numpy.floating)
        return bool(floating) and not is_sum_of_replicas(variable)

    def program(
        self,
        function: Callable[..., Any],
        call: Call,
        axes: Sequence[int | None] | None = None,
    ) -> Traced:
        """The program of a function for arguments of this form, made once; `axes` is
        as in `programs.traced`.
        """
        cache = self._strategy.programs
        programs = cache.programs_of(function, "coordinator.schedule")
        program = programs.get(call.signature)
        if program is None:
            program = self._made(function, call, axes=axes)
            programs[call.signature] = program
        return program

    def _drop_gone(self) -> None:
        """Lets the servers drop what belongs to models that nobody has any more."""
        keys, programs = self.served.take_gone(), self.updates.take_gone()
        for server in keys.keys() | programs.keys():
            told = {"keys": keys.get(server, []), "programs": programs.get(server, [])}
            self.servers[server].call({"op": "drop", **told})

    def _made(
        self,
        function: Callable[..., Any],
        call: Call,
        elements: Sequence[Any] = (),
        axes: Sequence[int | None] | None = None,
    ) -> Traced:
        platforms = self._platforms()
        with launches.tracing, self._lock, _seen_as(platforms):
            self._drop_gone()
            program = traced(
                self._strategy,
                function,
                call,
                self.is_on_servers,
                platforms,
                self.updates,
                next(self._numbers),
                elements,
                axes,
            )
            self._warn_of_tables(program)
            for optimizer, weights in program.gradients:
                self.updates.place(optimizer, weights)
            pushed = [variable for _, variable in program.pushed]
            tables = [lookup.variable for lookup in program.lookups]
            self.served.add([*program.reads, *pushed, *tables])
            weakref.finalize(program, self.dropped.append, program.number)
            return program

    def _warn_of_tables(self, program: Traced) -> None:
        """Says why a large table travels with each step."""
        for variable, why in program.whole:
            size = num_bytes(variable.shape, variable._dtype)
            if size > _LARGE_TABLE and variable.path not in self._warned:
                self._warned.add(variable.path)
                _log.warning(
                    "All %d MB of the table %s travel with each step, and not the rows "
                    "that it looks up: %s.",
                    size // 10**6,
                    variable.path,
                    why,
                )

    def _platforms(self) -> list[str]:
        """What programs are made for: the devices of the workers that are known, of
        which there has to be one.
        """

        def known() -> set[str]:
            return {worker.platform for worker in self.workers} - {""}

        if not known():
            self.queue.wait(lambda: bool(known()), look=self.look)
        return sorted(known())

    def schedule(
        self,
        program: Traced,
        function: Any,
        calls: Sequence[Call],
        iterators: Sequence[PerWorkerIterator] = (),
        counted: int | None = None,
        slots: HeldGroup | None = None,
        alone: bool = False,
    ) -> RemoteValue:
        """Puts a program into the queue.

        Args:
            program: For these arguments.
            function: What was traced.
            calls: The arguments of each step, all of one form.
            iterators: Those among the arguments.
            counted: For a function of a round of local steps, of how many.
            slots: Those that stay on the worker.
            alone: Whether it needs to see all that was scheduled before, and runs while
                nothing else does.
        """

        def retrace(closure: Closure, forms: Sequence[Any]) -> None:
            """Takes the program for batches of other forms, made once."""
            call = calls[0]
            key = call.signature, tuple(tuple(map(tuple, form)) for form in forms)
            programs = self._strategy.programs.programs_of(function)
            iterators = [iterator for iterator, _ in program.elements]
            elements = list(zip(iterators, forms, strict=True))
            if elements == program.elements:  # It goes on with its first program.
                programs[key] = program
            if key not in programs:
                with (
                    jax.enable_x64(program.x64),
                    jax.default_matmul_precision(program.precision),
                ):
                    programs[key] = self._made(function, call, elements)
            self._exchange(closure, seeds, programs[key])

        kept, seeds = self._taken(program, len(calls))
        result = RemoteValue(self._condition, self.look, self.synchronize)
        closure = Closure(
            program,
            retrace,
            kept,
            lambda worker: [
                array
                for seed, each in zip(seeds, calls, strict=True)
                for array in (*seed, *_arrays(each, worker))
            ],
            len(calls),
            self._written([version for version, _ in self._floor]),
            iterators,
            result,
            self.kept.finish,
            self._max_staleness,
            counted,
            slots,
            is_alone=alone,
        )
        recorded = self.recorded
        self.queue.put(closure)
        if recorded is not None:
            recorded[closure.number] = closure
        return result

    def _taken(self, program: Traced, steps: int) -> tuple[list[Array], list[Any]]:
        """What a program takes of the coordinator's variables: their values, and what
        each step does of seeds and counters, which go on. Waits for room in the queue,
        and until what changes one of the latter in its turn has returned.
        """
        advancing = [variable for variable, _ in program.constants]

        def is_free() -> bool:
            return self.queue.has_room() and not self.queue.orders(advancing)

        while True:
            self.queue.wait(is_free, look=self.look)
            with self._lock:
                self.send_changed()
                self.served.check(program.of_servers)
                with self.kept.lock:
                    if not self.queue.orders(advancing):  # Of another thread.
                        seeds = [self.kept.advance(program) for _ in range(steps)]
                        return self.kept.taken_by(program), seeds

    def _exchange(self, closure: Closure, seeds: list[Any], program: Traced) -> None:
        """Gives what is left of a function the program for batches of another form,
        which may take other variables.

        Args:
            closure: The function.
            seeds: What each of its steps takes of seeds and counters.
            program: In the place of the one that it has.
        """
        with self._lock:
            self.send_changed()
            self.served.check(program.of_servers)
            closure.floor = self._written([version for version, _ in closure.floor])
            before, kept = closure.program, closure.kept
            for step in range(closure.first, closure.steps):
                taken = kept, seeds[step]
                exchanged = self.kept.exchange(before, program, taken)
                closure.kept, seeds[step] = exchanged
        closure.program = program

    def dataset(self, pickled: Any, element: Any) -> PerWorkerDataset:
        """A dataset on each worker.

        Args:
            pickled: The dataset function.
            element: Its first batch.
        """
        return PerWorkerDataset(
            pickled, element, self._numbers, self._arguments, self.dropped
        )

    def send_changed(self) -> None:
        """Tells the servers what was assigned here."""
        with self._lock:
            if self.served.changed:
                self.served.send_changed()

    def assign_blocks(
        self, variable: Any, blocks: Blocks, optimizers: Sequence[Any]
    ) -> bool:
        """Gives the servers the rows of a variable; returns whether it is theirs.

        Args:
            optimizers: Those that may have it: it is placed as they want it.
        """
        with self._lock:
            if not self.is_on_servers(variable):
                return False
            for optimizer in optimizers:
                weights = optimizer_compat.built_variables(optimizer)
                if any(variable is each for each in (*weights, *optimizer.variables)):
                    self.updates.place(optimizer, weights)
            self.served.add([variable])
            return self.served.assign_blocks(variable, blocks)

    def synchronize(self) -> None:
        """What is scheduled from now on sees all that has finished."""
        with self._lock:
            self._floor = self._written(self._versions)

    def _written(self, versions: Sequence[int]) -> list[list[int]]:
        """Versions of the servers, with how often each was written to by now."""
        pairs = zip(versions, self.servers, strict=True)
        return [[version, server.writes] for version, server in pairs]

    def note_versions(self, versions: Sequence[int]) -> None:
        """Notes how far the servers are."""
        with self._condition.lock:
            self._versions = list(map(max, self._versions, versions))

    def address_of(self, worker: int) -> str | None:
        """Where a worker is now; `None` where that cannot be said."""
        try:
            return self._ask().task_address("worker", worker)
        except Exception:  # Of a service, maybe, which is asked again.
            return None

    def fence(self, worker: int) -> int:
        """Makes the servers refuse what a worker's earlier lives push; returns the
        number of its next one.
        """
        with self._condition.lock:
            self._lives[worker] = self._lives.get(worker, 0) + 1
            life = self._lives[worker]
        for server in self.servers:
            server.call({"op": "fence", "worker": worker, "incarnation": life})
        return life

    def release(self, worker: int) -> None:
        """Notes that a worker has nothing any more."""
        self.slots.release(worker)
        self.queue.wake_all()

    def slots_of(self, variables: Sequence[Any]) -> Held:
        """The slots of an optimizer, each group's on a worker; one from each worker
        that has several groups comes here, for one that has none.
        """
        held = self.slots.held(variables, self._numbered)
        held.spread(worker.index for worker in self.workers if worker.is_ready)
        return held

    def _numbered(self, held: Any) -> int:
        """A number for what workers keep as long as somebody here has it."""
        number = next(self._numbers)
        weakref.finalize(held, self.dropped.append, number)
        return number

    def _slots_on_worker(
        self, worker: int, number: int, group: int, made: int
    ) -> list[Array]:
        """What a worker keeps of an optimizer for a group, made in a round."""
        task = self.workers[worker]
        channel = Channel(
            task.address, task.name, self.credentials, _SECONDS_TO_ANSWER, is_there=True
        )
        told = {"op": "slots", "id": number, "group": group, "round": made}
        try:
            found = channel.call({**told, "coordinator": self.coordinator})[1]
            task.traffic += sum(array.nbytes for array in found)
            return list(map(np.array, found))
        finally:
            channel.close()

    def bytes_of_servers(self) -> int:
        """The bytes of all arrays that went to servers and came from them."""
        return sum(s.call({"op": "status"})[0]["traffic"] for s in self.servers)

    def lost_server(self) -> DistributeError | None:
        """The error of a server that is gone, if one is."""
        for server in self.servers:
            try:
                server.call({"op": "status"})
            except DistributeError as error:
                return error
        return None

    def layout_of(self, program: Traced) -> Header:
        """What a worker has to know of a program, as plain data: the same for one that
        comes later, when an optimizer may have other settings. It is another one where
        more servers have copies of what the program sets.
        """
        places = [self.served.place_of(variable) for _, variable in program.pushed]
        copies = [len(place.parts) for place in places if place and place.copies]
        key = self.coordinator, *copies
        known = program.layouts.get(key)
        if known is not None:
            return known
        with jax.enable_x64(program.x64):
            made = layout_of(program, self.served, self.updates, len(self.servers))
        return program.layouts.setdefault(key, made)

    def look(self, is_late: bool) -> None:
        """Says why nothing goes on, if no worker is there; and asks the servers, since
        nobody else would notice then that one is gone. Wakes the workers: Ctrl-C may
        have come after something was put into the queue, and before they knew.

        Args:
            is_late: Whether who waits has waited for long.
        """
        self.queue.wake_all()
        if any(worker.is_ready for worker in self.workers):
            return
        lost = self.lost_server()
        if lost is not None:
            self.queue.failed(lost)
        elif is_late:
            _log.warning(
                "The program waits for a worker, with %d function(s); none of %d is "
                "there. The last error: %s",
                self.queue.num_pending,
                len(self.workers),
                self.workers[0].last_error,
            )

    def join(self, timeout: float | None = None) -> bool:
        """Waits until all that was scheduled before has returned."""
        last = self.queue.last
        self.send_changed()
        ready = self.queue.wait(
            lambda: self.queue.done_below > last, timeout, look=self.look
        )
        self.synchronize()
        return ready

    def close(self, end_tasks: bool) -> None:
        """Lets go of the tasks of the cluster, or lets them end."""
        self.slots.collect()
        self._tasks.close(end_tasks)


def _not_taken(error: BaseException) -> UnavailableError:
    """The error of all calls after servers could not be taken anew."""
    return UnavailableError(
        "The strategy has no parameter servers and no workers: it could not take them "
        "anew.",
        received=f"{type(error).__name__} in strategy.reconnect: {error}",
        fix="start the servers, and call strategy.reconnect() once more.",
    )


def _arrays(call: Call, worker: int) -> list[Any]:
    """The arrays of the arguments, with those of this worker."""
    return [
        array.values[worker]
        if isinstance(array, PerWorkerValues)
        else np.asarray(array)
        for array in call.arrays
    ]


def _seen_as(platforms: Sequence[str]) -> contextlib.AbstractContextManager[None]:
    """Workers on CPUs cannot run the kernels of a coordinator's accelerator."""
    if "cpu" in platforms and jax.default_backend() != "cpu":
        return building.seen_as(jax.devices("cpu"))
    return contextlib.nullcontext()
