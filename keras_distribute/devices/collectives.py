"""What replicas do together, where a device has several: from the values of a device's
replicas to what each of them gets, inside a program over all devices.

Sums, maxima and minima follow one binary tree over the replicas, whatever the number of
devices: over those of a device first, then over the devices, which have whole branches
of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from keras_distribute.devices.axes import REPLICA_AXIS
from keras_distribute.devices.jaxprs import bound
from keras_distribute.devices.rewriting import Rewriting
from keras_distribute.devices.series import Series, Value

# Up to so many bytes, all devices get what all have; of more, each adds up a part.
_SMALL = 16384

_OfTwo = Callable[[Any, Any], Any]


def _tree(of_two: _OfTwo, stacked: Any) -> Any:
    """The sum, or the like, along axis 0, whose length is a power of two."""
    rows = list(stacked)
    while len(rows) > 1:
        rows = [of_two(a, b) for a, b in zip(rows[::2], rows[1::2], strict=True)]
    return rows[0]


def added(a: Any, b: Any) -> Any:
    """A sum, rounded: XLA keeps more bits of a chain of sums in 16 bits, which must
    not depend on where the chain is cut.
    """
    if a.dtype not in (jnp.bfloat16, jnp.float16):
        return a + b
    wide = a.astype("float32") + b.astype("float32")
    return _of_16_bits(wide, jnp.finfo(a.dtype)).astype(a.dtype)


def _of_16_bits(wide: Any, info: Any) -> Any:
    """Numbers of 32 bits, rounded to what 16 hold. XLA by itself makes zeros of those
    below 6e-5 in float16, as many gradients are.
    """
    rounded = lax.reduce_precision(wide, info.nexp, info.nmant)
    if info.nexp == 8:  # As in 32 bits.
        return rounded
    least = info.smallest_subnormal.astype(wide.dtype)
    steps = lax.round(wide / least, lax.RoundingMethod.TO_NEAREST_EVEN)
    is_small = jnp.abs(wide) < info.smallest_normal.astype(wide.dtype)
    return jnp.where(is_small, steps * least, rounded)


def _larger(a: Any, b: Any) -> Any:
    """The larger number, or what is none. XLA may forget that one was none, and choose
    either of two zeros.
    """
    return jnp.where((a >= b) | (a != a), a, b)


def _smaller(a: Any, b: Any) -> Any:
    return jnp.where((a <= b) | (a != a), a, b)


def _of_devices(of_two: _OfTwo, series: Series, total: Any) -> Any:
    """From what each device's own replicas have."""
    devices = series.num_devices
    if devices == 1 or not total.size:
        return total
    if total.nbytes * devices <= _SMALL:
        return _tree(of_two, lax.all_gather(total, REPLICA_AXIS))
    flat = jnp.pad(total.ravel(), (0, -total.size % devices))
    # Else XLA (JAX 0.10) adds on a CPU once more for the first piece.
    flat = lax.optimization_barrier(flat).reshape(devices, -1)
    pieces = lax.all_to_all(flat, REPLICA_AXIS, 0, 0, tiled=True)
    whole = lax.all_gather(_tree(of_two, pieces), REPLICA_AXIS, tiled=True)
    return whole[: total.size].reshape(total.shape)


def total_of_devices(series: Series, total: Any) -> Any:
    """The sum over the replicas, from what those of each device add up to."""
    return _of_devices(added, series, total)


def summed(series: Series, values: Sequence[Value]) -> list[Value]:
    """The sums over the replicas; over several devices, all of a dtype at once."""
    totals = [
        _times_replicas(series, value) if value.is_equal else _tree(added, value.array)
        for value in values
    ]
    of_dtypes: dict[Any, list[int]] = {}
    for i, value in enumerate(values):
        if not value.is_equal:
            of_dtypes.setdefault(totals[i].dtype, []).append(i)
    for places in of_dtypes.values():
        if series.num_devices > 1:
            together = jnp.concatenate([totals[i].ravel() for i in places])
            together, begin = total_of_devices(series, together), 0
            for i in places:
                end = begin + totals[i].size
                totals[i] = together[begin:end].reshape(totals[i].shape)
                begin = end
    return [Value(total, True) for total in totals]


def _times_replicas(series: Series, value: Value) -> Any:
    array = jnp.asarray(value.array)
    return array * jnp.asarray(series.num_replicas, array.dtype)


def _psum(series: Series, params: Any, value: Value) -> Value:
    return summed(series, [value])[0]


def _extreme(of_two: _OfTwo) -> Callable[..., Value]:
    def rule(series: Series, params: Any, value: Value) -> Value:
        if value.is_equal:
            return value
        return Value(_of_devices(of_two, series, _tree(of_two, value.array)), True)

    return rule


def _of_all(series: Series, value: Value) -> Any:
    """The values of all replicas, along axis 0."""
    if value.is_equal:
        return value.stacked(series.num_replicas)
    if series.num_devices == 1 or not value.array.size:
        shape = (series.num_replicas, *value.array.shape[1:])
        return value.array.reshape(shape)
    return lax.all_gather(value.array, REPLICA_AXIS, tiled=True)


def _all_gather(series: Series, params: Any, value: Value) -> Value:
    axis, whole = params["all_gather_dimension"], _of_all(series, value)
    return Value(_in_place(whole, axis, params["tiled"]), True)


def _in_place(stacked: Any, axis: int, tiled: bool, first: int = 0) -> Any:
    """Axis `first` moved to be the dimension `axis` of what comes after it; tiled: a
    part of that dimension.
    """
    moved = jnp.moveaxis(stacked, first, first + axis)
    if not tiled:
        return moved
    at, shape = first + axis, moved.shape
    return moved.reshape((*shape[:at], shape[at] * shape[at + 1], *shape[at + 2 :]))


def _taken_apart(array: Any, axis: int, tiled: bool, count: int, first: int = 0) -> Any:
    """The dimension `axis` of what comes after `first`, or the parts of it that
    replicas get, moved to `first`.
    """
    at, shape = first + axis, array.shape
    if tiled:
        parts = (count, shape[at] // count)
        array = array.reshape((*shape[:at], *parts, *shape[at + 1 :]))
    return jnp.moveaxis(array, at, first)


def _reduce_scatter(series: Series, params: Any, value: Value) -> Value:
    total = _psum(series, params, value).array
    axis, tiled = params["scatter_dimension"], params["tiled"]
    return Value(
        series.own(_taken_apart(total, axis, tiled, series.num_replicas)), False
    )


def _all_to_all(series: Series, params: Any, value: Value) -> Value:
    # Also where it is called untiled: JAX adds and takes away the dimension around it.
    whole, count = _of_all(series, value), series.num_replicas
    parts = _taken_apart(whole, params["split_axis"], True, count, 1)
    received = jnp.swapaxes(parts, 0, 1)  # Of each replica, from each.
    return Value(_in_place(series.own(received), params["concat_axis"], True, 1), False)


def _ppermute(series: Series, params: Any, value: Value) -> Value:
    whole = _of_all(series, value)
    source = np.full(series.num_replicas, series.num_replicas)
    for sender, receiver in params["perm"]:
        source[receiver] = sender
    none = jnp.zeros_like(whole[:1])
    return Value(series.own(jnp.concatenate([whole, none])[source]), False)


def _unchanged(series: Series, params: Any, value: Value) -> Value:
    return value


SUMS = ("psum", "psum_invariant")
COLLECTIVES: dict[str, Callable[[Series, Any, Value], Value]] = {
    **dict.fromkeys(SUMS, _psum),
    "pmax": _extreme(_larger),
    "pmin": _extreme(_smaller),
    "all_gather": _all_gather,
    "all_gather_invariant": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "psum_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "ppermute": _ppermute,
    "pbroadcast": _unchanged,
    "pvary": _unchanged,
}
"""By the name of the operation; each operand by itself."""

_OVER_AN_OWN_AXIS = {"psum": jnp.sum, "pmax": jnp.max, "pmin": jnp.min}


def _own_axes(eqn: Any) -> tuple[int, ...]:
    """Of a collective, the dimensions of a replica's own value that it reduces: an
    axis of `jax.vmap` that it names beside the replicas.
    """
    axes = eqn.params.get("axes", ())
    if eqn.primitive.name not in _OVER_AN_OWN_AXIS or REPLICA_AXIS not in axes:
        return ()
    return tuple(axis for axis in axes if isinstance(axis, int))


def _of_reduced(eqn: Any, given: list[Any]) -> list[Any]:
    reduce, axes = _OVER_AN_OWN_AXIS[eqn.primitive.name], _own_axes(eqn)
    own = [reduce(array, axes).astype(array.dtype) for array in given]
    over_replicas = {**eqn.params, "axes": (REPLICA_AXIS,)}
    return bound(eqn.replace(params=over_replicas), own)


OVER_REPLICAS_ALONE = Rewriting(lambda eqn: bool(_own_axes(eqn)), _of_reduced)
"""Collectives that reduce dimensions of each replica's value, too, as others of what is
reduced.
"""
