"""Which arrays belong to a variable alone: each step is given them, and
deletes them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import keras

from keras_distribute.values.per_replica import Mirrored
from keras_distribute.variables.thread import thread


def owned(value: Any) -> Any:
    """A copy of an array that the caller holds: a variable's own is given to each step,
    which deletes it.
    """
    if isinstance(value, keras.Variable | Mirrored):
        value = value.value
    kept = (
        isinstance(value, jax.Array)
        and not isinstance(value, jax.core.Tracer)
        and not thread.gives_away
    )
    return jnp.copy(value) if kept else value
