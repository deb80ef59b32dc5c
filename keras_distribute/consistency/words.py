"""Arrays as the 32-bit words that their bits make, and back; inside programs.

Two arrays are the same here if their bits are: a NaN is equal to itself, and 0.0 is not
-0.0.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax


def per_element(dtype: Any) -> int:
    """How many words an element has; a smaller one has a word of its own."""
    return max(1, jnp.dtype(dtype).itemsize // 4)


def of(array: Any) -> Any:
    """The words, in the shape of the array, with one more dimension where an element
    has several.
    """
    dtype = array.dtype
    if dtype == jnp.bool_:
        return array.astype(jnp.uint32)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return of(jnp.stack([array.real, array.imag], axis=-1))
    return lax.bitcast_convert_type(array, _unsigned(dtype)).astype(jnp.uint32)


def as_array(words: Any, dtype: Any) -> Any:
    """The array of one dimension that has these words, which are in one, too."""
    dtype = jnp.dtype(dtype)
    if dtype == jnp.bool_:
        return words.astype(dtype)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        part = np.dtype(f"f{dtype.itemsize // 2}")
        pairs = as_array(words, part).reshape(-1, 2)
        return lax.complex(pairs[:, 0], pairs[:, 1])
    if dtype.itemsize > 4:
        words = words.reshape(-1, per_element(dtype))
    return lax.bitcast_convert_type(words.astype(_unsigned(dtype)), dtype)


def index_in(shape: tuple[int, ...], within: tuple[int, ...] | None = None) -> Any:
    """The number of each word, in this shape: nothing has to be made one row, which
    costs a copy where devices lay arrays out otherwise.

    Args:
        within: The shape of what this is the first part of.
    """
    number = jnp.zeros(shape, jnp.uint32)
    for axis, stride in enumerate(strides(within or shape)):
        number = number + lax.broadcasted_iota(jnp.uint32, shape, axis) * stride
    return number


def strides(shape: tuple[int, ...]) -> list[np.uint32]:
    """How far two words are apart that are neighbours in a dimension, modulo 2^32."""
    return [
        np.uint32(math.prod(shape[axis + 1 :]) % 2**32) for axis in range(len(shape))
    ]


def of_numpy(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The same words as `of`, of an array on the host, in one row."""
    row = np.ascontiguousarray(array).reshape(-1)
    if row.dtype == bool:
        return row.astype(np.uint32)
    if row.dtype.itemsize >= 4:
        return row.view("<u4")
    whole = row.view(f"u{row.dtype.itemsize}").astype(np.uint32)
    if jnp.issubdtype(row.dtype, jnp.floating):
        bits = jnp.finfo(row.dtype).bits
    else:
        bits = jnp.iinfo(row.dtype).bits
    return whole & np.uint32(2**bits - 1)


def _unsigned(dtype: Any) -> Any:
    """The integers with as many bits, up to a word."""
    is_integer = jnp.issubdtype(dtype, jnp.integer)
    bits = jnp.iinfo(dtype).bits if is_integer else jnp.finfo(dtype).bits
    return jnp.dtype(f"uint{min(32, bits)}")
