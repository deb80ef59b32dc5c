"""What this thread does with variables at the moment; `given_away`, `read_before` and
`accumulators_created` say it for a `with` block. Knows no variable.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator

from keras_distribute.context import in_force

thread = in_force.thread


@contextlib.contextmanager
def given_away() -> Generator[None]:
    """Arrays assigned in this `with` block belong to the variables alone."""
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
