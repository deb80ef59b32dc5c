"""Every so many elements of an array, and arrays of such put together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax


def elements(
    array: Any, starts: Sequence[int], strides: Sequence[int], sizes: Sequence[int]
) -> Any:
    """So many elements along each dimension, from these on."""
    ends = [
        start + stride * (size - 1) + 1
        for start, stride, size in zip(starts, strides, sizes, strict=True)
    ]
    return lax.slice(array, starts, ends, strides)


def every(array: Any, number: int, axis: int) -> list[Any]:
    """The parts of which `together` makes the array."""
    size = array.shape[axis]
    return [
        lax.slice_in_dim(array, first, size, number, axis) for first in range(number)
    ]


def together(parts: Sequence[Any], axis: int) -> Any:
    """The array whose elements along an axis are those of the parts in turn."""
    return lax.collapse(jnp.stack(parts, axis + 1), axis, axis + 2)
