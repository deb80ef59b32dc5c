"""This package as the side that scenarios run on."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import keras

import keras_distribute as kd
from tests import support

from .encoding import JSON, encode

distribute = kd
mirrored = cache(support.mirrored)
"""The one strategy on the first `replicas` CPUs."""


def replica_id() -> Any:
    """Which replica runs this line."""
    return kd.get_replica_context().replica_id_in_sync_group


def tensor(value: Any) -> jax.Array:
    """An array on the device."""
    return jnp.asarray(value)


def size(array: jax.Array) -> jax.Array:
    """The number of elements."""
    return jnp.asarray(array.size)


def variable(initial: Any, **options: Any) -> keras.Variable:
    """A Keras variable; a function gives an initial scalar."""
    for name in {"synchronization", "aggregation"} & options.keys():
        options[name] = options[name].lower()
    if callable(initial):
        return keras.Variable(lambda shape, dtype: initial(), shape=(), **options)
    return keras.Variable(initial, **options)


def read(variable: keras.Variable) -> jax.Array:
    """The value of a variable."""
    return variable.value


def arrays(structure: Any) -> Any:
    """NumPy's arrays and numbers in a structure as JAX arrays."""
    return keras.tree.map_structure(
        lambda x: jnp.asarray(x) if hasattr(x, "dtype") else x, structure
    )


def per_replica(strategy: kd.Strategy, components: Sequence[Any]) -> Any:
    """A PerReplica, or a structure of them, of the first components."""
    return support.distributed(strategy, [arrays(value) for value in components])


def encoded(strategy: kd.Strategy, value: Any) -> JSON:
    """One of our values in the record's encoding."""

    def split(value: Any) -> tuple[str, Sequence[Any]] | None:
        if isinstance(value, keras.Variable):
            return "Variable", strategy.experimental_local_results(value)
        if isinstance(value, kd.DistributedValues):
            return type(value).__name__, strategy.experimental_local_results(value)
        return None

    return encode(value, split)


def gradient(loss: Callable[[Any], Any], x: jax.Array) -> jax.Array:
    """The gradient of the sum of what `loss` makes of `x`."""
    return jax.grad(lambda x: loss(x).sum())(x)


def function(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Loops over datasets are no programs here."""
    return fn


cardinality = len
