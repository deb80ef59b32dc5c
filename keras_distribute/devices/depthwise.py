"""Depthwise convolutions, each channel by itself, as sums of products of numbers.

XLA for CPUs (JAX 0.10 to 0.12) takes them for convolutions of as many groups as there
are channels, one small matrix product each. Here each element of the kernel is
multiplied by the whole input, moved by as much, which is one loop over all; and for the
gradient of the kernel, each row of the inputs is multiplied by that of what comes back,
at the places of all its elements (`benchmarks/cpu_programs.py`).
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from keras_distribute.devices.convolutions import is_convolution
from keras_distribute.devices.rewriting import Rewriting
from keras_distribute.devices.strided import elements

_DTYPES = ({"float32"}, {"float64"})
_MOST_TAPS = 64  # Elements of the kernel, each an operation of the program.
_LEAST_ROW = 1024  # Numbers in a row; the loop over shorter ones takes longer.


def _is_of_channels(eqn: Any) -> bool:
    """Whether each channel of the input makes one of the result."""
    if not _is_taken(eqn):
        return False
    params, (array, kernel) = eqn.params, (v.aval for v in eqn.invars)
    dims = params["dimension_numbers"]
    channels, outputs = array.shape[dims.lhs_spec[1]], kernel.shape[dims.rhs_spec[0]]
    return (
        params["feature_group_count"] == channels == outputs > 1
        and params["batch_group_count"] == 1
        and kernel.size <= channels * _MOST_TAPS
    )


def _is_of_their_kernel(eqn: Any) -> bool:
    """Whether it is the gradient of such a kernel."""
    if not _is_taken(eqn):
        return False
    params, (array, back) = eqn.params, (v.aval for v in eqn.invars)
    dims = params["dimension_numbers"]
    channels, outputs = array.shape[dims.lhs_spec[0]], back.shape[dims.rhs_spec[0]]
    return (
        params["batch_group_count"] == channels == outputs > 1
        and params["feature_group_count"] == 1
        and eqn.outvars[0].aval.size <= channels * _MOST_TAPS
        and channels * back.shape[dims.rhs_spec[-1]] >= _LEAST_ROW
    )


def _is_taken(eqn: Any) -> bool:
    if not is_convolution(eqn):
        return False
    avals = [variable.aval for variable in (*eqn.invars, *eqn.outvars)]
    has_dtype = {aval.dtype.name for aval in avals} in _DTYPES
    return has_dtype and avals[0].ndim > 2 and all(aval.size for aval in avals)


def _in_one_loop(eqn: Any, given: list[Any]) -> list[Any]:
    params = eqn.params
    (batch, features, *space), (outputs, one, *taps), out = params["dimension_numbers"]
    array = _padded(jnp.transpose(given[0], (batch, *space, features)), params)
    kernel = jnp.transpose(given[1], (*taps, one, outputs))
    steps, strides = params["rhs_dilation"], params["window_strides"]
    sizes = [eqn.outvars[0].aval.shape[i] for i in out[2:]]
    parts = [
        kernel[tap] * _window(array, tap, steps, strides, sizes)
        for tap in _places(kernel.shape[:-2])
    ]
    return [_in_order(functools.reduce(operator.add, parts), out)]


def _row_by_row(eqn: Any, given: list[Any]) -> list[Any]:
    params = eqn.params
    (channels, batch, *space), (same, rows, *places), out = params["dimension_numbers"]
    array = _padded(jnp.transpose(given[0], (batch, *space, channels)), params)
    back = jnp.transpose(given[1], (rows, *places, same))
    # To JAX it is a convolution of the input with what comes back as the kernel.
    steps, strides = params["rhs_dilation"], params["window_strides"]
    taps = [eqn.outvars[0].aval.shape[i] for i in out[2:]]
    *outer, _, _ = back.shape  # All dimensions but those of a row.
    row = (*[1] * len(outer), *back.shape[-2:])
    reach = [(t - 1) * stride + 1 for t, stride in zip(taps, strides, strict=True)]
    near = (1, *reach[:-1], *array.shape[-2:])

    def body(sums: list[Any], place: Any) -> tuple[list[Any], None]:
        starts = [i * step for i, step in zip(place, (1, *steps[:-1]), strict=True)]
        own = lax.dynamic_slice(back, (*place, 0, 0), row)
        around = lax.dynamic_slice(array, (*starts, 0, 0), near)
        parts = [
            own * _window(around, tap, strides, steps, row[1:-1])
            for tap in _places(taps)
        ]
        return [old + part for old, part in zip(sums, parts, strict=True)], None

    zeros = [jnp.zeros(row, back.dtype)] * math.prod(taps)
    indices = [jnp.asarray(i.ravel()) for i in np.indices(outer, "int32")]
    sums, _ = lax.scan(body, zeros, tuple(indices))
    kernel = jnp.stack([jnp.sum(each, range(each.ndim - 1)) for each in sums])
    return [_in_order(kernel.reshape(1, *taps, -1), out)]


def _places(sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    return itertools.product(*map(range, sizes))


def _padded(array: Any, params: dict[str, Any]) -> Any:
    pads = zip(params["padding"], params["lhs_dilation"], strict=True)
    around = [(*pad, dilation - 1) for pad, dilation in pads]
    zero = jnp.zeros((), array.dtype)
    return lax.pad(array, zero, [(0, 0, 0), *around, (0, 0, 0)])


def _window(
    array: Any,
    tap: Sequence[int],
    steps: Sequence[int],
    strides: Sequence[int],
    sizes: Sequence[int],
) -> Any:
    """What an element of the kernel is multiplied by.

    Args:
        steps: Between the elements of the kernel.
        strides: Between the places of the kernel.
        sizes: How many places there are.
    """
    starts = [t * step for t, step in zip(tap, steps, strict=True)]
    whole = array.shape[0], *sizes, array.shape[-1]
    return elements(array, (0, *starts, 0), (1, *strides, 1), whole)


def _in_order(array: Any, spec: Sequence[int]) -> Any:
    """An array of batch, space and channels with its dimensions where they belong."""
    batch, channels, *space = spec
    order = (batch, *space, channels)
    return jnp.transpose(array, [order.index(i) for i in range(array.ndim)])


IN_ONE_LOOP = Rewriting(_is_of_channels, _in_one_loop)
KERNELS_BY_ROWS = Rewriting(_is_of_their_kernel, _row_by_row)
