"""What a checkpoint has to know of Keras's objects, and of Python's end, that has no
public name.

- `Layer._layers`: the layers directly inside a layer, in the order in which they were
  tracked; `Model.layers` is for models only. Goes if Keras documents a way to walk
  them.
- `Variable._value`: `Variable.value` gives a scope's or an autocast value.
- `Trainer._compile_metrics`, `_compile_loss`: metrics given to `compile` have no
  variables before the first batch.
- `threading._register_atexit`: `atexit` comes after thread pools have stopped, so a
  save that is being written when the program ends could not be completed.
  `concurrent.futures` uses the same. Goes if Python gives it a public name.
"""

# pyright: reportAttributeAccessIssue=false
from __future__ import annotations

import atexit
import re
import threading
from collections.abc import Callable
from typing import Any

import keras

from keras_distribute._compat.names import BaseTrainer
from keras_distribute._compat.seams import check

check(BaseTrainer, "_compile_metrics", "_compile_loss")
check(keras.Layer, "_layers")
check(keras.Variable, "_value", "_initializer")


def inner_layers(layer: Any) -> list[Any]:
    """The layers directly inside a layer, in a fixed order."""
    return list(layer._layers)


def default_name(instance: Any) -> str:
    """What Keras calls an instance that was given no name, without the counter. Source:
    `keras.src.utils.naming`.
    """
    name = re.sub(r"\W+", "", type(instance).__name__)
    name = re.sub("(.)([A-Z][a-z]+)", r"\1_\2", name)
    return re.sub("([a-z])([A-Z])", r"\1_\2", name).lower()


def stored_array(variable: Any) -> Any:
    """The array that a variable holds, in any scope; `None` if it holds none."""
    return variable.stored if hasattr(variable, "stored") else variable._value


def has_unbuilt_metrics(model: Any) -> bool:
    """Whether metrics or losses given to `compile` wait for the first batch."""
    parts = (
        getattr(model, "_compile_metrics", None),
        getattr(model, "_compile_loss", None),
    )
    return any(part is not None and not part.built for part in parts)


def before_exit(function: Callable[[], None]) -> None:
    """Calls `function` when the program ends, while threads can still be started."""
    getattr(threading, "_register_atexit", atexit.register)(function)
