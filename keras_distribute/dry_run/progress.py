"""Says on stderr that something takes long, and how long it has taken: one line with
the seconds in a terminal, a few plain lines elsewhere.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import TextIO

# What is over sooner says nothing.
_QUIET_SECONDS = 3.0
_SECONDS_BETWEEN_LINES = 60.0


class Progress:
    """A line for as long as the context is entered.

    Args:
        what: What takes long, in the words of the line.
        stream: Where to; stderr by default.
    """

    def __init__(
        self, what: str, is_shown: bool = True, stream: TextIO | None = None
    ) -> None:
        self._what, self._is_shown = what, is_shown
        self._stream = sys.stderr if stream is None else stream
        self._ended = threading.Event()
        self._said_something = False

    def __enter__(self) -> Progress:
        self._begun = time.monotonic()
        if self._is_shown:
            self._thread = threading.Thread(target=self._say, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        if not self._is_shown:
            return
        self._ended.set()
        self._thread.join()
        if self._said_something:
            last = "took" if error_type is None else "failed after"
            self._write(f"{self._what}: {last} {self._seconds()} s", end="\n")

    def _say(self) -> None:
        is_terminal = self._stream.isatty()
        between = 1.0 if is_terminal else _SECONDS_BETWEEN_LINES
        wait = _QUIET_SECONDS
        while not self._ended.wait(wait):
            self._said_something = True
            self._write(
                f"{self._what}: {self._seconds()} s", end="" if is_terminal else "\n"
            )
            wait = between

    def _seconds(self) -> int:
        return round(time.monotonic() - self._begun)

    def _write(self, text: str, end: str) -> None:
        # Back to the beginning of the line, and nothing of a longer one left.
        again = "\r\x1b[K" if self._stream.isatty() else ""
        self._stream.write(f"{again}{text}{end}")
        self._stream.flush()
