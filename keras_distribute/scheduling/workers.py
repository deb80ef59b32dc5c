"""The workers as the coordinator sees them: a thread for each gives it functions to
run, and takes it again when it comes back.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import weakref
from collections.abc import Sequence
from typing import Protocol

import jax
import numpy as np

from keras_distribute.errors import (
    ClusterError,
    DistributeError,
    ReplacedWorkerError,
    UnavailableError,
)
from keras_distribute.remote.channel import Channel, raise_remote
from keras_distribute.remote.credentials import Credentials
from keras_distribute.remote.frames import STAYS, Array, Header
from keras_distribute.scheduling.kept import Kept
from keras_distribute.scheduling.programs import Traced
from keras_distribute.scheduling.queue import Closure, Queue

_AHEAD = 2  # Functions that a worker has: one runs, one is on its way.
_MOST_ENDS = 8  # Of workers by one function.
_MOST_CUTS = 3  # After which a worker that cannot reach a server is an error.
_SECONDS_TO_REACH_SERVERS = 5.0  # They have just answered the coordinator.
_log = logging.getLogger(__name__)


class Owner(Protocol):
    """What a worker's thread asks of the cluster."""

    queue: Queue
    kept: Kept
    credentials: Credentials
    coordinator: str
    server_addresses: list[str]
    dropped: list[int]

    def layout_of(self, program: Traced) -> Header:
        """What the worker has to know of a program."""
        ...

    def address_of(self, worker: int) -> str | None:
        """Where a worker is now; `None` where that cannot be said."""
        ...

    def release(self, worker: int) -> None:
        """Notes that a worker has nothing any more."""
        ...

    def fence(self, worker: int) -> int:
        """Makes the servers refuse what a worker's earlier lives push; returns the
        number of its next one.
        """
        ...

    def lost_server(self) -> DistributeError | None:
        """The error of a server that is gone, if one is."""
        ...

    def note_versions(self, versions: Sequence[int]) -> None:
        """Notes how far the servers are."""
        ...


class Worker(threading.Thread):
    """The thread of one worker.

    Args:
        index: Of the worker.
        address: Of the worker, at first.
        owner: The cluster.
        steps: How many the worker has finished before.

    Attributes:
        is_ready: Whether the worker is there.
        platform: Of its devices; empty before it was there.
        num_devices: How many it has.
        steps: How many it has finished.
        traffic: The bytes of all arrays that went to it with functions, and came back.
    """

    def __init__(self, index: int, address: str, owner: Owner, steps: int) -> None:
        super().__init__(name=f"worker:{index}", daemon=True)
        self.index, self.address, self.steps = index, address, steps
        self.is_ready, self.traffic = False, 0
        self.platform, self.num_devices = "", 1
        self.last_error: DistributeError | None = None
        # A thread lives as long as it runs: so a strategy that is dropped is collected.
        self._weak_owner = weakref.ref(owner)
        self._is_closed = threading.Event()
        self._woken, self._wake = socket.socketpair()
        self._woken.setblocking(False)
        self._wake.setblocking(False)
        self._running: dict[int, Closure] = {}
        self._sent: dict[int, Header] = {}  # Of programs their layouts.
        self._ends_task = False
        self._num_dropped = self._cuts = 0
        owner.queue.on_work(self.wake)

    @property
    def _owner(self) -> Owner:
        owner = self._weak_owner()
        if owner is None:
            raise UnavailableError("The strategy is gone.")
        return owner

    def wake(self, is_urgent: bool) -> None:
        """Makes the thread look at the queue, if it has room or that is urgent."""
        if is_urgent or len(self._running) < _AHEAD:
            with contextlib.suppress(BlockingIOError, OSError):
                self._wake.send(b"x")

    def close(self, end_task: bool) -> None:
        """Lets the thread end, and the worker, too."""
        self._ends_task = end_task
        self._is_closed.set()
        with contextlib.suppress(OSError):
            self._wake.send(b"x")

    def run(self) -> None:
        """Serves the worker, in each of its lives."""
        while not self._is_closed.is_set():
            channel = None
            try:
                channel = self._connected()
                self._serve(channel)
            except DistributeError as error:
                has_ended = channel is not None and channel.is_over
                self._lost(error, has_ended)
            except Exception as error:  # A mistake of ours must not hang the user.
                self._owner.queue.failed(error)
                self._lost(None)
            finally:
                if channel is not None:
                    channel.close()
            self._is_closed.wait(0.2)
        self.is_ready = False

    def _connected(self) -> Channel:
        owner = self._owner
        if self.last_error is not None:
            self.address = owner.address_of(self.index) or self.address
        channel = Channel(self.address, self.name, owner.credentials, timeout=2.0)
        try:
            told, _ = channel.call(
                {
                    "op": "begin",
                    "coordinator": owner.coordinator,
                    "worker": self.index,
                    "incarnation": owner.fence(self.index),
                    "servers": owner.server_addresses,
                    "timeout": _SECONDS_TO_REACH_SERVERS,
                },
                timeout=60.0,
            )
            self._check_version(told["jax"])
        except BaseException:
            channel.close()
            raise
        self._sent.clear()
        self.platform, self.num_devices = told["platform"], told["devices"]
        self.is_ready = True
        owner.queue.notify()
        return channel

    def _check_version(self, version: str) -> None:
        if version == jax.__version__:
            return
        error = ClusterError(
            "All tasks of a cluster run the same version of JAX.",
            received=f"{version} in the task {self.name}, {jax.__version__} in the "
            "coordinator.",
            fix=f"pip install jax=={jax.__version__} there.",
        )
        self._owner.queue.failed(error)
        raise error

    def _serve(self, channel: Channel) -> None:
        while not self._is_closed.is_set():
            while len(self._running) < _AHEAD:
                closure = self._owner.queue.take(self.index, not self._running)
                if closure is None:
                    break
                self._send(channel, closure)
            reply = channel.receive(wake=self._woken.fileno())
            if reply is None:
                with contextlib.suppress(BlockingIOError):
                    self._woken.recv(4096)
                if self._running and self._owner.queue.gives_up:
                    raise UnavailableError(
                        "What it runs was given up, since another function has failed."
                    )
            else:
                self._take(channel, *reply)
        if self._ends_task:
            channel.send({"op": "end", "coordinator": self._owner.coordinator})
        if self._running:
            raise UnavailableError("The strategy was closed.")

    def _send(self, channel: Channel, closure: Closure) -> None:
        try:
            number = self._told(channel, closure)
        except UnavailableError:
            self._owner.queue.put_back(closure)  # Nobody else knows of it any more.
            raise
        except Exception as error:
            self._owner.queue.failed(error, closure)
        else:
            self._running[number] = closure

    def _told(self, channel: Channel, closure: Closure) -> int:
        """Tells the worker to run a function, and before that what it does not know of
        it; the number of the answer.
        """
        program = closure.program
        coordinator = {"coordinator": self._owner.coordinator}
        self._drop(channel)
        for iterator in closure.iterators:
            dataset = iterator.dataset
            if dataset.number not in self._sent:
                told = {"op": "dataset", "id": dataset.number, **coordinator}
                channel.send({**told, "x64": dataset.x64}, [dataset.pickled])
                self._sent[dataset.number] = {}
            if iterator.number not in self._sent:
                told = {"op": "iterator", "id": iterator.number, **coordinator}
                channel.send({**told, "dataset": dataset.number})
                self._sent[iterator.number] = {}
        layout = self._owner.layout_of(program)
        if self._sent.get(program.number) is not layout:
            told = {"op": "program", "id": program.number, "layout": layout}
            channel.send({**told, **coordinator}, program.blobs)
            self._sent[program.number] = layout
        header: Header = {
            "op": "run",
            "closure": closure.number,
            "program": program.number,
            "steps": closure.steps,
            "first": closure.first,
            "floor": closure.floor,
            "iterators": [iterator.number for iterator in closure.iterators],
            "bound": closure.bound,
            "done": self._owner.queue.done_below,
            **coordinator,
        }
        if closure.sees_all:
            closure.kept = self._owner.kept.taken_by(program)
        args = closure.args(self.index)
        if closure.slots is not None:
            held, group, makes, size = closure.slots
            has = held.round_of(group, self.index)
            first = len(program.advanced)
            header["slots"] = [held.number, group, first, size, makes, has]
            header["groups"] = held.groups_of(self.index)
            self._sent[held.number] = {}
            # Since it was scheduled somebody may have read them, and they came here.
            here = [STAYS] * size if has is not None else held.here(group)
            args[first : first + size] = here or args[first : first + size]
        arrays = [*closure.kept, *args]
        self.traffic += sum(array.nbytes for array in arrays)
        return channel.send(header, arrays)

    def _drop(self, channel: Channel) -> None:
        """Lets the worker drop programs, datasets and iterators that are gone."""
        new = self._owner.dropped[self._num_dropped :]
        self._num_dropped += len(new)
        gone = self._sent.keys() & set(new)
        if gone:
            told = {"op": "drop", "coordinator": self._owner.coordinator}
            channel.send({**told, "ids": sorted(gone)})
            for number in gone:
                del self._sent[number]

    def _take(
        self, channel: Channel, number: int, header: Header, arrays: list[Array]
    ) -> None:
        """Takes an answer of the worker."""
        closure = self._running.pop(number, None)
        self.traffic += sum(array.nbytes for array in arrays)
        try:
            raise_remote(header, self.name)
        except Exception as error:
            if isinstance(error, UnavailableError):
                lost = self._owner.lost_server()
                self._cuts += not isinstance(error, ReplacedWorkerError)
                if lost is None and self._cuts <= _MOST_CUTS:
                    if closure is not None:
                        self._owner.queue.put_back(closure)
                    raise  # It was taken for dead, or cut off for a while: begin again.
                error = lost or error
            self._owner.queue.failed(error, closure)
            return
        if closure is None:
            return
        if "again" in header:  # One before it waits for its program.
            self._send(channel, closure)
            return
        if "needs" in header:
            forms = [
                [(dtype, tuple(shape)) for dtype, shape in element]
                for element in header["needs"]
            ]
            try:
                if header["steps"]:
                    self._note_steps(closure, header)
                    closure.finish(closure.program, list(map(np.array, arrays)))
                closure.retrace(closure, forms)
            except Exception as error:
                self._owner.queue.failed(error, closure)
                return
            self._send(channel, closure)
            return
        self._cuts = 0
        if closure.slots is not None:
            held, group, makes, _ = closure.slots
            held.note(group, makes, self.index)
        self._note_steps(closure, header)
        program = closure.program
        try:
            copies = [np.array(array) for array in arrays]
            closure.finish(program, copies[program.num_results :])
        except Exception as error:
            self._owner.queue.failed(error, closure)
            return
        self._owner.queue.finished(closure, program.results(copies))

    def _note_steps(self, closure: Closure, header: Header) -> None:
        """Counts the steps of a function that the worker has finished."""
        closure.first += header["steps"]
        self.steps += header["steps"] if closure.counted is None else closure.counted
        self._owner.note_versions(header["versions"])

    def _lost(self, error: DistributeError | None, has_ended: bool = False) -> None:
        """Gives the work of a worker that is gone to the others.

        Args:
            error: Why it is gone.
            has_ended: Whether it may be what it ran that has ended it.
        """
        if self.is_ready and not self._is_closed.is_set():
            _log.warning("%s is gone: %s", self.name, error)
        self.is_ready, self.last_error = False, error
        owner = self._weak_owner()
        if owner is not None:  # It may have been dropped.
            owner.release(self.index)
        if not self._running:
            return
        try:
            self._owner.fence(self.index)
        except DistributeError as failure:
            failure = self._owner.lost_server() or failure
            for closure in self._running.values():
                self._owner.queue.failed(failure, closure)
        else:
            if has_ended:  # The first one ran, others waited there.
                self._count_end(next(iter(self._running)), error)
            newest_first = sorted(self._running.values(), key=lambda c: -c.number)
            for closure in newest_first:
                self._owner.queue.put_back(closure)
        self._running.clear()

    def _count_end(self, number: int, error: DistributeError | None) -> None:
        """Gives up a function that has ended too many workers."""
        closure = self._running[number]
        closure.ended += 1
        if closure.ended < _MOST_ENDS:
            return
        del self._running[number]
        failure = ClusterError(
            f"A function was given up: each of {closure.ended} workers that ran it has "
            "ended, frozen or lost its connection meanwhile.",
            received=f"the last time, of {self.name}: {error}",
            fix="mend what the worker has written about before it ended: a batch that "
            "needs more memory than it has, or a dataset function that ends the "
            "process; then schedule the function again.",
        )
        self._owner.queue.failed(failure, closure)
