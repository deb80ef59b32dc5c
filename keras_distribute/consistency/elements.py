"""Two copies element by element, and a copy in place of another, on the devices: what
differs is one array among all, and nothing else is read.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from keras_distribute.consistency import words
from keras_distribute.consistency.hashing import on_each_device
from keras_distribute.devices.launches import launches
from keras_distribute.variables import Standing

MOST_SHOWN = 4  # Elements of each copy.


def compared(standing: Standing, start: int, size: int, reference: int) -> Any:
    """How each device's copy of some elements differs from that of one device.

    Args:
        start: The first of the elements, counted as in one row.
        size: How many.
        reference: The place of the device in the mesh.

    Returns:
        For each device of the mesh, split over them: how many elements differ, the
        numbers of the first ones (`size` where there are no more), the words of these
        here and there, and the largest difference, infinite beside a NaN.
    """
    mesh, spec = _placed(standing.array)
    return _comparison(mesh, spec, size)(
        standing.array, np.int32(start), np.int32(reference)
    )


def repaired(
    standing: Standing, start: int, size: int, reference: int, wrong: Collection[int]
) -> jax.Array:
    """The array, in which the devices at the places `wrong` have the elements that the
    device at `reference` has.
    """
    mesh, spec = _placed(standing.array)
    is_wrong = np.isin(np.arange(mesh.size), list(wrong))
    return _repair(mesh, spec, size)(
        standing.array, np.int32(start), np.int32(reference), is_wrong
    )


def _placed(array: jax.Array) -> tuple[Mesh, PartitionSpec]:
    sharding: Any = array.sharding
    return sharding.mesh, sharding.spec


@functools.lru_cache(maxsize=64)
def _comparison(mesh: Mesh, spec: PartitionSpec, size: int) -> Any:
    def body(array: Any, start: Any, reference: Any) -> Any:
        own, other = _of_both(array, start, size, reference, mesh)
        differs = jnp.any((own ^ other).reshape(size, -1) != 0, axis=-1)
        first = jnp.nonzero(differs, size=MOST_SHOWN, fill_value=size)[0]
        shown = [
            row.reshape(size, -1).at[first].get(mode="fill", fill_value=0)
            for row in (own, other)
        ]
        results = (jnp.sum(differs), first, *shown, _largest(own, other, array.dtype))
        return tuple(result[None] for result in results)

    specs = (spec, PartitionSpec(), PartitionSpec())
    return launches.ordered(jax.jit(on_each_device(mesh, body, specs)))


@functools.lru_cache(maxsize=64)
def _repair(mesh: Mesh, spec: PartitionSpec, size: int) -> Any:
    def body(array: Any, start: Any, reference: Any, is_wrong: Any) -> Any:
        own, right = _of_both(array, start, size, reference, mesh)
        chosen = jnp.where(is_wrong[lax.axis_index(mesh.axis_names)], right, own)
        first = start * words.per_element(array.dtype)
        row = lax.dynamic_update_slice(words.of(array).reshape(-1), chosen, (first,))
        return words.as_array(row, array.dtype).reshape(array.shape)

    specs = (spec, PartitionSpec(), PartitionSpec(), PartitionSpec())
    program = on_each_device(mesh, body, specs, spec)
    sharding = NamedSharding(mesh, spec)
    return launches.ordered(jax.jit(program, out_shardings=sharding))


def _of_both(
    array: Any, start: Any, size: int, reference: Any, mesh: Mesh
) -> tuple[Any, Any]:
    """The words of some elements, on this device and on another one."""
    each = words.per_element(array.dtype)
    row = words.of(array).reshape(-1)
    own = lax.dynamic_slice(row, (start * each,), (size * each,))
    is_there = lax.axis_index(mesh.axis_names) == reference
    sent = jnp.where(is_there, own, jnp.zeros_like(own))
    return own, lax.psum(sent, mesh.axis_names)


def _largest(own: Any, other: Any, dtype: Any) -> Any:
    """The largest difference of two elements, as a float."""
    left, right = (words.as_array(row, dtype) for row in (own, other))
    if jnp.issubdtype(dtype, jnp.integer) and jnp.dtype(dtype).itemsize >= 4:
        # As floats, large ones that are near to each other would be the same.
        apart = jnp.maximum(left, right) - jnp.minimum(left, right)
        unsigned = jnp.dtype(f"uint{8 * jnp.dtype(dtype).itemsize}")
        apart = apart.astype(unsigned).astype(jnp.float32)
    elif jnp.issubdtype(dtype, jnp.inexact) and jnp.dtype(dtype).itemsize >= 4:
        apart = jnp.abs(left - right)
    else:
        apart = jnp.abs(left.astype(jnp.float32) - right.astype(jnp.float32))
    differs = jnp.any((own ^ other).reshape(apart.size, -1) != 0, axis=-1)
    apart = jnp.where(jnp.isnan(apart), jnp.inf, apart)
    return jnp.max(jnp.where(differs, apart, 0.0), initial=0.0)
