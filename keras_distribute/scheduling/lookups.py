"""Tables that a traced function only looks rows up in: the same function of those rows
alone.

A step of a recommender reads some thousand rows of a table of millions, and the
gradient of all others is zero. So the function is made anew for a table of the rows
that one call takes at most; which ones those are, a second function says.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.lax import GatherScatterMode

from keras_distribute.run.jaxprs import bound, evaluated, inlined, part_of

_BY_ELEMENT = (
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
_SAME_ROWS = ("convert_element_type", "copy", "copy_p", "stop_gradient")


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


@dataclasses.dataclass(frozen=True)
class Looked:
    """A program of the rows that it looks up.

    Attributes:
        program: Takes for each table `size` rows in the place of all, and after the
            other inputs for each table an array `(size,)`: the place of each id among
            those rows, or `size` for one that is not in the table. Gradients are of
            those rows.
        ids: From all inputs of the first program to the ids that it looks up: for each
            table an array `(size,)`, -1 for one that is not in the table.
        needed: The inputs that `ids` depends on.
        tables: In the order of the program's inputs.
        whole: Why other tables are read as a whole, by their indices.
    """

    program: core.ClosedJaxpr
    ids: Callable[..., list[Any]]
    needed: list[int]
    tables: list[Table]
    whole: dict[int, str]


def by_rows(
    program: core.ClosedJaxpr,
    tables: Mapping[int, int | None],
    known: Collection[int],
    refused: Callable[[int], str | None],
) -> Looked:
    """Makes a program look up rows wherever it can.

    Args:
        program: The traced function.
        tables: The indices of inputs that may be tables, each with the index of its
            gradient among the outputs.
        known: The inputs that the worker has before it asks the servers.
        refused: Why a table that is looked up is wanted as a whole; `None` if not.
    """
    flat = inlined(program) if tables else program
    lookups = _Lookups(flat, dict(tables))
    while True:
        lookups.find(known, refused)
        try:
            if not lookups.sources:
                return Looked(program, lambda *_: [], [], [], lookups.whole)
            return lookups.made()
        except _WholeError as error:
            lookups.refuse(error.table, error.why)


class _WholeError(Exception):
    """A table that more is done with than looking up its rows."""

    def __init__(self, table: int, why: str) -> None:
        super().__init__(why)
        self.table, self.why = table, why


@dataclasses.dataclass(frozen=True)
class _Source:
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


@dataclasses.dataclass(frozen=True)
class _Rows:
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
class _Same:
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


class _Lookups:
    """The lookups of a program without calls."""

    def __init__(
        self, program: core.ClosedJaxpr, gradients: dict[int, int | None]
    ) -> None:
        self._program, self._gradients = program, gradients
        self.sources: dict[int, list[_Source]] = {}
        self.whole: dict[int, str] = {}
        self._owners: dict[Any, int] = {}

    def refuse(self, table: int, why: str) -> None:
        """Takes a table as a whole from now on."""
        del self._gradients[table]
        self.whole[table] = why

    def find(
        self, known: Collection[int], refused: Callable[[int], str | None]
    ) -> None:
        """Finds by which ids each table is looked up."""
        jaxpr = self._program.jaxpr
        while True:
            self._owners = self._owners_of_gradients()
            found: dict[int, list[_Source]] = {}
            reads = {jaxpr.invars[table]: table for table in self._gradients}
            for eqn in jaxpr.eqns:
                name, first = eqn.primitive.name, eqn.invars[0] if eqn.invars else None
                if isinstance(first, core.Literal):
                    continue
                if name in _SAME_ROWS and first in reads:
                    reads[eqn.outvars[0]] = reads[first]
                table = reads.get(first) if name == "gather" else None
                if name == "scatter-add":
                    table = self._owners.get(eqn.outvars[0])
                if table is not None:
                    source = _source(eqn)
                    sources = found.setdefault(table, [])
                    if source not in sources:
                        sources.append(source)
            self.sources = {t: found[t] for t in sorted(found)}
            reasons = {t: self._reason(t, known) or refused(t) for t in found}
            if not any(reasons.values()):
                return
            for table, why in reasons.items():
                if why:
                    self.refuse(table, why)

    def _reason(self, table: int, known: Collection[int]) -> str | None:
        """Why a table is no table of rows."""
        sources = self.sources[table]
        rows = self._program.jaxpr.invars[table].aval.shape[0]
        if sum(source.size for source in sources) >= rows:
            return "it has no more rows than a step looks up"
        _, needed = part_of(self._program, [source.variable for source in sources])
        if not set(needed) <= set(known):
            return "its ids depend on other variables"
        return None

    def _owners_of_gradients(self) -> dict[Any, int]:
        """The arrays of which the gradient of a table is made, each by its table."""
        jaxpr = self._program.jaxpr
        owners: dict[Any, int] = {}

        def take(atom: Any, table: int) -> None:
            shape = jaxpr.invars[table].aval.shape
            if isinstance(atom, core.Literal) or atom.aval.shape != shape:
                return
            # Of an array that two gradients are made of, no table is looked up.
            owners[atom] = table if owners.get(atom, table) == table else -1

        for table, output in self._gradients.items():
            if output is not None:
                take(jaxpr.outvars[output], table)
        for eqn in reversed(jaxpr.eqns):
            owner = owners.get(eqn.outvars[0]) if eqn.outvars else None
            if owner is not None and owner >= 0 and eqn.primitive.name in _BY_ELEMENT:
                for atom in eqn.invars:
                    take(atom, owner)
        return {atom: table for atom, table in owners.items() if table >= 0}

    def made(self) -> Looked:
        """The program of rows, and that of ids."""
        jaxpr = self._program.jaxpr
        tables = [
            Table(t, jaxpr.invars[t].aval.shape[0], sum(s.size for s in sources))
            for t, sources in self.sources.items()
        ]
        shapes = [
            jax.ShapeDtypeStruct(a.shape, a.dtype) for a in self._program.in_avals
        ]
        for table in tables:
            own = shapes[table.index]
            shape = (table.size, *own.shape[1:])
            shapes[table.index] = jax.ShapeDtypeStruct(shape, own.dtype)
        places = [jax.ShapeDtypeStruct((table.size,), np.int32) for table in tables]
        program = jax.make_jaxpr(lambda *inputs: self._run(tables, inputs))(
            *shapes, *places
        )
        sources = [s.variable for found in self.sources.values() for s in found]
        alone, needed = part_of(self._program, sources)
        return Looked(program, self._ids(alone), needed, tables, self.whole)

    def _ids(self, alone: core.ClosedJaxpr) -> Callable[..., list[Any]]:
        tables = [
            (self._program.jaxpr.invars[t].aval.shape[0], sources)
            for t, sources in self.sources.items()
        ]

        def ids(*inputs: Any) -> list[Any]:
            found = iter(evaluated(alone, inputs))
            return [
                jnp.concatenate([_checked(next(found), s, rows) for s in sources])
                for rows, sources in tables
            ]

        return ids

    def _run(self, tables: Sequence[Table], inputs: Sequence[Any]) -> list[Any]:
        """The program, traced with rows."""
        places: dict[Any, Any] = {}
        given = list(inputs)
        for table in reversed(tables):
            place, start = given.pop(), 0
            for source in self.sources[table.index]:
                own = place[start : start + source.size]
                places[table.index, source] = own.reshape(source.variable.aval.shape)
                start += source.size
        for table in tables:
            given[table.index] = _Rows(table.index, given[table.index], None)
        rule = _Rule(self._owners, {t.index: t for t in tables}, places)
        outputs = evaluated(self._program, given, rule)
        results: list[Any] = []
        for i, output in enumerate(outputs):
            owner = self._owners.get(self._program.jaxpr.outvars[i])
            if not isinstance(output, _Rows):
                if owner in self.sources and self._gradients[owner] == i:
                    raise _WholeError(owner, "its gradient is not that of lookups")
                results.append(_plain(output))
            elif self._gradients[output.table] == i and _is_zero(output.rest):
                results.append(output.value)
            else:
                raise _WholeError(output.table, "the function returns all of it")
        return results


@dataclasses.dataclass(frozen=True)
class _Rule:
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
        if name == "gather" and isinstance(given[0], _Rows):
            return [self._gathered(eqn, given)]
        if name == "scatter-add" and owner is not None and owner in self.tables:
            return [self._scattered(eqn, given, owner)]
        if name == "broadcast_in_dim" and not isinstance(given[0], _Rows | _Same):
            return [self._broadcast(eqn, given)]
        if name == "reduce_sum" and isinstance(given[0], _Rows):
            return [self._summed(eqn, given[0])]
        if name in _BY_ELEMENT and any(isinstance(x, _Rows | _Same) for x in given):
            return [_by_element(eqn, given)]
        _refuse_rows(eqn, given)
        return bound(eqn, list(map(_plain, given)))

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
            raise _WholeError(rows.table, "a part of it is taken that is no row")
        places = self.places[rows.table, _source(eqn)]
        return bound(eqn, [rows.value, places])[0]

    def _scattered(self, eqn: Any, given: list[Any], owner: int) -> Any:
        numbers = eqn.params["dimension_numbers"]
        zeros = given[0]
        is_lookup = (
            isinstance(zeros, _Same)
            and _is_zero(zeros.element)
            and tuple(numbers.inserted_window_dims) == (0,)
            and tuple(numbers.scatter_dims_to_operand_dims) == (0,)
            and not numbers.operand_batching_dims
        )
        if not is_lookup or isinstance(given[2], _Rows):
            raise _WholeError(owner, "its gradient is not that of lookups")
        size = self.tables[owner].size
        own = jnp.broadcast_to(zeros.row, (size, *zeros.row.shape[1:]))
        places = self.places[owner, _source(eqn)]
        value = bound(eqn, [own, places, _plain(given[2])])[0]
        return _Rows(owner, value, np.zeros((), value.dtype))

    def _broadcast(self, eqn: Any, given: list[Any]) -> Any:
        shape, own = eqn.outvars[0].aval.shape, eqn.invars[0].aval.shape
        at = list(eqn.params["broadcast_dimensions"])
        is_same = 0 not in at or own[at.index(0)] == 1
        lengths = {table.rows for table in self.tables.values()}
        if not shape or shape[0] not in lengths or not is_same or len(given) > 1:
            return bound(eqn, given)[0]
        row = jax.lax.broadcast_in_dim(given[0], (1, *shape[1:]), at)
        return _Same(row, shape[0], _constant(given[0]))

    def _summed(self, eqn: Any, rows: _Rows) -> Any:
        if 0 not in eqn.params["axes"] or not _is_zero(rows.rest):
            raise _WholeError(rows.table, "all its rows are summed")
        return bound(eqn, [rows.value])[0]


def _by_element(eqn: Any, given: list[Any]) -> Any:
    """What an operation makes of each element, of rows and of arrays of equal rows."""
    tables = {x.table for x in given if isinstance(x, _Rows)}
    sames = {x.rows for x in given if isinstance(x, _Same)}
    shape = eqn.outvars[0].aval.shape
    fits = all(
        isinstance(x, _Rows | _Same) or not np.ndim(x) or np.shape(x)[0] == 1
        for x in given
    )
    if len(tables) > 1 or len(sames) > 1 or not fits:
        _refuse_rows(eqn, given)
        return bound(eqn, list(map(_plain, given)))[0]
    size = next((x.value.shape[0] for x in given if isinstance(x, _Rows)), 1)

    def own(x: Any) -> Any:
        value = x.value if isinstance(x, _Rows) else x
        value = value.row if isinstance(value, _Same) else value
        if not np.ndim(value):
            return value
        return jnp.broadcast_to(value, (size, *shape[1:]))

    value = bound(eqn, list(map(own, given)))[0]
    rest = _rest(eqn, given)
    if tables:
        return _Rows(tables.pop(), value, rest)
    return _Same(value, sames.pop(), rest)


def _rest(eqn: Any, given: Sequence[Any]) -> Any:
    """The result of an operation for elements that are known; `None` where one that
    matters is not.
    """
    elements = [
        x.rest
        if isinstance(x, _Rows)
        else x.element
        if isinstance(x, _Same)
        else _constant(x)
        for x in given
    ]
    dtype = eqn.outvars[0].aval.dtype
    name = eqn.primitive.name
    if name == "mul" and any(map(_is_zero, elements)):
        return np.zeros((), dtype)
    if name == "div" and _is_zero(elements[0]):
        return np.zeros((), dtype)
    if any(element is None for element in elements):
        return None
    with jax.ensure_compile_time_eval():
        return np.asarray(bound(eqn, list(map(jnp.asarray, elements)))[0])


def _constant(value: Any) -> Any:
    """The element of a literal; `None` for what is computed."""
    known = isinstance(value, np.ndarray | np.generic | int | float | bool)
    return np.asarray(value) if known and not np.ndim(value) else None


def _is_zero(element: Any) -> bool:
    return element is not None and not np.any(element)


def _plain(value: Any) -> Any:
    return value.whole if isinstance(value, _Same) else value


def _refuse_rows(eqn: Any, given: Sequence[Any]) -> None:
    for value in given:
        if isinstance(value, _Rows):
            raise _WholeError(value.table, f"all of it is read, by {eqn.primitive}")


def _source(eqn: Any) -> _Source:
    mode = GatherScatterMode.from_any(eqn.params["mode"])
    # Of ids that are promised to be right XLA clips those of a gather, and drops those
    # of a scatter.
    promised = mode == GatherScatterMode.PROMISE_IN_BOUNDS
    clips = mode == GatherScatterMode.CLIP or (
        promised and eqn.primitive.name == "gather"
    )
    return _Source(eqn.invars[1], clips)


def _checked(ids: Any, source: _Source, rows: int) -> Any:
    """The ids in one row, with -1 for those that are not in the table."""
    ids = jnp.asarray(ids, np.int32).reshape(-1)
    if source.clips:
        return jnp.clip(ids, 0, rows - 1)
    return jnp.where((ids >= 0) & (ids < rows), ids, -1)
