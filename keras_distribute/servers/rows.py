"""Rows of tables, as workers ask for them and push their gradients.

A program takes as many rows as it looks up at most, so that it has one shape; what
travels are the distinct ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from keras_distribute.remote.frames import Array


@dataclasses.dataclass(frozen=True)
class Found:
    """The rows of a table that a call looks up.

    Attributes:
        ids: The distinct ones, sorted.
        places: Where each id that is looked up is among them; their greatest number
            for one that is not in the table.
        table: What `scheduling.layouts.layout_of` says of it.
    """

    ids: Array
    places: Array
    table: Mapping[str, Any]

    def parts(self) -> Iterator[tuple[int, int, Array]]:
        """For each part of the table its server, its key, and the rows of it."""
        for server, key, start, stop in self.table["parts"]:
            own = self._within(start, stop)
            yield server, key, self.ids[own] - start

    def padded(self, pieces: Sequence[Array]) -> Array:
        """What the program takes, from the rows of all parts."""
        first, left = pieces[0], self.table["size"] - sum(map(len, pieces))
        zeros = np.zeros((left, *first.shape[1:]), first.dtype)
        return np.concatenate([*pieces, zeros])

    def cut(self, gradient: Any, start: int, stop: int | None) -> list[Array]:
        """The ids and the gradients of the rows of one part."""
        own = self._within(start, stop)
        return [self.ids[own] - start, np.asarray(gradient)[own]]

    def _within(self, start: int, stop: int | None) -> slice:
        first = int(np.searchsorted(self.ids, start))
        last = len(self.ids) if stop is None else int(np.searchsorted(self.ids, stop))
        return slice(first, last)


def found(ids: Any, table: Mapping[str, Any]) -> Found:
    """The rows that a call looks up, from its ids, of which -1 is in no table."""
    distinct, places = np.unique(np.asarray(ids), return_inverse=True)
    places = places.reshape(-1)
    if distinct.size and distinct[0] < 0:
        distinct, places = distinct[1:], places - 1
        places = np.where(places < 0, table["size"], places)
    return Found(distinct, places.astype(np.int32), table)


def values_of(
    layout: Mapping[str, Any],
    values: Mapping[tuple[int, int], Any],
    looked_up: Sequence[Found],
) -> list[Any]:
    """What a program takes of variables.

    Args:
        layout: As `scheduling.layouts.layout_of` says.
        values: By server and key: of tables the rows that are looked up.
        looked_up: For each table.
    """
    by_read = {each.table["read"]: each for each in looked_up}
    taken: list[Any] = []
    for i, parts in enumerate(layout["reads"]):
        if i in by_read:
            parts = [(server, key) for server, key, *_ in by_read[i].table["parts"]]
            taken.append(by_read[i].padded([values[part] for part in parts]))
        else:
            taken.append(joined([values[server, key] for server, key in parts]))
    return taken


def joined(parts: Sequence[Any]) -> Any:
    """A variable, from the rows that each server has."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def pushed(
    outputs: Sequence[Any], places: Sequence[Sequence[Any]], looked_up: Sequence[Found]
) -> list[Array]:
    """What a server is told of a program's outputs: each whole, or some of its rows; of
    the gradient of a table the ids, and the gradients of those rows.
    """
    arrays: list[Array] = []
    for index, start, stop, table in places:
        if table is not None:
            arrays += looked_up[table].cut(outputs[index], start or 0, stop)
            continue
        array = np.asarray(outputs[index])
        arrays.append(array if start is None else array[start:stop])
    return arrays
