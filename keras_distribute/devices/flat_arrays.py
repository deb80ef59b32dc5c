"""Arrays as they enter and leave the loops of programs in series: in one dimension, so
that XLA has no choice of how they lie in memory.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from keras_distribute._compat.jax_internals import is_key


@dataclasses.dataclass(frozen=True)
class Form:
    """What is lost of an array that is made flat.

    Args:
        keys: How keys of random numbers are made of numbers; `None` for other arrays.
    """

    shape: tuple[int, ...]
    keys: Any = None


def form_of(array: Any) -> Form:
    """What `flattened` loses."""
    keys = jax.random.key_impl(array) if is_key(array) else None
    return Form(jnp.shape(array), keys)


def flattened(array: Any) -> Any:
    """An array as it enters and leaves a loop: XLA has no choice then of how it lies in
    memory, on which the order of a sum depends.
    """
    return jnp.ravel(jax.random.key_data(array) if is_key(array) else array)


def entering(array: Any) -> Any:
    """`flattened`, as it enters a loop from outside. Without the barrier,
    MLIR joins two changes of shape across the border, where a value was made in another
    shape on one device than on several: a sum of it was then in another order.
    """
    return lax.optimization_barrier(flattened(array))


def of_several(flat: Any) -> Any:
    """The flat arrays of several replicas, one after the other, and one element more:
    what one replica takes is a part of them, also where a device has one replica alone.
    """
    return jnp.concatenate([flat, jnp.zeros(1, flat.dtype)])


def formed(flat: Any, form: Form) -> Any:
    """The array that was made flat."""
    if form.keys is None:
        return flat.reshape(form.shape)
    return jax.random.wrap_key_data(flat.reshape((*form.shape, -1)), impl=form.keys)
