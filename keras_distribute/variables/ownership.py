"""Which arrays belong to a variable alone: each step is given them, and
deletes them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import keras

from keras_distribute.values.arrays import kept
from keras_distribute.values.per_replica import Mirrored
from keras_distribute.variables.thread import thread


def owned(value: Any) -> Any:
    """A copy of an array that the caller holds: a variable's own is given to each step,
    which deletes it, and it stays what it was where the caller changes a NumPy array.
    """
    if isinstance(value, keras.Variable | Mirrored):
        value = value.value
    if thread.gives_away or isinstance(value, jax.core.Tracer):
        return value
    return jnp.copy(value) if isinstance(value, jax.Array) else kept(value)
