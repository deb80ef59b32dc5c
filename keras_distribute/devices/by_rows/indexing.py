"""Elements taken from places that the program computes, and put there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax import lax

from keras_distribute.devices.by_rows.lookups import RowsAdded, rows_of_part
from keras_distribute.devices.by_rows.values import Replica, Value, refuse

_BEGIN_INSIDE = {lax.GatherScatterMode.CLIP, lax.GatherScatterMode.PROMISE_IN_BOUNDS}


def gather(replica: Replica, eqn: Any, values: list[Value]) -> list[Value]:
    """Rows of a table; elements of each row; the same places of all rows."""
    operand, indices = values
    if operand.rows is None and indices.rows is None:
        return replica.same(eqn, [operand, indices])
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    ndim = eqn.outvars[0].aval.ndim
    batch = [dim for dim in range(ndim) if dim not in numbers.offset_dims]
    batching = numbers.operand_batching_dims, numbers.start_indices_batching_dims
    pairs = dict(zip(*batching, strict=True))
    pair = _pair(pairs, operand.rows, indices.rows)
    if pair is not None:
        arrays = [replica.part(operand, pair[0]), replica.part(indices, pair[1])]
        return replica.apply(eqn, arrays, batch[pair[1]])
    if operand.rows is None:
        assert indices.rows is not None
        refuse(indices.rows == indices.ndim - 1)
        if operand.of_state and operand.parts:
            found = rows_of_part(replica, eqn, operand, indices)
            if found is not None:
                return found
        arrays = [replica.whole(operand), indices.array]
        return replica.apply(eqn, arrays, batch[indices.rows])
    dim, gone = operand.rows, [*numbers.collapsed_slice_dims, *pairs]
    # Where all rows are taken, they begin at the first, whatever the indices say.
    is_moved = (
        eqn.params["mode"] not in _BEGIN_INSIDE and dim in numbers.start_index_map
    )
    refuse(
        indices.rows is not None
        or dim in gone
        or is_moved
        or sizes[dim] != eqn.invars[0].aval.shape[dim]
    )
    kept = [d for d in range(operand.ndim) if d not in gone]
    own = replica.divided_at(sizes, dim)
    arrays = [operand.array, replica.whole(indices)]
    place = numbers.offset_dims[kept.index(dim)]
    return replica.apply(eqn, arrays, place, slice_sizes=own)


def scatter(replica: Replica, eqn: Any, values: list[Value]) -> list[Value]:
    """Elements put into each row; or added up, each replica its rows'."""
    operand, indices, updates = values
    numbers = eqn.params["dimension_numbers"]
    window = numbers.update_window_dims
    ndim = eqn.invars[2].aval.ndim
    batch = [dim for dim in range(ndim) if dim not in window]
    batching = numbers.operand_batching_dims, numbers.scatter_indices_batching_dims
    pairs = dict(zip(*batching, strict=True))
    if all(value.rows is None for value in values):
        return _of_sums(replica, eqn, values)
    of_index = indices.rows
    if of_index is None and updates.rows in batch:
        of_index = batch.index(updates.rows)
    pair = _pair(pairs, operand.rows, of_index)
    if pair is not None:
        arrays = [
            replica.part(operand, pair[0]),
            replica.part(indices, pair[1]),
            replica.part(updates, batch[pair[1]]),
        ]
        return replica.apply(eqn, arrays, pair[0])
    gone = [*numbers.inserted_window_dims, *pairs]
    kept = [dim for dim in range(eqn.invars[0].aval.ndim) if dim not in gone]
    if of_index is None:
        dim = operand.rows
        if dim is None:
            assert updates.rows is not None
            dim = kept[window.index(updates.rows)]
        return _of_windows(replica, eqn, values, dim, kept)
    refuse(operand.rows is not None or of_index == indices.ndim - 1)
    refuse(eqn.primitive.name != "scatter-add")
    places = replica.part(indices, of_index), of_index
    added = replica.part(updates, batch[of_index]), batch[of_index]
    arrays = [replica.summand(operand), places[0], replica.true_part(*added)]
    (result,) = replica.apply(eqn, arrays, partial=True)
    if operand.zero:
        result.over_rows = (RowsAdded(eqn, places, added),)
    return [result]


def _of_windows(
    replica: Replica, eqn: Any, values: list[Value], dim: int, kept: Sequence[int]
) -> list[Value]:
    """The same places of all rows, in windows that have all rows."""
    operand, indices, updates = values
    numbers = eqn.params["dimension_numbers"]
    refuse(dim not in kept or dim in numbers.scatter_dims_to_operand_dims)
    place = numbers.update_window_dims[list(kept).index(dim)]
    shapes = [eqn.invars[0].aval.shape, eqn.invars[2].aval.shape]
    refuse(shapes[0][dim] != shapes[1][place])
    arrays = [
        replica.part(operand, dim),
        replica.whole(indices),
        replica.part(updates, place),
    ]
    return replica.apply(eqn, arrays, dim)


def _of_sums(replica: Replica, eqn: Any, values: list[Value]) -> list[Value]:
    operand, indices, updates = values
    partial = operand.partial or updates.partial
    if eqn.primitive.name != "scatter-add" or not partial or indices.partial:
        return replica.same(eqn, values)
    arrays = [
        replica.summand(operand),
        replica.whole(indices),
        replica.summand(updates),
    ]
    return replica.apply(eqn, arrays, partial=True)


def _pair(
    pairs: dict[int, int], operand: int | None, indices: int | None
) -> tuple[int, int] | None:
    """The dimensions of operand and indices that are common to both, and the rows'."""
    for pair in pairs.items():
        if operand == pair[0] or (operand is None and indices == pair[1]):
            return pair
    return None
