"""What this thread does with variables at the moment; `given_away`, `read_before` and
`accumulators_created` say it for a `with` block. Knows no variable.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator
from typing import Any


class _Thread(threading.local):
    """What a thread is in the middle of.

    Attributes:
        gives_away: Whether arrays that it assigns are used by nobody else.
        creates_accumulators: Whether variables that it creates add up gradients over
            micro-steps.
        read: By their ids, values of variables that were read beforehand.
    """

    def __init__(self) -> None:
        self.gives_away = self.creates_accumulators = False
        self.read: dict[int, Any] = {}


thread = _Thread()


@contextlib.contextmanager
def given_away() -> Generator[None]:
    """Arrays assigned in this `with` block are the variables' from now on: nobody else
    uses them.
    """
    before, thread.gives_away = thread.gives_away, True
    try:
        yield
    finally:
        thread.gives_away = before


@contextlib.contextmanager
def accumulators_created() -> Generator[None]:
    """Variables created in this `with` block add up gradients over micro-steps."""
    thread.creates_accumulators = True
    try:
        yield
    finally:
        thread.creates_accumulators = False
