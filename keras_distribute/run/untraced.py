"""What is no part of the program that a function becomes: what Python does with values,
and what TensorFlow does. Refused, since it would happen once, while it is traced.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Generator
from typing import Any

import jax

from keras_distribute import checks
from keras_distribute._compat import tensorflow as compat
from keras_distribute.errors import (
    ContextError,
    DistributeError,
    StructureTypeError,
)

_LATER = (
    inspect.isgeneratorfunction,
    inspect.iscoroutinefunction,
    inspect.isasyncgenfunction,
)
_NO_VALUE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


@contextlib.contextmanager
def refused(
    function: Callable[..., Any], no_values: Callable[[str], ContextError]
) -> Generator[None]:
    """Around the call of a function that is traced.

    Args:
        function: It.
        no_values: The error for a function that looks at values, from the text of
            JAX's.

    Raises:
        ContextError: For such a function, and for one that uses TensorFlow.
        StructureTypeError: For one that Python does not run where it is called.
    """
    if any(is_later(function) for is_later in _LATER):
        raise StructureTypeError(
            "A call of this function runs none of it: a program has all that a "
            "function does.",
            received=f"{checks.shown(function)}, which has `yield` or `async`.",
            fix="a function that returns a list: [step(part) for part in parts].",
        )
    if compat.is_function(function):  # Which TensorFlow would trace first.
        raise _of_tensorflow("a tf.function.")
    try:
        with compat.observed(_refuse):
            yield
    except DistributeError:
        raise
    except Exception as error:
        what = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        if compat.has_raised(error):
            raise _of_tensorflow(what) from error
        if isinstance(error, _NO_VALUE):
            raise no_values(what) from error
        raise


def no_values(received: str) -> ContextError:
    """The error for a function given to `strategy.run` that looks at values."""
    return ContextError(
        "The function given to strategy.run becomes a program of all replicas before "
        "it runs: in it, arrays and variables have no values that Python could look "
        "at, nor has the number of the replica.",
        received=received,
        fix="in the function keras.ops.where(condition, x, y) in the place of `if`, "
        "keras.ops.take of an index, jax.debug.print of print; and return what float() "
        "and NumPy are to look at.",
    )


def _refuse(operation: str) -> None:
    raise _of_tensorflow(f"the operation {operation}.")


def _of_tensorflow(received: str) -> ContextError:
    return ContextError(
        "TensorFlow computes nothing in a program of JAX: it would run once, while "
        "the function is traced.",
        received=received,
        fix="in the function keras.ops.sum in the place of tf.reduce_sum, and so on; "
        "keras.random.normal with a keras.random.SeedGenerator, of tf.random.normal; "
        "kd.value_and_grad, of tf.GradientTape; keras.Variable, of tf.Variable; "
        "jax.debug.print, of tf.print; and nothing, of @tf.function.",
    )
