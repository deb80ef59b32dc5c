"""A model whose variables have shapes and no values, and the layers within a model.

- `GLOBAL_STATE_TRACKER`: in a stateless scope variables wait for their values, and
  Keras would give them some when the next scope ends. It has no way to drop them, nor
  to give back the names that it has counted. Goes if a model can be made from shapes.
- `Layer._flatten_layers`: Keras has no public name for the layers of layers.
"""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Generator, Iterator
from typing import Any

import numpy as np
from keras import Layer
from keras.src.backend.common import global_state

from keras_distribute._compat import variables
from keras_distribute._compat.seams import check

check(Layer, "_flatten_layers")


@contextlib.contextmanager
def shapes_alone() -> Generator[None]:
    """In the `with` block new variables have no values. After it Keras counts names,
    and everybody draws random numbers, as if the block had not been there.
    """
    known = global_state.GLOBAL_STATE_TRACKER.__dict__
    kept = {name: _copied(value) for name, value in known.items()}
    streams = random.getstate(), np.random.get_state()
    try:
        with (
            variables.StatelessScope(initialize_variables=False),
            variables.initialized_later(),
        ):
            yield
    finally:
        known.clear()
        known.update(kept)
        random.setstate(streams[0])
        np.random.set_state(streams[1])


def layers_of(model: Any) -> Iterator[Layer]:
    """The layers of a model, at any depth."""
    yield from model._flatten_layers(include_self=True)


def _copied(value: Any) -> Any:
    """What Keras changes in place: lists of variables, counts of names."""
    return copy.copy(value) if isinstance(value, dict | list) else value
