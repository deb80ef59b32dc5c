"""How long parts of a step take, while it is measured, by `launches.times`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator

from keras_distribute.devices.launches import Times, launches


def start() -> Times:
    """Begins to measure anew."""
    launches.times = times = Times()
    return times


def stop() -> None:
    """Ends measuring."""
    launches.times = None


@contextlib.contextmanager
def of(part: str) -> Generator[None]:
    """Around a part of a step."""
    times = launches.times
    if times is None:
        yield
        return
    begun = time.perf_counter()
    try:
        yield
    finally:
        times.ended[part] = time.perf_counter()
        times.seconds[part] += times.ended[part] - begun
