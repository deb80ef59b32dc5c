"""How long parts of a step take, while it is measured, by `launches.times`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator
from typing import Any

import jax

from keras_distribute.devices.launches import Times, launches

_TRACES = "_keras_distribute_traces"


def start(trainer: Any, trace_dir: str | None) -> Times:
    """Begins to measure the `fit` of a trainer anew.

    Args:
        trace_dir: A folder for a profile of it; `None` for none.
    """
    if trace_dir is not None:
        jax.profiler.start_trace(trace_dir)
    vars(trainer)[_TRACES] = trace_dir is not None
    launches.times = times = Times()
    return times


def stop(trainer: Any) -> None:
    """Ends measuring, if it is this trainer's `fit` that is measured."""
    traces = vars(trainer).pop(_TRACES, None)
    if traces is None:
        return
    launches.times = None
    if traces:
        jax.profiler.stop_trace()


_UNTIMED = contextlib.nullcontext()


def of(part: str) -> contextlib.AbstractContextManager[None]:
    """Around a part of a step."""
    times = launches.times
    return _UNTIMED if times is None else _timed(times, part)


@contextlib.contextmanager
def _timed(times: Times, part: str) -> Generator[None]:
    begun = time.perf_counter()
    try:
        yield
    finally:
        times.ended[part] = time.perf_counter()
        times.seconds[part] += times.ended[part] - begun
