"""Takes a long buffer apart, with programs that compile quickly.

XLA compiles one kernel for each slice at an offset that it knows, and for whatever it
fuses the slice with: on a CPU about 20 ms each, 10 s and 400 MiB for a model of 320
small weights. Of slices at offsets that it does not know, those of one shape share
their kernels, and so do the operations on them: half a second. So on CPUs each part is
taken by a call that hands the next offset on, which XLA is told to leave a call, and
the first offset is a zero that only we know to be one. Compilers for accelerators do
well with plain slices.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata

Shape = tuple[int, ...]


def joined(arrays: Sequence[Any], size: int) -> Any:
    """Arrays of one dtype in a buffer of `size` elements; zeros fill it up."""
    extra = size - sum(array.size for array in arrays)
    return jnp.concatenate([*map(jnp.ravel, arrays), jnp.zeros(extra, arrays[0].dtype)])


def filled_up(buffer: Any, size: int) -> Any:
    """The buffer with zeros behind `size` elements, as `joined` makes it: what is
    computed of zeros need not be a number.
    """
    if buffer.size == size:
        return buffer
    is_filled = lax.iota(jnp.int32, buffer.size) >= size
    return lax.select(is_filled, jnp.zeros_like(buffer), buffer)


def taken_apart(buffer: Any, shapes: Sequence[Shape], *, by_calls: bool) -> list[Any]:
    """The arrays that `joined` has put into a buffer; to be called in a compiled
    program.

    Args:
        buffer: One-dimensional.
        by_calls: Whether to share kernels, for the sake of XLA's compiler for CPUs.
    """
    if by_calls and jnp.issubdtype(buffer.dtype, jnp.floating):
        return _by_calls(buffer, tuple(shapes))
    sizes = list(map(math.prod, shapes))
    parts = lax.split(buffer, [*sizes, buffer.size - sum(sizes)])
    return [part.reshape(shape) for part, shape in zip(parts[:-1], shapes, strict=True)]


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _by_calls(buffer: Any, shapes: tuple[Shape, ...]) -> list[Any]:
    # Never, but no compiler knows that.
    offset = (buffer[0] > jnp.inf).astype(jnp.int32)
    parts: list[Any] = []
    with set_xla_metadata(inlineable="false"):
        for shape in shapes:
            part, offset = _next_part(buffer, offset, shape)
            parts.append(part)
    return parts


@functools.partial(jax.jit, static_argnums=2)
def _next_part(buffer: Any, offset: Any, shape: Shape) -> tuple[Any, Any]:
    size = math.prod(shape)
    part = lax.dynamic_slice(buffer, (offset,), (size,), allow_negative_indices=False)
    return part.reshape(shape), offset + size


def _forward(buffer: Any, shapes: tuple[Shape, ...]) -> tuple[list[Any], int]:
    return _by_calls(buffer, shapes), buffer.size


def _backward(
    shapes: tuple[Shape, ...], size: int, cotangents: list[Any]
) -> tuple[Any]:
    return (joined(cotangents, size),)


_by_calls.defvjp(_forward, _backward)
