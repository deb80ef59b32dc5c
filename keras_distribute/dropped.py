"""Ends what was dropped without being closed. Knows nothing else of the package.

Python may collect garbage at any allocation, also while the same thread holds a lock of
`threading`'s own. A finalizer that waits for a thread, or takes a lock, can then wait
for itself for ever. Here it only hands over; a thread does it.
"""

from __future__ import annotations

import queue
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

_Ending = Callable[[], Any]

_handed_over: queue.SimpleQueue[_Ending] = (
    queue.SimpleQueue()
)  # Its `put` may be called while it is being called.
_starting = threading.Lock()
_thread: threading.Thread | None = None


def when_dropped(owner: object, end: _Ending) -> weakref.finalize[..., Any]:
    """Calls `end` soon after `owner` has gone, in another thread; not at the end of the
    program.

    Args:
        owner: What may be dropped.
        end: Must not hold `owner`, which would never go.

    Returns:
        The finalizer, whose `detach` calls it off.
    """
    _start()
    finalizer = weakref.finalize(owner, _handed_over.put, end)
    finalizer.atexit = False
    return finalizer


def settle() -> None:
    """Returns when all that was dropped before has been ended."""
    thread = _thread
    if thread is None or not thread.is_alive() or thread is threading.current_thread():
        return
    done = threading.Event()
    _handed_over.put(done.set)
    while not done.wait(1.0) and thread.is_alive():
        pass


def _start() -> None:
    """Starts the thread, in a process that was forked, too."""
    global _thread
    with _starting:
        if _thread is None or not _thread.is_alive():
            _thread = threading.Thread(
                target=_run, name="keras_distribute dropped", daemon=True
            )
            _thread.start()


def _run() -> None:
    while True:
        end = _handed_over.get()
        try:
            end()
        except BaseException as error:
            sys.excepthook(type(error), error, error.__traceback__)
        del end
