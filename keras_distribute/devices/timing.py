"""How long parts of a step take, while it is measured. Knows nothing else of
the package.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Generator


class Times:
    """The seconds spent in each part of a step, and when each ended last."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.ended: dict[str, float] = {}


class _Running:
    """What is being measured."""

    times: Times | None = None


def start() -> Times:
    """Begins to measure anew."""
    _Running.times = times = Times()
    return times


def stop() -> None:
    """Ends measuring."""
    _Running.times = None


@contextlib.contextmanager
def of(part: str) -> Generator[None]:
    """Around a part of a step."""
    times = _Running.times
    if times is None:
        yield
        return
    begun = time.perf_counter()
    try:
        yield
    finally:
        times.ended[part] = time.perf_counter()
        times.seconds[part] += times.ended[part] - begun
