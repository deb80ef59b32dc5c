"""The LSTM of cuDNN, which Keras takes on GPUs: XLA cannot divide it over devices, so
each of them would compute the whole batch.

- `jax.experimental.rnn.lstm`, by the name that Keras looks it up at each call
  (`keras.src.backend.jax.rnn`). Goes when JAX divides it.
"""

# pyright: reportMissingTypeStubs=false
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from jax.experimental import rnn

from keras_distribute._compat.seams import Replacements, check

check(rnn, "lstm")


def install(replaced: Replacements, lstm: Callable[..., Any]) -> None:
    """Hooks the LSTM of a strategy's models.

    Args:
        lstm: In place of JAX's, with this one as its first argument.
    """
    replaced.replace(rnn, "lstm", functools.partial(lstm, rnn.lstm))
