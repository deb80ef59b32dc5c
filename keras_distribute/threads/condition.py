"""Waiting for what another thread changes, which Ctrl-C ends without leaving a lock
held.

Python raises a `KeyboardInterrupt` wherever a function written in Python has called
another, so also between the return of `threading.Condition.__enter__` and the block
that would release the lock: the next `with` would wait for ever. `with` on a lock
itself is one bytecode. (A `threading.Event` waits by a condition; a lock that is held
until something has happened serves as well: `with lock: pass` waits for it.)
"""

from __future__ import annotations

import threading


class Condition(threading.Condition):
    """A condition that is entered by `with condition.lock`."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        super().__init__(self.lock)

    def __enter__(self) -> bool:
        raise TypeError("Write `with condition.lock:`, which Ctrl-C cannot break.")

    def wait(self, timeout: float | None = None) -> bool:
        """As that of `threading`; the lock is held whatever is raised."""
        try:
            return super().wait(timeout)
        except BaseException:
            # It may have come right after the lock was released.
            if not self._is_owned():  # pyright: ignore[reportAttributeAccessIssue]
                self.lock.acquire()
            raise
