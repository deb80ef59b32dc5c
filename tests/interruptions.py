"""Raises an exception in the middle of a call, where Python could raise one from
outside.

Python looks for signals and for exceptions that other threads send when a function is
entered and when a function written in C has returned. A profile function is called at
the same places, and what it raises is raised there: so the place can be counted.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

EVENTS = ("call", "c_return", "c_exception")


class Interrupter:
    """Raises `KeyboardInterrupt` at one place of a call, and perhaps once more later.

    Args:
        first: The number of the place, among those of `inside`; `None`: only count.
        second: How many functions later, while the first is handled; `None`: never.
        inside: Only places in files whose path contains this count.
    """

    def __init__(
        self, first: int | None, second: int | None = None, inside: str = ""
    ) -> None:
        self._first, self._second, self._inside = first, second, inside
        self.count = 0
        self.where = "nowhere"

    def __call__(self, function: Callable[[], Any]) -> bool:
        """Calls `function`, and returns whether it was interrupted."""
        sys.setprofile(self._at_place)
        try:
            function()
        except KeyboardInterrupt:
            return True
        except ValueError as error:
            # JAX's caches say what comparing two keys has raised in an error of theirs.
            if "KeyboardInterrupt: " not in str(error):
                raise
            return True
        finally:
            sys.setprofile(None)
            sys.settrace(None)
        return False

    def _at_place(self, frame: types.FrameType, event: str, _: Any) -> None:
        if event not in EVENTS or self._inside not in frame.f_code.co_filename:
            return
        self.count += 1
        if self.count - 1 == self._first:
            code = frame.f_code
            self.where = f"{event} {code.co_filename}:{frame.f_lineno} {code.co_name}"
            if self._second is not None:
                sys.settrace(self._later)  # Python takes the profile function away.
            raise KeyboardInterrupt("first")

    def _later(self, frame: types.FrameType, event: str, _: Any) -> None:
        assert self._second is not None
        self._second -= 1
        if self._second < 0:
            self.where += f", then {frame.f_code.co_filename}:{frame.f_lineno}"
            raise KeyboardInterrupt("second")
