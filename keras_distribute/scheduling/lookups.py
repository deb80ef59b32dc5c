"""Tables that a traced function only looks rows up in: the same function of those rows
alone.

A step of a recommender reads some thousand rows of a table of millions, and the
gradient of all others is zero. So the function is made anew for a table of the rows
that one call takes at most; which ones those are, a second function says.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from keras_distribute.devices.jaxprs import evaluated, inlined, part_of
from keras_distribute.scheduling.row_rules import (
    BY_ELEMENT,
    Rows,
    Rule,
    Source,
    Table,
    WholeError,
    is_zero,
    plain,
    source_of,
)

_SAME_ROWS = ("convert_element_type", "copy", "copy_p", "stop_gradient")


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
        except WholeError as error:
            lookups.refuse(error.table, error.why)


class _Lookups:
    """The lookups of a program without calls."""

    def __init__(
        self, program: core.ClosedJaxpr, gradients: dict[int, int | None]
    ) -> None:
        self._program, self._gradients = program, gradients
        self.sources: dict[int, list[Source]] = {}
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
            found: dict[int, list[Source]] = {}
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
                    source = source_of(eqn)
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
            if owner is not None and owner >= 0 and eqn.primitive.name in BY_ELEMENT:
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
            given[table.index] = Rows(table.index, given[table.index], None)
        rule = Rule(self._owners, {t.index: t for t in tables}, places)
        outputs = evaluated(self._program, given, rule)
        results: list[Any] = []
        for i, output in enumerate(outputs):
            owner = self._owners.get(self._program.jaxpr.outvars[i])
            if not isinstance(output, Rows):
                if owner in self.sources and self._gradients[owner] == i:
                    raise WholeError(owner, "its gradient is not that of lookups")
                results.append(plain(output))
            elif self._gradients[output.table] == i and is_zero(output.rest):
                results.append(output.value)
            else:
                raise WholeError(output.table, "the function returns all of it")
        return results


def _checked(ids: Any, source: Source, rows: int) -> Any:
    """The ids in one row, with -1 for those that are not in the table."""
    ids = jnp.asarray(ids, np.int32).reshape(-1)
    if source.clips:
        return jnp.clip(ids, 0, rows - 1)
    return jnp.where((ids >= 0) & (ids < rows), ids, -1)
