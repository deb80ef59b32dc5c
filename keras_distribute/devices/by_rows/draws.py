"""Random numbers of a replica's rows: those that one device would draw for them."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import random

from keras_distribute.devices.by_rows.values import Replica, Value


def part_of_draw(
    replica: Replica, eqn: Any, operands: list[Value], dim: int, depth: int
) -> Any:
    """A part of random bits: those that the whole draw has in this place.

    Threefry draws each element from the key and the element's index (Salmon et al.,
    2011, https://doi.org/10.1145/2063384.2063405; `jax_threefry_partitionable`).
    """
    shape, width = eqn.params["shape"], eqn.params["bit_width"]
    key = replica.whole(operands[0])
    is_threefry = "fry" in str(key.dtype)
    if is_threefry and dim < key.ndim:  # Each key draws by itself.
        keys = replica.part(operands[0], dim, depth)
        return replica.apply(eqn, [keys])[0].array
    by_index = _draws_by_index() and is_threefry
    if not by_index or math.prod(shape) >= 1 << 32 or key.ndim:
        whole = replica.apply(eqn, [key])[0].array
        return replica.sliced(whole, replica.divided(whole.shape[dim]), dim)
    own = replica.divided_at(shape, dim)
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    counts = sum(
        lax.broadcasted_iota("uint32", own, i) * jnp.uint32(stride)
        for i, stride in enumerate(strides)
    )
    counts += (replica.index() * own[dim] * strides[dim]).astype("uint32")
    first, second = jax.random.key_data(key)
    high, low = random.threefry2x32_p.bind(
        first, second, jnp.zeros_like(counts), counts
    )
    if width == 64:
        return (high.astype("uint64") << jnp.uint64(32)) | low.astype("uint64")
    return (high ^ low).astype(f"uint{width}")


def _draws_by_index() -> bool:
    return getattr(jax.config, "jax_threefry_partitionable")  # noqa: B009
