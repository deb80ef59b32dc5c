"""Operations that move elements between dimensions and arrays."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax.numpy as jnp

from keras_distribute.devices.by_rows.values import (
    Replica,
    RowsMixError,
    Rule,
    SumOverRows,
    Value,
    common_rows,
    refuse,
)


def broadcast_in_dim(replica: Replica, eqn: Any, values: list[Value]) -> list[Value]:
    """New dimensions, and dimensions of length 1 made longer."""
    value, shape = values[0], eqn.params["shape"]
    dims = eqn.params["broadcast_dimensions"]
    old = dict(zip(dims, jnp.shape(value.array), strict=True))
    longer = [size for dim, size in enumerate(shape) if old.get(dim) != size]
    if value.partial and replica.rows in longer:
        return replica.same(eqn, values)  # A sum is smaller than copies of it.
    if value.rows is None:
        return linear(replica, eqn, values)
    dim = dims[value.rows]
    own = replica.divided_at(shape, dim)
    return replica.apply(eqn, [value.array], dim, shape=own)


def part_of_broadcast(
    replica: Replica, eqn: Any, operands: list[Value], dim: int, depth: int
) -> Any:
    """A part of a broadcast."""
    value, dims = operands[0], eqn.params["broadcast_dimensions"]
    shape = eqn.params["shape"]
    if dim in dims:
        array = replica.part_or_one(value, dims.index(dim), depth)
    else:
        array = replica.whole(value)
    own = replica.divided_at(shape, dim)
    return replica.apply(eqn, [array], shape=own)[0].array


def part_of_iota(
    replica: Replica, eqn: Any, operands: list[Value], dim: int, depth: int
) -> Any:
    """A part of numbers that count up."""
    shape = replica.divided_at(eqn.params["shape"], dim)
    counts = replica.apply(eqn, [], shape=shape)[0].array
    if eqn.params["dimension"] == dim:
        counts += (replica.index() * shape[dim]).astype(counts.dtype)
    return counts


def reshape(replica: Replica, eqn: Any, values: list[Value]) -> list[Value]:
    """A part stays one where the dimensions before it are the same."""
    value, sizes = values[0], eqn.params["new_sizes"]
    if value.rows is None:
        return linear(replica, eqn, values)
    if eqn.params.get("dimensions") is not None:
        raise RowsMixError
    before = math.prod(value.array.shape[: value.rows])
    for dim, size in enumerate(sizes):
        if math.prod(sizes[:dim]) == before and size and replica.divides(size):
            own = replica.divided_at(sizes, dim)
            return replica.apply(eqn, [value.array], dim, new_sizes=own)
    raise RowsMixError


def transpose(replica: Replica, eqn: Any, values: list[Value]) -> list[Value]:
    """Dimensions in another order."""
    value, order = values[0], eqn.params["permutation"]
    if value.rows is None:
        (result,) = linear(replica, eqn, values)
        result.over_rows = tuple(Transposed(each, order) for each in value.over_rows)
        return [result]
    return replica.apply(eqn, [value.array], order.index(value.rows))


@dataclasses.dataclass(frozen=True)
class Transposed:
    """A sum over rows, its dimensions in another order.

    Args:
        order: Which dimension of the sum each one is.
    """

    total: SumOverRows
    order: Sequence[int]

    def moved(self, replica: Replica, dim: int | None) -> int | None:
        """The elements that a replica has to be given for its part."""
        return self.total.moved(replica, self._before(dim))

    def part(self, replica: Replica, dim: int | None, dtype: Any) -> Any:
        """This replica's part along a dimension."""
        part = self.total.part(replica, self._before(dim), dtype)
        return jnp.transpose(part, self.order)

    def _before(self, dim: int | None) -> int | None:
        return None if dim is None else self.order[dim]


def _beside(own: Callable[[Any], Collection[int]], is_gone: bool = False) -> Rule:
    """The rule of an operation along dimensions of one array, which are not the rows',
    and may be gone afterwards.

    Args:
        own: From the parameters of the operation to these dimensions.
    """

    def rule(replica: Replica, eqn: Any, values: list[Value]) -> list[Value]:
        value = values[0]
        if value.rows is None:
            return linear(replica, eqn, values)
        dims = own(eqn.params)
        refuse(value.rows in dims)
        before = sum(d < value.rows for d in dims) if is_gone else 0
        return replica.apply(eqn, [value.array], value.rows - before)

    return rule


squeeze = _beside(lambda params: params["dimensions"], is_gone=True)
unstack = _beside(lambda params: [params["axis"]], is_gone=True)
split = _beside(lambda params: [params["axis"]])
reverse = _beside(lambda params: params["dimensions"])
tile = _beside(lambda params: [i for i, n in enumerate(params["reps"]) if n != 1])


def concatenate(replica: Replica, eqn: Any, values: list[Value]) -> list[Value]:
    """Arrays one after the other, not along the rows."""
    return _alongside(replica, eqn, values, eqn.params["dimension"])


def stack(replica: Replica, eqn: Any, values: list[Value]) -> list[Value]:
    """Arrays beside each other, along a new dimension."""
    dim = common_rows(values)
    if dim is None:
        return _of_whole(replica, eqn, values)
    parts = [replica.part(value, dim) for value in values]
    return replica.apply(eqn, parts, dim + (eqn.params["axis"] <= dim))


def pad(replica: Replica, eqn: Any, values: list[Value]) -> list[Value]:
    """More at the ends, not of the rows."""
    value, filling = values
    if value.rows is None:
        if value.partial and not filling.zero:
            return replica.same(eqn, values)
        return linear(replica, eqn, values)
    refuse(eqn.params["padding_config"][value.rows] != (0, 0, 0))
    return replica.apply(eqn, [value.array, replica.whole(filling)], value.rows)


def slice_(replica: Replica, eqn: Any, values: list[Value]) -> list[Value]:
    """A piece that has all rows."""
    value, params = values[0], eqn.params
    if value.rows is None:
        return linear(replica, eqn, values)
    dim, size = value.rows, eqn.invars[0].aval.shape[value.rows]
    strides = params["strides"]
    is_all = params["start_indices"][dim] == 0 and params["limit_indices"][dim] == size
    refuse(not is_all or (strides is not None and strides[dim] != 1))
    limits = replica.divided_at(params["limit_indices"], dim)
    return replica.apply(eqn, [value.array], dim, limit_indices=limits)


def dynamic_slice(replica: Replica, eqn: Any, values: list[Value]) -> list[Value]:
    """A piece from a place that the program computes."""
    value, starts = values[0], values[1:]
    where = [replica.whole(start) for start in starts]
    if value.rows is None:
        return linear(replica, eqn, values)
    sizes = eqn.params["slice_sizes"]
    refuse(sizes[value.rows] != eqn.invars[0].aval.shape[value.rows])
    own = replica.divided_at(sizes, value.rows)
    return replica.apply(eqn, [value.array, *where], value.rows, slice_sizes=own)


def dynamic_update_slice(
    replica: Replica, eqn: Any, values: list[Value]
) -> list[Value]:
    """A piece put in a place that the program computes."""
    whole, piece = values[:2]
    where = [replica.whole(start) for start in values[2:]]
    dim = common_rows([whole, piece])
    if dim is not None:
        shapes = [atom.aval.shape for atom in eqn.invars[:2]]
        refuse(shapes[0][dim] != shapes[1][dim])
        parts = [replica.part(value, dim) for value in (whole, piece)]
        return replica.apply(eqn, [*parts, *where], dim)
    if whole.partial or piece.partial:
        summands = [replica.summand(value) for value in (whole, piece)]
        return replica.apply(eqn, [*summands, *where], partial=True)
    return replica.same(eqn, values)


def along_one_dimension(name: str) -> Any:
    """The rule of an operation along one dimension that is not the rows'.

    Args:
        name: Of the parameter that says which.
    """

    def rule(replica: Replica, eqn: Any, values: list[Value]) -> list[Value]:
        own = eqn.params.get(name, eqn.invars[0].aval.ndim - 1)
        return _alongside(replica, eqn, values, own)

    return rule


def window(replica: Replica, eqn: Any, values: list[Value]) -> list[Value]:
    """Windows of one row."""
    dim = common_rows(values)
    if dim is None:
        return replica.same(eqn, values)
    wanted = {
        "window_dimensions": 1,
        "window_strides": 1,
        "padding": (0, 0),
        "base_dilation": 1,
        "window_dilation": 1,
    }
    for name, plain in wanted.items():
        given = eqn.params.get(name)
        refuse(given is not None and given[dim] != plain)
    parts = [replica.part_or_one(value, dim) for value in values]
    return replica.apply(eqn, parts, dim)


def leading(num_own: int) -> Any:
    """The rule of an operation on the last dimensions of its operands, for each index
    of the others.

    Args:
        num_own: How many are its own.
    """

    def rule(replica: Replica, eqn: Any, values: list[Value]) -> list[Value]:
        dim = common_rows(values)
        if dim is None:
            return replica.same(eqn, values)
        refuse(any(dim >= value.ndim - num_own for value in values))
        parts = [replica.part(value, dim) for value in values]
        return replica.apply(eqn, parts, dim)

    return rule


def fft(replica: Replica, eqn: Any, values: list[Value]) -> list[Value]:
    """A transform of the last dimensions."""
    return leading(len(eqn.params["fft_lengths"]))(replica, eqn, values)


def linear(replica: Replica, eqn: Any, values: list[Value]) -> list[Value]:
    """What moves elements, of a value that is not divided: sums stay sums."""
    first, others = values[0], values[1:]
    if not first.partial:
        return replica.same(eqn, values)
    arrays = [first.array, *map(replica.whole, others)]
    return replica.apply(eqn, arrays, partial=True)


def _alongside(
    replica: Replica, eqn: Any, values: Sequence[Value], own: int
) -> list[Value]:
    """An operation along one dimension, on operands of equal shapes beside it."""
    dim = common_rows(values)
    if dim is not None:
        refuse(dim == own)
        return replica.apply(eqn, [replica.part(v, dim) for v in values], dim)
    if eqn.primitive.name in {"concatenate", "cumsum"}:
        return _of_whole(replica, eqn, values)
    return replica.same(eqn, values)


def _of_whole(replica: Replica, eqn: Any, values: Sequence[Value]) -> list[Value]:
    """A linear operation on values that are not divided: sums stay sums."""
    if any(value.partial for value in values):
        summands = [replica.summand(value) for value in values]
        return replica.apply(eqn, summands, partial=True)
    return replica.same(eqn, values)
