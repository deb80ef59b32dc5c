"""Operations that sum over dimensions: where these are the rows', each replica has a
part of the sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from keras_distribute.devices.axes import REPLICA_AXIS
from keras_distribute.devices.by_rows.products import (
    ProductOfRows,
    of_part,
    ordered,
    place_of_free,
)
from keras_distribute.devices.by_rows.values import (
    Replica,
    RowsMixError,
    Value,
    common_rows,
)


def dot_general(replica: Replica, eqn: Any, values: list[Value]) -> list[Value]:
    """Products of arrays, summed over dimensions."""
    left, right = values
    (contracted, batched) = eqn.params["dimension_numbers"]
    sides = [left, right]
    for mine, other in ((0, 1), (1, 0)):
        value, beside = sides[mine], sides[other]
        if value.rows is None:
            continue
        own, others = contracted[mine], contracted[other]
        if value.rows in own:
            dim = others[own.index(value.rows)]
            arrays = ordered(
                mine,
                replica.true_part(value.array, value.rows),
                replica.true_part(replica.part(beside, dim), dim),
            )
            (result,) = replica.apply(eqn, arrays, partial=True)
            dims = ordered(mine, value.rows, dim)
            result.over_rows = (ProductOfRows(eqn, tuple(arrays), tuple(dims)),)
            return [result]
        own, others = batched[mine], batched[other]
        if value.rows in own:
            place = own.index(value.rows)
            arrays = ordered(mine, value.array, replica.part(beside, others[place]))
            return replica.apply(eqn, arrays, place)
    for mine, other in ((0, 1), (1, 0)):
        value, beside = sides[mine], sides[other]
        if value.rows is None:
            continue
        if beside.rows is not None:
            raise RowsMixError
        if beside.of_state and beside.parts:
            found = of_part(replica, eqn, mine, value, beside)
            if found is not None:
                return found
        dim = place_of_free(eqn, mine, value.rows)
        arrays = ordered(mine, value.array, replica.whole(beside))
        return replica.apply(eqn, arrays, dim)
    return _bilinear(replica, eqn, sides)


def convolution(replica: Replica, eqn: Any, values: list[Value]) -> list[Value]:
    """Convolutions, and their gradients, which are some, too."""
    image, kernel = values
    numbers = eqn.params["dimension_numbers"]
    if image.rows is None and kernel.rows is None:
        return _bilinear(replica, eqn, [image, kernel])
    one_group = eqn.params["feature_group_count"] == 1
    if image.rows == numbers.lhs_spec[0] and kernel.rows is None:
        if eqn.params["batch_group_count"] != 1:
            raise RowsMixError
        arrays = [image.array, replica.whole(kernel)]
        return replica.apply(eqn, arrays, numbers.out_spec[0])
    summed = numbers.lhs_spec[1], numbers.rhs_spec[1]
    if one_group and image.rows in (None, summed[0]):
        arrays = [
            replica.true_part(replica.part(value, dim), dim)
            for value, dim in zip(values, summed, strict=True)
        ]
        return replica.apply(eqn, arrays, partial=True)
    raise RowsMixError


def reduce_sum(replica: Replica, eqn: Any, values: list[Value]) -> list[Value]:
    """Sums over dimensions."""
    (value,) = values
    axes = eqn.params["axes"]
    if value.rows is None:
        if not value.partial:
            return replica.same(eqn, [value])
        return replica.apply(eqn, [value.array], partial=True)
    if value.rows in axes:
        own = replica.true_part(value.array, value.rows)
        return replica.apply(eqn, [own], partial=True)
    return replica.apply(eqn, [value.array], _left(value.rows, axes))


def extremes(name: str) -> Any:
    """The rule of a reduction that replicas can go on with.

    Args:
        name: `"max"` or `"min"`.
    """

    def rule(replica: Replica, eqn: Any, values: list[Value]) -> list[Value]:
        value, axes = values[0], eqn.params["axes"]
        if value.rows is None:
            return replica.same(eqn, values)
        if value.rows not in axes:
            return replica.apply(eqn, [value.array], _left(value.rows, axes))
        dtype = value.array.dtype
        if eqn.primitive.name in ("reduce_or", "reduce_and") and dtype != jnp.bool_:
            raise RowsMixError  # Bits of whole numbers.
        true = replica.true_part(value.array, value.rows, _least(dtype, name))
        return [Value(_over_replicas(replica.apply(eqn, [true])[0].array, name))]

    return rule


def _over_replicas(own: Any, name: str) -> Any:
    """The extreme of what the replicas have."""
    over_all = lax.pmax if name == "max" else lax.pmin
    if own.dtype == jnp.bool_:
        return over_all(own.astype("int32"), REPLICA_AXIS).astype("bool")
    if not jnp.issubdtype(own.dtype, jnp.inexact):
        return over_all(own, REPLICA_AXIS)
    # XLA for CPUs forgets NaNs.
    is_none = jnp.where(own != own, 1 if name == "max" else -1, 0).astype(own.dtype)
    found, is_none = over_all(jnp.stack([own, is_none]), REPLICA_AXIS)
    return jnp.where(is_none != 0, jnp.nan, found)


def _least(dtype: Any, name: str) -> Any:
    """What is no extreme of anything."""
    if dtype == jnp.bool_:
        return name == "min"
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.inf if name == "min" else -jnp.inf
    info = jnp.iinfo(dtype)
    return info.max if name == "min" else info.min


def over_other_dimensions(
    replica: Replica, eqn: Any, values: list[Value]
) -> list[Value]:
    """A reduction over dimensions that are not the rows'."""
    dim = common_rows(values)
    if dim is None:
        return replica.same(eqn, values)
    axes = eqn.params.get("axes", eqn.params.get("dimensions"))
    if axes is None or dim in axes:
        raise RowsMixError
    parts = [replica.part_or_one(value, dim) for value in values]
    return replica.apply(eqn, parts, _left(dim, axes))


def _bilinear(replica: Replica, eqn: Any, sides: list[Value]) -> list[Value]:
    """A product of values that are not divided: of a sum and a whole value a sum."""
    if sum(value.partial for value in sides) == 1:
        return replica.apply(eqn, [value.array for value in sides], partial=True)
    return replica.same(eqn, sides)


def _left(dim: int, axes: Sequence[int]) -> int:
    """Where a dimension is after others are gone."""
    return dim - sum(axis < dim for axis in axes)
