"""Which arrays belong to a variable alone: each step is given them, and
deletes them.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import keras

from keras_distribute.values.per_replica import Mirrored


class _Giving(threading.local):
    away = False


_giving = _Giving()


@contextlib.contextmanager
def given_away() -> Generator[None]:
    """Arrays assigned in this `with` block are the variables' from now on: nobody else
    uses them.
    """
    before, _giving.away = _giving.away, True
    try:
        yield
    finally:
        _giving.away = before


def owned(value: Any) -> Any:
    """A copy of an array that the caller holds: a variable's own is given to each step,
    which deletes it.
    """
    if isinstance(value, keras.Variable | Mirrored):
        value = value.value
    kept = (
        isinstance(value, jax.Array)
        and not isinstance(value, jax.core.Tracer)
        and not _giving.away
    )
    return jnp.copy(value) if kept else value
