"""Convolutions of groups of channels, as a few convolutions of neighbouring groups.

XLA for CPUs (JAX 0.10 to 0.12) computes groups several times, and the gradients of
their kernels several hundred times slower than what they consist of. Here neighbouring
groups are one convolution, with zeros in its kernel between the groups, as long as
that has no more channels than its fast code computes at once; and where each channel
makes several, as in a depthwise convolution with a multiplier, each of these is a
depthwise convolution of all channels (`benchmarks/cpu_programs.py`).
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from typing import Any

import jax.numpy as jnp
from jax import lax

from keras_distribute.devices.convolutions import is_convolution
from keras_distribute.devices.rewriting import Rewriting
from keras_distribute.devices.strided import every, together

_CHANNELS = 32  # That XLA computes at once.
# Convolutions that one is written as, each of which takes time to compile: of the
# gradient of a kernel more, for what they spare.
_MOST_PARTS, _MOST_OF_GRADIENT = 16, 64
_MOST_EACH = 4  # Results of a channel, or channels of a result, by themselves.


@dataclasses.dataclass(frozen=True)
class _Groups:
    """How a convolution is divided.

    Args:
        count: Of the groups.
        own: How many channels of the array a group has.
        made: How many channels of the result.
        axis: Of those of the array.
        is_gradient: Whether it is the gradient of such a kernel, to which the array's
            channels are the batch.
        is_wide: Whether numbers have 32 bits or more: a sum of others would be rounded
            once more for each part of it.
    """

    count: int
    own: int
    made: int
    axis: int
    is_gradient: bool
    is_wide: bool

    @property
    def together(self) -> int:
        """How many groups are one convolution."""
        fitting = range(max(_CHANNELS // self.own, 1), 0, -1)
        return next(number for number in fitting if self.count % number == 0)

    @property
    def are_channels(self) -> bool:
        """Whether each channel makes few, or few make each, by themselves."""
        few, many = sorted((self.own, self.made))
        is_small = few == 1 and many <= _MOST_EACH
        return is_small and self.is_wide and not self.is_gradient


def _groups_of(eqn: Any) -> _Groups:
    params, (array, kernel) = eqn.params, (v.aval for v in eqn.invars)
    dims, in_batch = params["dimension_numbers"], params["batch_group_count"]
    is_gradient, is_wide = in_batch > 1, array.dtype.itemsize >= 4
    axis = dims.lhs_spec[0 if is_gradient else 1]
    count = max(in_batch, params["feature_group_count"])
    own, made = array.shape[axis] // count, kernel.shape[dims.rhs_spec[0]] // count
    return _Groups(count, own, made, axis, is_gradient, is_wide)


def _is_one(eqn: Any) -> bool:
    if not is_convolution(eqn):
        return False
    avals = [variable.aval for variable in (*eqn.invars, *eqn.outvars)]
    is_float = all(jnp.issubdtype(aval.dtype, jnp.floating) for aval in avals)
    if not is_float or not all(aval.size for aval in avals):
        return False
    if min(before for before, _ in eqn.params["padding"]) < 0:
        return False  # Without groups, XLA (JAX 0.10) makes wrong numbers of it.
    groups = _groups_of(eqn)
    if groups.count == 1 or groups.own == groups.made == 1:
        return False
    most = _MOST_OF_GRADIENT if groups.is_gradient else _MOST_PARTS
    return groups.are_channels or groups.count // groups.together <= most


def _apart(eqn: Any, given: list[Any]) -> list[Any]:
    groups = _groups_of(eqn)
    if not groups.are_channels:
        return [_by_neighbours(eqn, groups, *given)]
    if groups.own == 1:
        return [_of_channels(eqn, groups, *given)]
    return [_to_channels(eqn, groups, *given)]


def _by_neighbours(eqn: Any, groups: _Groups, array: Any, kernel: Any) -> Any:
    dims, number = eqn.params["dimension_numbers"], groups.together
    outputs, inputs = dims.rhs_spec[:2]
    features = dims.out_spec[1]
    parts = groups.count // number
    arrays = jnp.split(array, parts, groups.axis)
    kernels = jnp.split(kernel, parts, outputs)
    results = []
    for own, taps in zip(arrays, kernels, strict=True):
        if groups.is_gradient:  # Of all to all, of which each group has its own.
            whole = _convolution(eqn, own, taps)
            results.append(_own_blocks(whole, number, dims.out_spec[0], features))
        else:
            dense = _between_zeros(taps, number, inputs, outputs)
            results.append(_convolution(eqn, own, dense))
    return jnp.concatenate(results, features)


def _of_channels(eqn: Any, groups: _Groups, array: Any, kernel: Any) -> Any:
    """Each channel makes some: the first ones of all, the second ones, and so on."""
    dims = eqn.params["dimension_numbers"]
    axis = dims.out_spec[1]
    results = [
        _convolution(eqn, array, taps, groups.count)
        for taps in every(kernel, groups.made, dims.rhs_spec[0])
    ]
    return together(results, axis)


def _to_channels(eqn: Any, groups: _Groups, array: Any, kernel: Any) -> Any:
    """Some channels make each: a sum over the first ones, the second ones, ..."""
    inputs = eqn.params["dimension_numbers"].rhs_spec[1]
    arrays = every(array, groups.own, groups.axis)
    kernels = jnp.split(kernel, groups.own, inputs)
    results = [
        _convolution(eqn, own, taps, groups.count)
        for own, taps in zip(arrays, kernels, strict=True)
    ]
    return functools.reduce(operator.add, results)


def _convolution(eqn: Any, array: Any, kernel: Any, groups: int = 1) -> Any:
    params = {**eqn.params, "feature_group_count": groups, "batch_group_count": 1}
    return eqn.primitive.bind(array, kernel, **params)


def _between_zeros(kernel: Any, number: int, inputs: int, outputs: int) -> Any:
    """The kernel of several groups as one from all of their inputs."""
    if number == 1:
        return kernel
    parts = jnp.split(kernel, number, outputs)
    size = kernel.shape[inputs]
    zero = jnp.zeros((), kernel.dtype)
    padded = []
    for place, part in enumerate(parts):
        around = [(0, 0, 0)] * kernel.ndim
        around[inputs] = (place * size, (number - 1 - place) * size, 0)
        padded.append(lax.pad(part, zero, around))
    return jnp.concatenate(padded, outputs)


def _own_blocks(whole: Any, number: int, inputs: int, outputs: int) -> Any:
    """Of a kernel from all inputs of several groups, what is of one group each."""
    size = whole.shape[outputs] // number
    blocks = [
        lax.slice_in_dim(rows, place * size, (place + 1) * size, axis=outputs)
        for place, rows in enumerate(jnp.split(whole, number, inputs))
    ]
    return jnp.concatenate(blocks, outputs)


APART = Rewriting(_is_one, _apart)
