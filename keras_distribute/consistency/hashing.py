"""Each device's hash of its own copies of many arrays, by one program.

Two sums of 32 bits, of what a chain of invertible steps makes of each word and of its
place. A change of one word, so of any single bit, always changes both sums; changes of
several words leave both as they were once in 2^64. (Words that are only multiplied and
summed would not do: the signs of any two elements could change unseen, since twice the
highest bit is nothing.) Source of the steps: the finalizer of A. Appleby's MurmurHash3.

A program of XLA's partitioner would take a replicated array to be the same everywhere,
and might read another device's. `jax.shard_map` is the program of each device, on what
it has.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from keras_distribute.consistency import words
from keras_distribute.devices.launches import launches

Layout = tuple[tuple[int, ...], ...]
"""The numbers of the arrays that are hashed together, for each hash."""


def of_arrays(arrays: Sequence[jax.Array], layout: Layout) -> jax.Array:
    """The hashes, on their devices.

    Args:
        layout: Which of them are hashed together, as one row.

    Returns:
        Of shape `(devices, len(layout), 2)`, split over the devices of the mesh.
    """
    mesh, specs = _placed(arrays)
    return _program(mesh, specs, layout)(list(arrays))


def of_parts(arrays: Sequence[jax.Array], sizes: Sequence[int]) -> jax.Array:
    """The hash of each part of some arrays, which are seen as one row.

    Args:
        arrays: On one mesh, of any dtypes.
        sizes: Of the parts, in words; they need not cover all.

    Returns:
        Of shape `(devices, len(sizes), 2)`, split over the devices of the mesh.
    """
    mesh, specs = _placed(arrays)
    return _program_of_parts(mesh, specs, tuple(sizes))(list(arrays))


def of_own_parts(arrays: Sequence[jax.Array]) -> jax.Array:
    """The hash of each device's part of each array, in which words have the places
    that they have in the whole: the sum over the parts is the hash of the whole,
    however it is divided.

    Returns:
        Of shape `(devices, len(arrays), 2)`, split over the devices of the mesh.
    """
    mesh, specs = _placed(arrays)
    shapes = tuple(array.shape for array in arrays)
    return _program_of_own_parts(mesh, specs, shapes)(list(arrays))


def of_value(array: Any) -> Any:
    """The hash of an array in a program, of shape `(2,)`."""
    return _hash_of(words.of(array))


def as_numbers(pairs: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Hashes on the host, the two sums of each as one number of 64 bits."""
    wide = pairs.astype(np.uint64)
    return wide[..., 0] << np.uint64(32) | wide[..., 1]


def on_each_device(mesh: Mesh, body: Any, in_specs: Any, out_specs: Any = None) -> Any:
    """`body` as the program of each device alone; by default its results are stacked,
    one for each device.
    """
    return jax.shard_map(
        body,
        mesh=mesh,
        in_specs=in_specs,
        out_specs=PartitionSpec(mesh.axis_names) if out_specs is None else out_specs,
        check_vma=False,
    )


def _placed(arrays: Sequence[jax.Array]) -> tuple[Mesh, tuple[PartitionSpec, ...]]:
    shardings: list[Any] = [array.sharding for array in arrays]
    assert all(isinstance(sharding, NamedSharding) for sharding in shardings)
    return shardings[0].mesh, tuple(sharding.spec for sharding in shardings)


@functools.lru_cache(maxsize=64)
def _program(mesh: Mesh, specs: tuple[PartitionSpec, ...], layout: Layout) -> Any:
    def body(arrays: list[Any]) -> Any:
        rows = [_joined([arrays[i] for i in together]) for together in layout]
        return jnp.stack(list(map(_hash_of, rows)))[None]

    return launches.ordered(jax.jit(on_each_device(mesh, body, (list(specs),))))


@functools.lru_cache(maxsize=64)
def _program_of_parts(
    mesh: Mesh, specs: tuple[PartitionSpec, ...], sizes: tuple[int, ...]
) -> Any:
    def body(arrays: list[Any], part: Any) -> Any:
        row = _joined(arrays, always=True)[: sum(sizes)]
        totals = [
            jax.ops.segment_sum(m, part, len(sizes), indices_are_sorted=True)
            for m in mixed(row, words.index_in(row.shape))
        ]
        return jnp.stack(totals, axis=-1)[None]

    program = jax.jit(on_each_device(mesh, body, (list(specs), PartitionSpec())))
    part = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
    return launches.ordered(lambda arrays: program(arrays, part))


@functools.lru_cache(maxsize=64)
def _program_of_own_parts(
    mesh: Mesh, specs: tuple[PartitionSpec, ...], shapes: tuple[tuple[int, ...], ...]
) -> Any:
    begins = [
        _begins(mesh, spec, shape) for spec, shape in zip(specs, shapes, strict=True)
    ]

    def body(arrays: list[Any]) -> Any:
        device, totals = lax.axis_index(mesh.axis_names), []
        for array, begin, shape in zip(arrays, begins, shapes, strict=True):
            row = words.of(array)
            whole = (*shape, *row.shape[array.ndim :])
            index = words.index_in(row.shape, whole)
            for axis, stride in enumerate(words.strides(whole)[: array.ndim]):
                index = index + jnp.asarray(begin[:, axis])[device] * stride
            totals.append(_hash_of(row, index))
        return jnp.stack(totals)[None]

    return launches.ordered(jax.jit(on_each_device(mesh, body, (list(specs),))))


def _begins(
    mesh: Mesh, spec: PartitionSpec, shape: tuple[int, ...]
) -> np.ndarray[Any, Any]:
    """Where each device's part begins, in each dimension."""
    where = NamedSharding(mesh, spec).devices_indices_map(shape)
    begins = [[part.start or 0 for part in where[d]] for d in mesh.devices.flat]
    return np.asarray(begins, np.uint32).reshape(len(begins), len(shape))


def _joined(arrays: Sequence[Any], always: bool = False) -> Any:
    """The words of these arrays: of one in its shape, of several as one row."""
    own = list(map(words.of, arrays))
    if len(own) == 1 and not always:
        return own[0]
    # Not fused: an element of the row would be looked for among all arrays.
    return lax.optimization_barrier(jnp.concatenate([w.reshape(-1) for w in own]))


def mixed(row: Any, index: Any) -> tuple[Any, Any]:
    """Of each word, at its place, two others, by steps that can be undone; also of
    arrays of numpy.
    """
    first = row ^ (index * np.uint32(0x9E3779B9) + np.uint32(0x7F4A7C15))
    first = (first ^ (first >> 16)) * np.uint32(0x85EBCA6B)
    first = (first ^ (first >> 13)) * np.uint32(0xC2B2AE35)
    first = first ^ (first >> 16)
    second = first ^ (index * np.uint32(0x165667B1) + np.uint32(0x27220A95))
    second = (second ^ (second >> 15)) * np.uint32(0x27D4EB2F)
    return first, second ^ (second >> 15)


def _hash_of(row: Any, index: Any = None) -> Any:
    """Of words, by default of a whole array; of shape `(2,)`."""
    index = words.index_in(row.shape) if index is None else index
    return jnp.stack([jnp.sum(m, dtype=jnp.uint32) for m in mixed(row, index)])
