"""Waiting for what another thread changes, which Ctrl-C ends without leaving a lock
held.

Python raises a `KeyboardInterrupt` wherever a function written in Python has called
another, so also between the return of `threading.Condition.__enter__` and the block
that would release the lock: the next `with` would wait for ever. `with` on a lock
itself is one bytecode. (A `threading.Event` waits by a condition; a lock that is held
until something has happened serves as well: `with lock: pass` waits for it.)
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

_SECONDS_TO_LOOK = 3.0
_LOOKS_TO_A_WARNING = 10


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

    def wait_until(
        self,
        ready: Callable[[], bool],
        look: Callable[[bool], None],
        timeout: float | None = None,
    ) -> bool:
        """Waits until `ready()`; to be called without the lock.

        Args:
            ready: Called with the lock.
            look: Called without the lock every 3 s in which nothing changes; with
                `True` every 30 s, to say why.
            timeout: Seconds; `None`: for ever.

        Returns:
            Whether that came within `timeout` seconds.
        """
        end = math.inf if timeout is None else time.monotonic() + timeout
        looks = 0
        while True:
            with self.lock:
                if ready():
                    return True
                left = end - time.monotonic()
                if left <= 0:
                    return False
                is_woken = self.wait(min(left, _SECONDS_TO_LOOK))
            if not is_woken and left > _SECONDS_TO_LOOK:
                looks += 1
                look(looks % _LOOKS_TO_A_WARNING == 0)
