"""What a worker has to know of a program: where what it reads is, and where what it
makes goes.
"""

from __future__ import annotations

from typing import Any

from keras_distribute.remote.frames import Header
from keras_distribute.scheduling.additions import Change
from keras_distribute.scheduling.programs import Lookup, Traced
from keras_distribute.scheduling.served import Part, Served
from keras_distribute.scheduling.updates import Updates


def layout_of(
    program: Traced, served: Served, updates: Updates, num_servers: int
) -> Header:
    """The layout of a program, as plain data.

    Returns:
        `reads`: for each variable the servers and keys of its parts; `wanted`: for each
        server the keys that are read as a whole; `tables`: of each that rows are looked
        up in, its index in `reads`, how many rows at most, and its parts; `pushes`: for
        each server that is told something, the numbers of optimizers' updates, keys
        that are added to or set, and for each array the output, its rows and the table;
        `changes`: of the coordinator's variables; `divided`: the inputs with the rows
        of a batch, each with its axis; and how many of each argument.
    """
    reads = [
        [[part.server, part.key] for part in served.where(v).read]
        for v in program.reads
    ]
    looked_up = [lookup.read for lookup in program.lookups]
    wanted: list[list[int]] = [[] for _ in range(num_servers)]
    for i, parts in enumerate(reads):
        for server, key in parts if i not in looked_up else []:
            wanted[server].append(key)
    kept = {id(variable): i for i, variable in enumerate(program.kept)}
    first = len(reads) + len(program.kept) + len(program.advanced)
    return {
        "reads": reads,
        "wanted": wanted,
        "tables": [_table(lookup, served) for lookup in program.lookups],
        "pushes": _pushes(program, served, updates),
        "changes": [
            ["set" if kind is Change.SET else "add", kept.get(id(variable))]
            for kind, variable in program.changes
        ],
        "divided": [
            [first + i, axis] for i, axis in enumerate(program.axes) if axis is not None
        ],
        "num_kept": len(program.kept),
        "num_args": len(program.advanced) + program.num_args,
        "num_results": program.num_results,
        "elements": [
            [iterator.index, [[dtype, list(shape)] for dtype, shape in forms]]
            for iterator, forms in program.elements
        ],
    }


def _pushes(program: Traced, served: Served, updates: Updates) -> list[Header]:
    pushes: dict[int, Header] = {}

    def push_to(server: int) -> Header:
        empty: Header = {"updates": [], "adds": [], "sets": [], "outputs": []}
        return pushes.setdefault(server, {"server": server, **empty})

    table_of = {id(lookup.variable): t for t, lookup in enumerate(program.lookups)}
    output = program.num_results
    for optimizer, weights in program.gradients:
        sizes = [program.size_of(weight) for weight in weights]
        for server, number, parts in updates.of(optimizer, weights, sizes):
            push = push_to(server)
            push["updates"].append(number)
            push["outputs"] += [
                _rows(output + i, part, table_of.get(id(weights[i])))
                for i, part in parts
            ]
        output += len(weights)
    for manner in ("adds", "sets"):  # In the order in which a server takes them.
        for i, (kind, variable) in enumerate(program.pushed):
            if (kind is Change.SET) == (manner == "sets"):
                for part in served.where(variable).parts:
                    push = push_to(part.server)
                    push[manner].append(part.key)
                    push["outputs"].append(_rows(output + i, part))
    return [pushes[server] for server in sorted(pushes)]


def _table(lookup: Lookup, served: Served) -> Header:
    parts = served.where(lookup.variable).read
    return {
        "read": lookup.read,
        "size": lookup.size,
        "parts": [[p.server, p.key, p.start, p.stop] for p in parts],
    }


def _rows(output: int, part: Part, table: int | None = None) -> list[Any]:
    return [output, None if part.stop is None else part.start, part.stop, table]
