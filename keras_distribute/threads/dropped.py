"""Closes what was dropped without being closed.

Python may collect garbage at any allocation, also while the same thread holds a lock. A
finalizer that takes a lock or waits for a thread can then deadlock with itself. So here
it only puts the closing into a queue, for a thread of its own.
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any


class _Closer:
    """A thread that closes what is in its queue."""

    def __init__(self) -> None:
        # Of all queues the one whose `put` may be called within `put`.
        self.queue: queue.SimpleQueue[Callable[[], Any]] = queue.SimpleQueue()
        self.unfinished: list[Callable[[], Any]] = []
        self._starting = threading.Lock()
        # It never ends. (Interrupted, `Thread.is_alive` takes one that runs for one
        # that has ended.)
        self.thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts the thread."""
        with self._starting:
            if self.thread is None:
                name = "keras_distribute dropped"
                args = (calls := queue.SimpleQueue[Callable[[], Any]](),)
                thread = threading.Thread(
                    target=self._run, args=args, name=name, daemon=True
                )
                thread.start()
                self.queue, self.thread = calls, thread

    def put(self, close: Callable[[], Any]) -> None:
        self.unfinished.append(close)
        self.queue.put(close)

    def _run(self, calls: queue.SimpleQueue[Callable[[], Any]]) -> None:
        while True:
            close = calls.get()
            try:
                close()
            except BaseException as error:
                with contextlib.suppress(BaseException):
                    sys.excepthook(type(error), error, error.__traceback__)
            with contextlib.suppress(ValueError):  # What only waits is not in it.
                self.unfinished.remove(close)
            del close


_closer = _Closer()
if hasattr(os, "register_at_fork"):  # What its parent has dropped, that closes.
    os.register_at_fork(after_in_child=_closer.__init__)


def when_dropped(owner: object, close: Callable[[], Any]) -> weakref.finalize[..., Any]:
    """Calls `close` soon after `owner` was collected, in another thread; not at the end
    of the program.

    Args:
        owner: What may be dropped.
        close: Must not hold `owner`, or it would never be collected.

    Returns:
        The finalizer, whose `detach` cancels the call.
    """
    _closer.start()
    finalizer = weakref.finalize(owner, _closer.put, close)
    finalizer.atexit = False
    return finalizer


def settle() -> None:
    """Waits until all that was dropped before is closed."""
    thread = _closer.thread
    if thread is None or thread is threading.current_thread():
        return
    if not _closer.unfinished:
        return  # To wait for the thread takes 0.2 ms.
    done = threading.Lock()
    done.acquire()
    _closer.queue.put(done.release)
    done.acquire()
