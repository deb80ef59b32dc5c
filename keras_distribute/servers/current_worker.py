"""Which worker runs a dataset function: its index, while the function runs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator


class _Current(threading.local):
    index: int | None = None


_current = _Current()


@contextlib.contextmanager
def running_as(index: int) -> Generator[None]:
    """Code in this `with` block runs for the worker `index`."""
    before, _current.index = _current.index, index
    try:
        yield
    finally:
        _current.index = before


def current_index() -> int | None:
    """The worker that this thread runs for; `None` elsewhere."""
    return _current.index
