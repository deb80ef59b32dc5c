"""Arrays that are reduced together, in a few flat buffers. Knows no replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def packs_of(
    values: Sequence[Any], num_packs: int, bytes_per_pack: int
) -> list[list[int]]:
    """Indices of the values of each buffer, in order; a buffer holds one dtype."""
    if num_packs == 0 and bytes_per_pack == 0:
        return [[i] for i in range(len(values))]
    by_dtype: dict[Any, list[int]] = {}
    for i, value in enumerate(values):
        by_dtype.setdefault(value.dtype, []).append(i)
    packs: list[list[int]] = []
    for indices in by_dtype.values():
        total = sum(values[i].nbytes for i in indices)
        limit = bytes_per_pack or max(1, -(-total // num_packs))
        pack: list[int] = []
        filled = 0
        for i in indices:
            if pack and filled + values[i].nbytes > limit:
                packs.append(pack)
                pack, filled = [], 0
            pack.append(i)
            filled += values[i].nbytes
        packs.append(pack)
    return packs


def joined(values: Sequence[Any]) -> jax.Array:
    """Values of one dtype as one flat buffer.

    XLA for CPUs makes one loop of the concatenation of few arrays and of what yields
    them, and divides it over threads that the processes of one machine take from each
    other. Where the arrays are written one by one, a step of the smaller model of
    `benchmarks/processes.py` takes two thirds of the time. A concatenation of many it
    leaves alone, as the faster one.
    """
    flat = list(map(jnp.ravel, values))
    if len(flat) > _FUSED_ARRAYS:
        return jnp.concatenate(flat)
    buffer, offset = jnp.zeros(sum(value.size for value in flat), flat[0].dtype), 0
    for value in flat:
        buffer = lax.dynamic_update_slice(buffer, value, (offset,))
        offset += value.size
    return buffer


# The most that XLA for CPUs concatenates together with what yields them (JAX 0.10).
_FUSED_ARRAYS = 8
