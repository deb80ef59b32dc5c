"""Rows of a table of which each replica has a part.

Where far fewer rows are looked up than the table has, these travel, not the table. Of
one that is divided along its rows each replica finds what all of them look up, if it is
in its part, and their sum over the replicas is parted among them; of one that is
divided along its columns, each replica sends every other one the columns of that one's
rows. Gradients take the same way back, and no replica has a whole one. Of a table that
each replica has whole, the rows of its gradient travel, too, not the gradient.

The first is what GSPMD does with such an operation (Xu et al., 2021,
https://arxiv.org/abs/2105.04663, section 4.4).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from keras_distribute.devices.by_rows.values import Replica, Value, are_few


def rows_of_part(
    replica: Replica, eqn: Any, table: Value, indices: Value
) -> list[Value] | None:
    """The rows that each replica looks up, from the parts of a table.

    Args:
        table: Whole, with the part that it was made from.
        indices: Each replica its own.

    Returns:
        What each replica looks up; `None` where the table itself is to travel.
    """
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    shape, (dim, part) = eqn.invars[0].aval.shape, next(iter(table.parts.items()))
    found = eqn.outvars[0].aval
    batch = [i for i in range(found.ndim) if i not in numbers.offset_dims]
    assert indices.rows is not None
    rows = batch[indices.rows]
    gone = [*numbers.collapsed_slice_dims, *numbers.operand_batching_dims]
    if _is_along_rows(
        dim, numbers.start_index_map, gone, numbers.operand_batching_dims
    ):
        if not are_few(found.size, math.prod(shape)):
            return None
        every = replica.gathered(indices.array, indices.rows)
        is_clipped = eqn.params["mode"] == lax.GatherScatterMode.CLIP
        places, is_own = _in_part(replica, every, shape[dim], is_clipped)
        (own,) = replica.apply(eqn, [part, places])
        is_own = lax.broadcast_in_dim(is_own[..., 0], own.array.shape, batch)
        addend = jnp.where(is_own, own.array, jnp.zeros_like(own.array))
        return [Value(replica.scattered(addend, rows), rows)]
    if dim in [*gone, *numbers.start_index_map] or sizes[dim] != shape[dim]:
        return None
    if not are_few(found.size // replica.count, math.prod(shape)):
        return None
    every = replica.gathered(indices.array, indices.rows)
    widths = replica.divided_at(sizes, dim)
    (own,) = replica.apply(eqn, [part, every], slice_sizes=widths)
    kept = [i for i in range(len(shape)) if i not in gone]
    columns = numbers.offset_dims[kept.index(dim)]
    return [Value(replica.exchanged(own.array, rows, columns), rows)]


@dataclasses.dataclass(frozen=True)
class RowsAdded:
    """Rows that each replica adds to a table of zeros: its gradient.

    Args:
        indices: Each replica its own, and the dimension of the batch's rows.
        updates: Likewise.
    """

    eqn: Any
    indices: tuple[Any, int]
    updates: tuple[Any, int]

    def moved(self, replica: Replica, dim: int | None) -> int | None:
        """The elements of the rows of all replicas, or of their columns of the part."""
        size = self.eqn.invars[2].aval.size
        if dim is None or self._is_along_rows(dim):
            return size
        return None if self._window(dim) is None else size // replica.count

    def part(self, replica: Replica, dim: int | None, dtype: Any) -> Any:
        """This replica's part along a dimension of the sum over all replicas, added in
        a dtype; or all of it, which is what one device adds.
        """
        shape = self.eqn.outvars[0].aval.shape
        mode = self.eqn.params["mode"]
        places = replica.gathered(*self.indices)
        own, place = self.updates
        own = replica.narrow(own)
        if dim is None:
            zeros = jnp.zeros(shape, self.eqn.outvars[0].aval.dtype)
            updates = replica.gathered(own, place)
        elif self._is_along_rows(dim):
            zeros = jnp.zeros(replica.divided_at(shape, dim), dtype)
            is_clipped = mode == lax.GatherScatterMode.CLIP
            places, is_own = _in_part(replica, places, shape[dim], is_clipped)
            places = jnp.where(is_own, places, shape[dim])  # Dropped.
            updates = replica.gathered(own, place)
            mode = lax.GatherScatterMode.FILL_OR_DROP
        else:
            zeros = jnp.zeros(replica.divided_at(shape, dim), dtype)
            window = self._window(dim)
            assert window is not None
            updates = replica.exchanged(own, window, place)
        updates = updates.astype(zeros.dtype)
        numbers = self.eqn.params["dimension_numbers"]
        added = lax.scatter_add(zeros, places, updates, numbers, mode=mode)
        return added.astype(dtype)

    def _is_along_rows(self, dim: int) -> bool:
        numbers = self.eqn.params["dimension_numbers"]
        batching = numbers.operand_batching_dims
        gone = [*numbers.inserted_window_dims, *batching]
        return _is_along_rows(dim, numbers.scatter_dims_to_operand_dims, gone, batching)

    def _window(self, dim: int) -> int | None:
        """The dimension of the updates that is a whole one of the table."""
        numbers = self.eqn.params["dimension_numbers"]
        gone = [*numbers.inserted_window_dims, *numbers.operand_batching_dims]
        if dim in [*gone, *numbers.scatter_dims_to_operand_dims]:
            return None
        shape = self.eqn.outvars[0].aval.shape
        kept = [i for i in range(len(shape)) if i not in gone]
        window = numbers.update_window_dims[kept.index(dim)]
        same = self.updates[0].shape[window] == shape[dim]
        return window if same else None


def _is_along_rows(
    dim: int, indexed: Sequence[int], gone: Sequence[int], batching: Sequence[int]
) -> bool:
    """Whether an index is a place along a dimension, and nothing else."""
    return tuple(indexed) == (dim,) and dim in gone and not batching


def _in_part(replica: Replica, indices: Any, size: int, is_clipped: bool) -> Any:
    """Where indices of rows are in this replica's part of them, and whether they are.
    Those of no row are the first replica's, and stay outside.
    """
    if is_clipped:
        most = min(size - 1, int(jnp.iinfo(indices.dtype).max))
        indices = jnp.clip(indices, 0, most)
    if indices.dtype.itemsize > 4:  # Narrow, they might be those of rows.
        indices = jnp.minimum(jnp.maximum(indices, -1), size)
    indices = indices.astype("int32")
    own = replica.divided(size)
    index = replica.index()
    first = index.astype("int32") * own
    is_own = (indices >= first) & (indices < first + own)
    is_nowhere = (indices < 0) | (indices >= size)
    places = jnp.where(is_nowhere, indices, indices - first)
    return places, is_own | (is_nowhere & (index == 0))
