"""Convolutions of inputs with zeros put between their elements, without the zeros. Such
are the gradients of a strided convolution's inputs, and `Conv2DTranspose`.

XLA for CPUs (JAX 0.10) is slow at them where there are few channels. Here the outputs
that take the same elements of the kernel are a convolution of their own, with those
alone, and the outputs of all are put together (`benchmarks/cpu_programs.py`). With more
channels, smaller kernels or 8 channels the time is no shorter: XLA's one convolution
goes to several cores.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jax import lax

from keras_distribute.devices.convolutions import is_convolution
from keras_distribute.devices.rewriting import Rewriting
from keras_distribute.devices.strided import together

_DTYPES = ({"float32"}, {"float64"}, {"bfloat16"}, {"float16"})
_LEAST_CHANNELS = 16
_MOST_CHANNELS = 32 * 32  # Those of the input times those of the output.
_LEAST_TAPS = 3
_MOST_PARTS = 8


def _is_one(eqn: Any) -> bool:
    if not is_convolution(eqn):
        return False
    params, kernel = eqn.params, eqn.invars[1].aval
    ones = (*params["window_strides"], *params["rhs_dilation"])
    ones += params["feature_group_count"], params["batch_group_count"]
    outputs, inputs, *space = params["dimension_numbers"].rhs_spec
    dilations = params["lhs_dilation"]
    taps = [kernel.shape[i] for i in space]
    avals = [variable.aval for variable in (*eqn.invars, *eqn.outvars)]
    return (
        1 < math.prod(dilations) <= _MOST_PARTS
        and all(one == 1 for one in ones)
        and {aval.dtype.name for aval in avals} in _DTYPES
        and kernel.shape[outputs] >= _LEAST_CHANNELS
        and kernel.shape[outputs] * kernel.shape[inputs] <= _MOST_CHANNELS
        and all(
            t >= max(_LEAST_TAPS, d)
            for t, d in zip(taps, dilations, strict=True)
            if d > 1
        )
        and all(aval.size for aval in avals)
    )


def _in_parts(eqn: Any, given: list[Any]) -> list[Any]:
    array, kernel = given
    return [_convolved(array, kernel, eqn.params, eqn.outvars[0].aval.shape)]


def _convolved(
    array: Any, kernel: Any, params: dict[str, Any], shape: tuple[int, ...]
) -> Any:
    """A convolution whose result has this shape, in parts along each dimension."""
    dilations = params["lhs_dilation"]
    place = next((i for i, each in enumerate(dilations) if each > 1), None)
    if place is None:
        return lax.conv_general_dilated(array, kernel, **params)
    own, taps, out = (spec[2 + place] for spec in params["dimension_numbers"])
    dilation, (before, _) = dilations[place], params["padding"][place]
    size = -(-shape[out] // dilation)
    part_shape = (*shape[:out], size, *shape[out + 1 :])
    parts = []
    for phase in range(dilation):
        # Output `dilation * i + phase` takes element `start + dilation * m` of the
        # kernel and element `i + m + offset` of the input.
        start = (before - phase) % dilation
        offset = (phase + start - before) // dilation
        some = lax.slice_in_dim(kernel, start, None, dilation, taps)
        length = array.shape[own]
        after = size - length + offset + some.shape[taps] - 1
        first, last = max(offset, 0), length + min(after, 0)
        if first >= last:  # Outside of the input.
            parts.append(jnp.zeros(part_shape, kernel.dtype))
            continue
        padding = [*params["padding"]]
        padding[place] = (max(-offset, 0), max(after, 0))
        changed = {
            **params,
            "padding": tuple(padding),
            "lhs_dilation": (*dilations[:place], 1, *dilations[place + 1 :]),
        }
        taken = lax.slice_in_dim(array, first, last, 1, own)
        parts.append(_convolved(taken, some, changed, part_shape))
    return lax.slice_in_dim(together(parts, out), 0, shape[out], 1, out)


IN_PARTS = Rewriting(_is_one, _in_parts)
