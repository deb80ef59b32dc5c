"""Gradients of max pooling, without a scatter.

XLA for CPUs (JAX 0.10 to 0.12) looks for the largest number of each window one by one,
and then adds one number at a time. Here the largest ones of all windows are found in
one loop, as indices into the windows; a second loop gives each number what comes back
to the windows that chose it (`benchmarks/cpu_programs.py`).
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from keras_distribute.devices.rewriting import Rewriting
from keras_distribute.devices.strided import elements, together

_MOST_ELEMENTS = 64  # Of a window; each is an operation of the program.


def _is_one(eqn: Any) -> bool:
    if eqn.primitive.name != "select_and_scatter_add":
        return False
    params = eqn.params
    window, strides = params["window_dimensions"], params["window_strides"]
    return (
        max(math.prod(window), math.prod(strides)) <= _MOST_ELEMENTS
        and min(itertools.chain(*params["padding"])) >= 0
        and all(variable.aval.size for variable in eqn.invars)
    )


def _by_index(eqn: Any, given: list[Any]) -> list[Any]:
    back, array = given
    params = eqn.params
    padding, shape = params["padding"], array.shape
    if any(map(any, padding)):  # JAX adds such elements on CPUs, too.
        least = _never_chosen(array.dtype, params["select_prim"])
        array = lax.pad(array, least, [(before, after, 0) for before, after in padding])
    window, strides = params["window_dimensions"], params["window_strides"]
    places = list(itertools.product(*map(range, window)))
    chosen = _chosen(array, back.shape, places, strides, params["select_prim"])
    # Number `stride * i + phase` is element `phase + stride * m` of window `i - m`.
    reach = [(w - 1) // s for w, s in zip(window, strides, strict=True)]
    sizes = [-(-length // s) for length, s in zip(array.shape, strides, strict=True)]
    around = [
        (before, max(size - length, 0), 0)
        for before, size, length in zip(reach, sizes, back.shape, strict=True)
    ]
    chosen = lax.pad(chosen, jnp.int32(-1), around)
    back = lax.pad(back, jnp.zeros((), back.dtype), around)

    def of_phase(phase: tuple[int, ...]) -> Any:
        """The result at every stride-th place, from these on."""
        own = map(range, phase, window, strides)
        parts = []
        for place in itertools.product(*own):
            first = [r - p // s for r, p, s in zip(reach, place, strides, strict=True)]
            last = [f + size for f, size in zip(first, sizes, strict=True)]
            is_chosen = lax.slice(chosen, first, last) == places.index(place)
            parts.append(jnp.where(is_chosen, lax.slice(back, first, last), 0))
        if not parts:  # Between the windows.
            return jnp.zeros(sizes, back.dtype)
        return functools.reduce(operator.add, parts)

    def from_phases(phase: tuple[int, ...]) -> Any:
        """The result, from those of all phases that begin so."""
        place = len(phase)
        if place == array.ndim:
            return of_phase(phase)
        parts = [from_phases((*phase, next_)) for next_ in range(strides[place])]
        return together(parts, place) if len(parts) > 1 else parts[0]

    whole = from_phases(())
    first = [before for before, _ in padding]
    return [lax.slice(whole, first, list(map(operator.add, first, shape)))]


def _never_chosen(dtype: Any, select: Any) -> Any:
    """What no element of a window is less than, or greater than."""
    is_least = select is lax.ge_p
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.asarray(-jnp.inf if is_least else jnp.inf, dtype)
    limits = jnp.iinfo(dtype)
    return jnp.asarray(limits.min if is_least else limits.max, dtype)


def _chosen(
    array: Any,
    shape: Sequence[int],
    places: Sequence[tuple[int, ...]],
    strides: Sequence[int],
    select: Any,
) -> Any:
    """Which element of its window each result is: the first of those that are equal."""
    first, *others = (elements(array, place, strides, shape) for place in places)
    best, chosen = first, jnp.zeros(shape, jnp.int32)
    for index, element in enumerate(others, 1):
        is_kept = select.bind(best, element)
        best = jnp.where(is_kept, best, element)
        chosen = jnp.where(is_kept, chosen, jnp.int32(index))
    return chosen


BY_INDEX = Rewriting(_is_one, _by_index)
