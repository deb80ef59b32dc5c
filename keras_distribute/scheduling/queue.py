"""The functions that wait for a worker, and the error of the first that failed.

TensorFlow's rules (`tf.distribute.coordinator.ClusterCoordinator`): the first error is
raised once, by `schedule`, `join` or `done`, when nothing runs any more; all that
waited then is cancelled, and the coordinator can be used again.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Any

from keras_distribute.errors import CancelledError, UnavailableError
from keras_distribute.remote.frames import Array
from keras_distribute.scheduling.programs import Traced
from keras_distribute.scheduling.rounds import HeldGroup
from keras_distribute.scheduling.values import PerWorkerIterator, RemoteValue
from keras_distribute.threads.condition import Condition

_MOST = 256 * 1024  # As in TensorFlow: for more, `schedule` waits.
_SECONDS_TO_END = 60.0  # For what runs where another function has failed.
_SECONDS_TO_LET_GO = 10.0


@dataclasses.dataclass(eq=False)
class Closure:
    """A function with its arguments, on its way.

    Attributes:
        program: What runs.
        retrace: Takes the program for batches of other forms.
        kept: The values of the coordinator's variables when it was scheduled, or, if it
            `sees_all`, when a worker took it.
        args: The arguments' arrays, for each step; what each worker has its own of by
            the worker's number.
        steps: How many.
        first: The one to begin with: those before it are done, by a program for batches
            of another form.
        floor: For each server the version and the writes that have to be seen.
        iterators: Those of the workers among the arguments.
        result: What the user waits with.
        finish: Called with the arrays that came back, before `result` is set.
        counted: For a function of a round of local steps, of how many: a worker takes
            it only when it has nothing else to do.
        slots: Those that it takes first, and makes first, if they stay on the worker
            that has them: then no other one takes it.
        is_alone: Whether it runs while no other one does.
        number: In the order in which they were put into the queue.
        ended: How many workers have ended while they ran it.
    """

    program: Traced
    retrace: Callable[[Closure, list[Any]], None]
    kept: list[Array]
    args: Callable[[int], list[Any]]
    steps: int
    floor: list[list[int]]
    iterators: Sequence[PerWorkerIterator]
    result: RemoteValue
    finish: Callable[[Traced, list[Array]], None]
    bound: int | None = None
    counted: int | None = None
    slots: HeldGroup | None = None
    is_alone: bool = False
    first: int = 0
    number: int = 0
    ended: int = 0

    def is_for(self, worker: int) -> bool:
        """Whether a worker may take it."""
        holder = None if self.slots is None else self.slots.holder
        return holder is None or holder == worker

    @property
    def sees_all(self) -> bool:
        """Whether it needs what those before it have added."""
        return self.is_alone or any(self.program.partial)


class Queue:
    """Closures from the user's thread to those of the workers.

    Args:
        condition: Notified at each change.

    Attributes:
        is_closed: Whether the strategy is.
        gives_up: Whether workers are to let go of what they run.
    """

    def __init__(self, condition: Condition) -> None:
        self._condition = condition
        self._waiting: deque[Closure] = deque()
        self._running: set[Closure] = set()
        # In the order of their numbers.
        self._unfinished: OrderedDict[int, Closure] = OrderedDict()
        self._ordered: dict[int, int] = {}  # By variable the last one that orders it.
        self._error: BaseException | None = None
        self._numbers = 0
        self._wake: list[Callable[[bool], None]] = []
        self._lost: UnavailableError | None = None  # Of a server.
        self.is_closed = self.gives_up = False

    def on_work(self, wake: Callable[[bool], None]) -> None:
        """Calls `wake` when there is something to do; with `True` also who is busy."""
        self._wake.append(wake)

    @property
    def done_below(self) -> int:
        """All closures of lower numbers have returned."""
        with self._condition.lock:
            return next(iter(self._unfinished), self._numbers + 1)

    @property
    def last(self) -> int:
        """The number of the one that was put last."""
        with self._condition.lock:
            return self._numbers

    def has_room(self) -> bool:
        """Whether not too many wait. Called with the condition's lock."""
        return len(self._waiting) < _MOST

    def orders(self, variables: Sequence[Any]) -> bool:
        """Whether one that has not returned changes any of these in its turn."""
        with self._condition.lock:
            return any(
                self._ordered.get(id(each)) in self._unfinished for each in variables
            )

    def put(self, closure: Closure) -> None:
        """Adds one, and gives it its number.

        Raises:
            UnavailableError: Where the strategy is closed.
            Exception: The first error of those before.
        """
        with self._condition.lock:
            self._raise_error()
            self._check_open()
            self._numbers += 1
            closure.number = self._numbers
            if not self._unfinished:
                self._ordered.clear()
            try:
                self._unfinished[closure.number] = closure
                if closure.is_alone:
                    ordered = map(id, closure.program.ordered)
                    self._ordered.update(dict.fromkeys(ordered, closure.number))
                self._waiting.append(closure)
            except BaseException:  # Ctrl-C: who joins would wait for it for ever.
                if closure not in self._waiting:
                    self._unfinished.pop(closure.number, None)
                raise
        self.wake_all()

    def take(self, worker: int, is_idle: bool = True) -> Closure | None:
        """One to run, or `None` where nothing waits for this worker.

        Args:
            worker: Who asks.
            is_idle: Whether it has nothing to do.
        """
        with self._condition.lock:
            if self._error is not None or any(c.is_alone for c in self._running):
                return None
            for i, closure in enumerate(self._waiting):
                if closure.is_alone and (i or self._running):
                    return None
                if closure.counted is not None and not is_idle:
                    return None
                if closure.is_for(worker):
                    del self._waiting[i]
                    self._running.add(closure)
                    return closure
            return None

    def put_back(self, closure: Closure) -> None:
        """Of a worker that is gone: another one has to run it."""
        with self._condition.lock:
            self._running.discard(closure)
            if self._error is not None or self.is_closed:
                self._cancel(closure)
            else:
                self._waiting.appendleft(closure)
            self._condition.notify_all()
        self.wake_all()

    def finished(self, closure: Closure, value: Any) -> None:
        """Notes the result of one."""
        with self._condition.lock:
            self._running.discard(closure)
            self._unfinished.pop(closure.number, None)
            closure.result.set_value(value)
            self._condition.notify_all()
            next_alone = bool(self._waiting) and self._waiting[0].is_alone
        if closure.is_alone or next_alone:  # Other workers wait for this one's end.
            self.wake_all()

    def failed(self, error: BaseException, closure: Closure | None = None) -> None:
        """Notes an error, and cancels what waits."""
        with self._condition.lock:
            if closure is not None:
                self._running.discard(closure)
                self._unfinished.pop(closure.number, None)
                closure.result.set_error(error)
            self._error = self._error or error
            self._cancel_waiting()
            self._condition.notify_all()

    def lost(self, error: UnavailableError) -> None:
        """Notes that a server is gone: every call says so from now on."""
        with self._condition.lock:
            self._lost = self._lost or error
            self.failed(error)

    def begin_again(self) -> None:
        """Forgets errors and whom to wake, with servers that are new; all that waited
        or ran is cancelled.
        """
        with self._condition.lock:
            left = [*self._waiting, *self._running]
            self._waiting.clear()
            self._running.clear()
            for closure in left:
                self._cancel(closure)
            self._error = self._lost = None
            self._wake.clear()
            self._condition.notify_all()

    def wake_all(self, is_urgent: bool = False) -> None:
        """Lets all workers look for something to do; `is_urgent`: also who is busy."""
        for wake in self._wake:
            wake(is_urgent)

    def _cancel_waiting(self) -> None:
        while self._waiting:
            self._cancel(self._waiting.popleft())

    def _cancel(self, closure: Closure) -> None:
        self._unfinished.pop(closure.number, None)
        closure.result.set_error(
            CancelledError(
                "The function was given up, since another one has raised an error.",
                received=f"{self._error}"
                if self._error
                else "a strategy that closes or begins again.",
                fix="mend that one, and schedule this one again.",
            )
        )

    def wait(
        self,
        ready: Callable[[], bool],
        timeout: float | None = None,
        *,
        look: Callable[[bool], None],
    ) -> bool:
        """Waits until `ready()`, or an error; `look` is as in `Condition.wait_until`.

        Returns:
            Whether that came within `timeout` seconds.

        Raises:
            UnavailableError: Where the strategy is closed, and nobody works any more.
            Exception: The first error of any closure, when nothing runs any more.
        """

        def is_over() -> bool:
            self._raise_error()
            if not ready():
                self._check_open()
                return False
            return True

        return self._condition.wait_until(is_over, look, timeout)

    def _check_open(self) -> None:
        if self.is_closed:
            raise UnavailableError(
                "The strategy was closed: its workers and servers are gone.",
                received="a function for them after that.",
                fix="train, predict and save before strategy.close().",
            )

    def notify(self) -> None:
        """Lets who waits look again."""
        with self._condition.lock:
            self._condition.notify_all()

    def check(self) -> None:
        """Raises the first error, once, when nothing runs any more."""
        with self._condition.lock:
            self._raise_error()

    def _raise_error(self) -> None:
        """Raises the first error, once, when nothing runs any more; what has not ended
        by then is given up.
        """
        if self._error is None:
            return
        if not self._condition.wait_for(lambda: not self._running, _SECONDS_TO_END):
            # So the servers refuse what they push, and nothing changes any more.
            try:
                self.gives_up = True
                self.wake_all(True)
                self._condition.wait_for(lambda: not self._running, _SECONDS_TO_LET_GO)
            finally:
                self.gives_up = False
        error, self._error = self._error, self._lost
        if error is not None:  # Another thread has raised it, which waited, too.
            raise error

    @property
    def num_pending(self) -> int:
        """How many wait or run."""
        with self._condition.lock:
            return len(self._waiting) + len(self._running)

    def close(self) -> None:
        """Cancels all that waits."""
        with self._condition.lock:
            self.is_closed = True
            self._cancel_waiting()
            self._condition.notify_all()
