"""Products of rows and a matrix of which each replica has a part.

Where all rows of a batch have far fewer elements than the matrix, these travel, not
the matrix. Of one whose columns are divided each replica multiplies all rows by its own
columns, and sends every other one the columns of that one's rows; of one that is
divided along what is summed, it multiplies the part of all rows that is summed with its
own, and the sum over the replicas is parted among them. The gradient of a part needs
the same rows again, and no replica has a whole one.

Known as tensor parallelism (Shoeybi et al., 2019, https://arxiv.org/abs/1909.08053);
GSPMD chooses it, too, for weights that are divided (Xu et al., 2021,
https://arxiv.org/abs/2105.04663).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from keras_distribute.devices.by_rows.values import Replica, Value, are_few


def of_part(
    replica: Replica, eqn: Any, side: int, rows: Value, matrix: Value
) -> list[Value] | None:
    """The product of each replica's rows, from the parts of a matrix.

    Args:
        eqn: A product of two arrays.
        side: On which side the rows are: 0 or 1.
        rows: A part of a dimension that is neither summed nor common.
        matrix: Whole, with the part that it was made from.

    Returns:
        What each replica has of it; `None` where the matrix itself is to travel.
    """
    (contracted, batched) = eqn.params["dimension_numbers"]
    if batched[0]:
        return None
    assert rows.rows is not None
    dim, part = next(iter(matrix.parts.items()))
    product = eqn.outvars[0].aval
    place = place_of_free(eqn, side, rows.rows)
    given = rows.array.size * replica.count
    if dim not in contracted[1 - side]:
        moved = given + product.size // replica.count
        if not are_few(moved, matrix.array.size):
            return None
        every = replica.gathered(rows.array, rows.rows)
        (own,) = replica.apply(eqn, ordered(side, every, part))
        columns = place_of_free(eqn, 1 - side, dim)
        return [Value(replica.exchanged(own.array, place, columns), place)]
    summed = contracted[side][contracted[1 - side].index(dim)]
    wide = product.dtype
    if jnp.issubdtype(wide, jnp.floating):  # What replicas add up is not rounded twice.
        wide = jnp.promote_types(wide, "float32")
    width = wide.itemsize // product.dtype.itemsize
    moved = product.size * width + given // replica.count
    if not are_few(moved, matrix.array.size):
        return None
    own = replica.exchanged(rows.array, summed, rows.rows)
    (addend,) = replica.apply(
        eqn, ordered(side, own, part), preferred_element_type=wide
    )
    total = replica.scattered(addend.array, place)
    return [Value(total.astype(product.dtype), place)]


@dataclasses.dataclass(frozen=True)
class ProductOfRows:
    """A product that sums over rows: the gradient of a matrix.

    Args:
        eqn: A product of two arrays.
        arrays: What a replica has of them.
        dims: The dimension of each that is the rows'.
    """

    eqn: Any
    arrays: tuple[Any, Any]
    dims: tuple[int, int]

    def moved(self, replica: Replica, dim: int | None) -> int | None:
        """The elements of all rows on one side, and of the part's on the other."""
        side = None if dim is None else self._side(dim)
        if side is None:  # Or each replica would compute the whole product.
            return None
        divided, whole = self.arrays[side].size, self.arrays[1 - side].size
        return divided + whole * replica.count

    def part(self, replica: Replica, dim: int | None, dtype: Any) -> Any:
        """This replica's part along a dimension of the product of all rows."""
        assert dim is not None
        side = self._side(dim)
        assert side is not None
        other, split = 1 - side, free_at(self.eqn, side, dim)
        own = replica.exchanged(self.arrays[side], split, self.dims[side])
        every = replica.gathered(self.arrays[other], self.dims[other])
        (part,) = replica.apply(self.eqn, ordered(side, own, every))
        return part.array.astype(dtype)

    def _side(self, dim: int) -> int | None:
        (_, batched) = self.eqn.params["dimension_numbers"]
        if batched[0]:
            return None
        return 0 if dim < _first_free(self.eqn, 1) else 1


def ordered(side: int, own: Any, other: Any) -> list[Any]:
    """Two arrays, the first on that side: 0 or 1."""
    return [own, other] if side == 0 else [other, own]


def place_of_free(eqn: Any, side: int, dim: int) -> int:
    """Where a dimension is in a product that is neither summed nor common."""
    return _first_free(eqn, side) + _free(eqn, side).index(dim)


def free_at(eqn: Any, side: int, place: int) -> int:
    """Which dimension of that side is at a place in the product."""
    return _free(eqn, side)[place - _first_free(eqn, side)]


def _first_free(eqn: Any, side: int) -> int:
    (_, batched) = eqn.params["dimension_numbers"]
    return len(batched[0]) + (len(_free(eqn, 0)) if side == 1 else 0)


def _free(eqn: Any, side: int) -> list[int]:
    (contracted, batched) = eqn.params["dimension_numbers"]
    used = [*contracted[side], *batched[side]]
    return [dim for dim in range(eqn.invars[side].aval.ndim) if dim not in used]
