"""Calls that an exception from outside cannot break off.

Python raises a `KeyboardInterrupt` (or whatever a signal handler raises) in the main
thread, between any two bytecodes. What must be done as a whole is called in a thread
that no signal reaches: whoever waits for it may be interrupted, and the call goes on.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeAlias

_Queue: TypeAlias = "queue.SimpleQueue[_Call | None]"


class Calls:
    """Calls functions in a thread, one after the other. Whoever uses it holds a lock.

    Args:
        name: The thread's.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._unsettled: _Call | None = None
        self._thread: tuple[int, _Queue] | None = None  # Its process, what it calls.

    @property
    def is_busy(self) -> bool:
        """Whether a call has begun and not ended; without the lock, too."""
        call = self._unsettled
        return call is not None and call.has_begun and call.unfinished.locked()

    def run(self, function: Callable[[], None]) -> None:
        """Calls a function there, and raises what it does."""
        self.settle()
        call = self._unsettled = _Call(function)
        self._put(call)
        with call.unfinished:
            self._unsettled = None
        if call.error is not None:
            raise call.error

    def settle(self, timeout: float = -1) -> None:
        """Waits for a call whose caller was interrupted: for so many seconds, unless
        negative.
        """
        if self._unsettled is not None:
            # The thread may not have been given it. It is given another one, and what
            # it was given before has ended when that has.
            after = _Call(lambda: None)
            self._put(after)
            after.unfinished.acquire(timeout=timeout)
            self._unsettled = None

    def end(self) -> None:
        """Ends the thread, unless a caller was interrupted; another call starts it."""
        if self._unsettled is None and self._thread is not None:
            self._put(None)
            self._thread = None

    def _put(self, call: _Call | None) -> None:
        # A process that was forked has no thread. (Interrupted, `Thread.is_alive` takes
        # one that runs for one that has ended.)
        if self._thread is None or self._thread[0] != os.getpid():
            calls: _Queue = queue.SimpleQueue()
            thread = threading.Thread(
                target=_work, args=(calls,), name=self._name, daemon=True
            )
            thread.start()
            self._thread = os.getpid(), calls
        self._thread[1].put(call)


def _work(calls: _Queue) -> None:
    while (call := calls.get()) is not None:
        call.run()
        del call  # With the error that it holds.


class _Call:
    """A call of a function in the thread, from its request to its end.

    Attributes:
        has_begun: Whether the thread has taken it.
        unfinished: Held until the function has returned.
        error: What it raised.
    """

    def __init__(self, function: Callable[[], None]) -> None:
        self._function: Any = function
        self.has_begun = False
        self.unfinished = threading.Lock()
        self.unfinished.acquire()
        self.error: BaseException | None = None

    def run(self) -> None:
        self.has_begun = True
        try:
            self._function()
        except BaseException as error:
            self.error = error
        self._function = None  # With the arguments that it holds.
        self.unfinished.release()
