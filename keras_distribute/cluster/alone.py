"""What one process does by itself while the others wait for it: it must begin nothing
in which they take part, or all would wait for ever.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator

from keras_distribute.errors import ContextError


class _Thread(threading.local):
    topic: str | None = None


_thread = _Thread()


@contextlib.contextmanager
def alone(topic: str) -> Generator[None]:
    """For the `with` block, this thread does what the others wait for."""
    before, _thread.topic = _thread.topic, topic
    try:
        yield
    finally:
        _thread.topic = before


def is_alone() -> bool:
    """Whether the others wait for what this thread does."""
    return _thread.topic is not None


def check_together(what: str) -> None:
    """Raises where this thread does alone what needs all processes."""
    if _thread.topic is not None:
        raise ContextError(
            f"{what} involves all processes, and the others wait for this one.",
            received=f"a call in one process alone, at {_thread.topic}.",
            fix="call it in every process, before kd.run_on_chief: values = "
            "model.get_weights(). model.save(path) is for every process, too: one "
            "of them writes.",
        )
