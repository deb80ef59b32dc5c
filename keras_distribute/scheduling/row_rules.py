"""What an operation makes of some rows of a table in the place of all, and of arrays of
equal rows.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import GatherScatterMode

from keras_distribute.devices.jaxprs import bound

BY_ELEMENT = (
    "abs",
    "add",
    "add_any",
    "convert_element_type",
    "copy",
    "copy_p",
    "div",
    "integer_pow",
    "is_finite",
    "max",
    "min",
    "mul",
    "neg",
    "select_n",
    "sign",
    "sqrt",
    "square",
    "stop_gradient",
    "sub",
)


@dataclasses.dataclass(frozen=True)
class Table:
    """A table that is looked up by rows.

    Attributes:
        index: Among the inputs of the program.
        rows: All that it has.
        size: How many a call looks up at most.
    """

    index: int
    rows: int
    size: int


class WholeError(Exception):
    """A table that more is done with than looking up its rows."""

    def __init__(self, table: int, why: str) -> None:
        super().__init__(why)
        self.table, self.why = table, why


@dataclasses.dataclass(frozen=True)
class Source:
    """Ids that a table is looked up by.

    Attributes:
        variable: Of the program.
        clips: Whether ids outside of the table mean its first or last row.
    """

    variable: Any
    clips: bool

    @property
    def size(self) -> int:
        """How many ids."""
        return math.prod(self.variable.aval.shape)


def source_of(eqn: Any) -> Source:
    mode = GatherScatterMode.from_any(eqn.params["mode"])
    # Of ids that are promised to be right XLA clips those of a gather, and drops those
    # of a scatter.
    promised = mode == GatherScatterMode.PROMISE_IN_BOUNDS
    clips = mode == GatherScatterMode.CLIP or (
        promised and eqn.primitive.name == "gather"
    )
    return Source(eqn.invars[1], clips)


@dataclasses.dataclass(frozen=True)
class Rows:
    """Some rows in the place of an array with all.

    Attributes:
        table: Whose rows.
        value: The rows.
        rest: What all elements of all other rows are; `None` if that is not known.
    """

    table: int
    value: Any
    rest: Any


@dataclasses.dataclass(frozen=True)
class Same:
    """An array of equal rows.

    Attributes:
        row: With one row.
        rows: How many it stands for.
        element: What all elements are; `None` if that is not known.
    """

    row: Any
    rows: int
    element: Any

    @property
    def whole(self) -> Any:
        """The array."""
        return jnp.broadcast_to(self.row, (self.rows, *self.row.shape[1:]))


@dataclasses.dataclass(frozen=True)
class Rule:
    """What an operation makes of rows.

    Attributes:
        owners: By what is made of lookups' gradients, the table.
        tables: By their indices.
        places: By table and source the places of the ids among the rows.
    """

    owners: Mapping[Any, int]
    tables: Mapping[int, Table]
    places: Mapping[Any, Any]

    def __call__(self, eqn: Any, given: list[Any]) -> list[Any]:
        name = eqn.primitive.name
        owner = self.owners.get(eqn.outvars[0]) if eqn.outvars else None
        if name == "gather" and isinstance(given[0], Rows):
            return [self._gathered(eqn, given)]
        if name == "scatter-add" and owner is not None and owner in self.tables:
            return [self._scattered(eqn, given, owner)]
        if name == "broadcast_in_dim" and not isinstance(given[0], Rows | Same):
            return [self._broadcast(eqn, given)]
        if name == "reduce_sum" and isinstance(given[0], Rows):
            return [self._summed(eqn, given[0])]
        if name in BY_ELEMENT and any(isinstance(x, Rows | Same) for x in given):
            return [_by_element(eqn, given)]
        _refuse_rows(eqn, given)
        return bound(eqn, list(map(plain, given)))

    def _gathered(self, eqn: Any, given: list[Any]) -> Any:
        rows = given[0]
        numbers, shape = eqn.params["dimension_numbers"], eqn.invars[0].aval.shape
        is_lookup = (
            rows.rest is None
            and tuple(numbers.collapsed_slice_dims) == (0,)
            and tuple(numbers.start_index_map) == (0,)
            and not numbers.operand_batching_dims
            and tuple(eqn.params["slice_sizes"]) == (1, *shape[1:])
        )
        if not is_lookup:
            raise WholeError(rows.table, "a part of it is taken that is no row")
        places = self.places[rows.table, source_of(eqn)]
        return bound(eqn, [rows.value, places])[0]

    def _scattered(self, eqn: Any, given: list[Any], owner: int) -> Any:
        numbers = eqn.params["dimension_numbers"]
        zeros = given[0]
        is_lookup = (
            isinstance(zeros, Same)
            and is_zero(zeros.element)
            and tuple(numbers.inserted_window_dims) == (0,)
            and tuple(numbers.scatter_dims_to_operand_dims) == (0,)
            and not numbers.operand_batching_dims
        )
        if not is_lookup or isinstance(given[2], Rows):
            raise WholeError(owner, "its gradient is not that of lookups")
        size = self.tables[owner].size
        own = jnp.broadcast_to(zeros.row, (size, *zeros.row.shape[1:]))
        places = self.places[owner, source_of(eqn)]
        value = bound(eqn, [own, places, plain(given[2])])[0]
        return Rows(owner, value, np.zeros((), value.dtype))

    def _broadcast(self, eqn: Any, given: list[Any]) -> Any:
        shape, own = eqn.outvars[0].aval.shape, eqn.invars[0].aval.shape
        at = list(eqn.params["broadcast_dimensions"])
        is_same = 0 not in at or own[at.index(0)] == 1
        lengths = {table.rows for table in self.tables.values()}
        if not shape or shape[0] not in lengths or not is_same or len(given) > 1:
            return bound(eqn, given)[0]
        row = jax.lax.broadcast_in_dim(given[0], (1, *shape[1:]), at)
        return Same(row, shape[0], _constant(given[0]))

    def _summed(self, eqn: Any, rows: Rows) -> Any:
        if 0 not in eqn.params["axes"] or not is_zero(rows.rest):
            raise WholeError(rows.table, "all its rows are summed")
        return bound(eqn, [rows.value])[0]


def _by_element(eqn: Any, given: list[Any]) -> Any:
    """What an operation makes of each element, of rows and of arrays of equal rows."""
    tables = {x.table for x in given if isinstance(x, Rows)}
    sames = {x.rows for x in given if isinstance(x, Same)}
    shape = eqn.outvars[0].aval.shape
    fits = all(
        isinstance(x, Rows | Same) or not np.ndim(x) or np.shape(x)[0] == 1
        for x in given
    )
    if len(tables) > 1 or len(sames) > 1 or not fits:
        _refuse_rows(eqn, given)
        return bound(eqn, list(map(plain, given)))[0]
    size = next((x.value.shape[0] for x in given if isinstance(x, Rows)), 1)

    def own(x: Any) -> Any:
        value = x.value if isinstance(x, Rows) else x
        value = value.row if isinstance(value, Same) else value
        if not np.ndim(value):
            return value
        return jnp.broadcast_to(value, (size, *shape[1:]))

    value = bound(eqn, list(map(own, given)))[0]
    rest = _rest(eqn, given)
    if tables:
        return Rows(tables.pop(), value, rest)
    return Same(value, sames.pop(), rest)


def _rest(eqn: Any, given: Sequence[Any]) -> Any:
    """An operation's result for known elements; `None` where one is not known."""
    elements = [
        x.rest
        if isinstance(x, Rows)
        else x.element
        if isinstance(x, Same)
        else _constant(x)
        for x in given
    ]
    dtype = eqn.outvars[0].aval.dtype
    name = eqn.primitive.name
    if name == "mul" and any(map(is_zero, elements)):
        return np.zeros((), dtype)
    if name == "div" and is_zero(elements[0]):
        return np.zeros((), dtype)
    if any(element is None for element in elements):
        return None
    with jax.ensure_compile_time_eval():
        return np.asarray(bound(eqn, list(map(jnp.asarray, elements)))[0])


def _constant(value: Any) -> Any:
    """The element of a literal; `None` for what is computed."""
    known = isinstance(value, np.ndarray | np.generic | int | float | bool)
    return np.asarray(value) if known and not np.ndim(value) else None


def is_zero(element: Any) -> bool:
    return element is not None and not np.any(element)


def plain(value: Any) -> Any:
    return value.whole if isinstance(value, Same) else value


def _refuse_rows(eqn: Any, given: Sequence[Any]) -> None:
    for value in given:
        if isinstance(value, Rows):
            raise WholeError(value.table, f"all of it is read, by {eqn.primitive}")
