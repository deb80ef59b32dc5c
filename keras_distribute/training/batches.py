"""Puts a global batch on the devices of a strategy, and takes it apart again inside the
step.

The rows of an array are split over the replicas. Where their number does not divide,
the batch is padded: rows are added for the transfer and sliced off inside the compiled
step (`trim`), before anything is computed. Each replica holds at most
`ceil(rows / num_replicas)` of them, none enters a number, and XLA keeps the uneven
split throughout the step; or each replica has them all (`steps/step_programs.py`). All
of padding is here.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding

from keras_distribute._compat.adapters import is_sparse
from keras_distribute.cluster import agreement
from keras_distribute.devices.mesh import ReplicaMesh
from keras_distribute.errors import InputError
from keras_distribute.input.splitting import piece_sizes

Rows = tuple[int | tuple[int, ...], ...]
Spread = tuple[int, int]
# In place of a number of rows: the array is on every replica, and all of it is meant.
WHOLE = -1


class Placed(NamedTuple):
    """A batch on devices.

    Args:
        rows: The true number of rows of each leaf, or of each replica's part of it, or
            `WHOLE`.
        spread: The rows of the first leaf, and the number of replicas that they are
            spread over evenly.
    """

    data: Any
    rows: Rows
    spread: Spread


def place(
    batch: Any,
    mesh: ReplicaMesh,
    sizes: Sequence[int] | None = None,
    *,
    traced: bool = True,
) -> Placed:
    """The batch on the devices of `mesh`.

    Args:
        batch: A structure of arrays whose axis 0 is the rows; arrays without
            dimensions, and sparse ones, go to every replica whole.
        sizes: The rows of each replica, over all processes: the batch holds those of
            this process alone. Otherwise it is the whole batch, the same in every
            process.
        traced: Whether `trim` will be called in a compiled step. Otherwise an array
            whose rows do not divide goes to every replica whole; as does any, where
            results have the same bits on any number of devices.

    Returns:
        The batch, ready for a step; a batch that is placed already as it is.

    Raises:
        InputError: For arrays of several processes that do not have the rows of the
            batch.
    """
    if isinstance(batch, Placed):
        return batch
    return _placed(batch, lambda leaf: _put(leaf, mesh, sizes, traced))


def placed_form(batch: Any, mesh: ReplicaMesh) -> Placed:
    """`place` of shapes alone, on devices that need not be there."""

    def form(leaf: Any) -> _Leaf:
        assert not is_sparse(leaf)
        shape, dtype = tuple(leaf.shape), jax.dtypes.canonicalize_dtype(leaf.dtype)
        count = shape[0] if shape else 0
        pad, rows, spread = _padding(count, mesh.num_replicas)
        if count:
            shape = (count + pad, *shape[1:])
        own = mesh.split if count else mesh.replicated
        return _Leaf(jax.ShapeDtypeStruct(shape, dtype, sharding=own), rows, spread)

    return _placed(batch, form)


class _Leaf(NamedTuple):
    """One array of a batch on devices, as `Placed` says it of all."""

    array: Any
    rows: int | tuple[int, ...]
    spread: Spread


def _placed(batch: Any, put: Callable[[Any], _Leaf]) -> Placed:
    leaves, structure = jax.tree.flatten(batch, is_leaf=is_sparse)
    placed = [put(leaf) for leaf in leaves]
    return Placed(
        jax.tree.unflatten(structure, [leaf.array for leaf in placed]),
        tuple(leaf.rows for leaf in placed),
        placed[0].spread if placed else (0, 1),
    )


def _padding(count: int, replicas: int) -> tuple[int, int, Spread]:
    """How many rows to add to `count` so that they divide over the replicas; what
    `trim` is told of them; and how they are spread.
    """
    pad = -count % replicas
    return pad, count if pad else WHOLE, (count, 1 if pad or not count else replicas)


def _put(
    leaf: Any, mesh: ReplicaMesh, sizes: Sequence[int] | None, traced: bool
) -> _Leaf:
    is_ready = isinstance(leaf, jax.Array) or is_sparse(leaf)
    array = leaf if is_ready else np.asarray(leaf)
    if mesh.num_processes > 1 and array.ndim:
        return _put_own_rows(array, mesh, sizes)
    count = array.shape[0] if array.ndim else 0
    pad, rows, spread = _padding(count, mesh.num_replicas)
    is_whole = count == 0 or is_sparse(leaf)
    if is_whole or (not traced and (pad or mesh.series is not None)):
        return _Leaf(mesh.put_replicated(array), WHOLE, spread)
    if pad:
        numpy_like = jnp if isinstance(array, jax.Array) else np
        last_rows = numpy_like.repeat(array[-1:], pad, axis=0)
        array = numpy_like.concatenate([array, last_rows])
    return _Leaf(mesh.put_split(array), rows, spread)


def place_whole(batch: Any, mesh: ReplicaMesh) -> Placed:
    """`place` of a whole batch, which must be the same in every process."""
    if mesh.num_processes > 1 and not isinstance(batch, Placed):
        leaves = map(np.asarray, jax.tree.leaves(batch))
        own = [(leaf.shape, zlib.crc32(leaf.tobytes())) for leaf in leaves]
        said = agreement.exchange("a batch", own, mesh.num_processes)
        if any(other != said[0] for other in said):
            raise InputError(
                "The processes were given different batches, but a batch given to a "
                "model is the global one.",
                received="; ".join(
                    f"process {i}: {[shape for shape, _ in other]}"
                    for i, other in enumerate(said)
                )
                + ", or other values.",
                fix="pass the same batch in every process, or fit a dataset with "
                "kd.AutoShardPolicy.OFF.",
            )
    return place(batch, mesh)


def _put_own_rows(array: Any, mesh: ReplicaMesh, sizes: Sequence[int] | None) -> _Leaf:
    """The rows of this process as its part of those of all, each replica's padded up to
    the largest.

    Args:
        array: The rows of this process, or all.
        sizes: The rows of each replica, in the former case.
    """
    if is_sparse(array):
        raise InputError(
            "Sparse tensors cannot be shared by several processes.",
            received=f"a sparse array of shape {array.shape}.",
            fix="a dense array.",
        )
    array = np.asarray(array)
    own, count = mesh.local_replicas, sum(sizes or (array.shape[0],))
    if sizes is None:
        sizes = piece_sizes(array.shape[0], mesh.num_replicas)
        array = array[sum(sizes[: own.start]) : sum(sizes[: own.stop])]
    mine, each = sizes[own.start : own.stop], max(sizes)
    if array.shape[0] != sum(mine):
        raise InputError(
            "The arrays of a batch have the same number of rows.",
            received=f"{array.shape[0]} rows beside {sum(mine)} on process "
            f"{mesh.process_index}.",
            fix="make every array of an element have the batch as its first dimension.",
        )
    if any(size < each for size in mine):
        array = _padded_pieces(array, mine, each)
    if count == each * len(sizes):
        return _Leaf(mesh.put_split(array), WHOLE, (count, mesh.num_replicas))
    is_even = list(sizes) == piece_sizes(count, len(sizes))
    rows = count if is_even else tuple(sizes)
    return _Leaf(mesh.put_split(array), rows, (count, 1))


def _padded_pieces(array: Any, sizes: Sequence[int], each: int) -> Any:
    """The pieces of `array`, each of its own size, as pieces of `each` rows."""
    padded = np.zeros((len(sizes), each, *array.shape[1:]), array.dtype)
    ends = itertools.accumulate(sizes)
    for piece, size, end in zip(padded, sizes, ends, strict=True):
        piece[:size] = array[end - size : end]
    return padded.reshape(-1, *array.shape[1:])


def trim(batch: Any, rows: Rows, sharding: NamedSharding) -> Any:
    """Slices the placed `batch` to its true rows, inside a compiled step, and spreads
    these as `sharding` says.
    """
    leaves, structure = jax.tree.flatten(batch, is_leaf=is_sparse)
    trimmed = [
        leaf
        if true == WHOLE
        else lax.with_sharding_constraint(_true_rows(leaf, true), sharding)
        for leaf, true in zip(leaves, rows, strict=True)
    ]
    return jax.tree.unflatten(structure, trimmed)


def _true_rows(leaf: Any, true: int | tuple[int, ...]) -> Any:
    if isinstance(true, int):
        return leaf[:true]
    each = leaf.shape[0] // len(true)
    return jnp.concatenate(
        [leaf[i * each : i * each + size] for i, size in enumerate(true)]
    )
