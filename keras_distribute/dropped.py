"""Closes what was dropped without being closed. Knows nothing else of the package.

Python may collect garbage at any allocation, also while the same thread holds a lock. A
finalizer that takes a lock or waits for a thread can then deadlock with itself. So here
it only puts the closing into a queue, for a thread of its own.
"""

from __future__ import annotations

import queue
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

# Of all queues the one whose `put` may be called within `put`.
_queue: queue.SimpleQueue[Callable[[], Any]] = queue.SimpleQueue()
_starting = threading.Lock()
_thread: threading.Thread | None = None


def when_dropped(owner: object, close: Callable[[], Any]) -> weakref.finalize[..., Any]:
    """Calls `close` soon after `owner` was collected, in another thread; not at the end
    of the program.

    Args:
        owner: What may be dropped.
        close: Must not hold `owner`, or it would never be collected.

    Returns:
        The finalizer, whose `detach` cancels the call.
    """
    _start()
    finalizer = weakref.finalize(owner, _queue.put, close)
    finalizer.atexit = False
    return finalizer


def settle() -> None:
    """Waits until all that was dropped before is closed."""
    thread = _thread
    if thread is None or not thread.is_alive() or thread is threading.current_thread():
        return
    done = threading.Event()
    _queue.put(done.set)
    while not done.wait(1.0) and thread.is_alive():
        pass


def _start() -> None:
    """Starts the thread, in a process that was forked, too."""
    global _thread
    with _starting:
        if _thread is None or not _thread.is_alive():
            name = "keras_distribute dropped"
            _thread = threading.Thread(target=_run, name=name, daemon=True)
            _thread.start()


def _run() -> None:
    while True:
        close = _queue.get()
        try:
            close()
        except BaseException as error:
            sys.excepthook(type(error), error, error.__traceback__)
        del close
