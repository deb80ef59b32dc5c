"""Records what variables hold after reads and assignments, for every synchronization,
aggregation and context.
"""

from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from ..encoding import JSON, is_error
from ..scenarios.side import scoped
from ..scenarios.variables import OPERATIONS, create, operate
from ..scenarios.variables import creation as made
from . import session
from .session import Entry, encoded, mirrored, read, replica_id, result_of, results

AGGREGATIONS = ("NONE", "SUM", "MEAN", "ONLY_FIRST_REPLICA")


def variables(replicas: int) -> Iterator[Entry]:
    """One entry per synchronization, aggregation and context, with what each operation
    did.

    A variable starts at 10. In a replica the operand is 1, 2, 3 or 5 by replica,
    elsewhere 8. Before a read, and before everything done to a variable that is
    synchronized on read, each replica has added its operand, where it can ("prepared").
    "inside" is what each replica, or the update function, reads after the operation.
    """
    for synchronization in (
        ("AUTO", "ON_WRITE", "ON_READ", "NONE")
        if replicas == 2
        else ("ON_WRITE", "ON_READ")
    ):
        for aggregation in AGGREGATIONS:
            common = {"synchronization": synchronization, "aggregation": aggregation}
            if synchronization == "NONE":
                yield {
                    **common,
                    "created": result_of(
                        lambda common=common: create(
                            session, mirrored(replicas), **common
                        )
                    ),
                }
                continue
            for context in ("replica", "cross-replica", "update"):
                operations = {
                    operation: _did(replicas, common, context, operation)
                    for operation in OPERATIONS
                }
                yield {**common, "context": context, **operations}


def _did(
    replicas: int, arguments: dict[str, str], context: str, operation: str
) -> dict[str, JSON]:
    strategy = mirrored(replicas)
    variable = create(session, strategy, **arguments)

    def inside(*does: str) -> JSON:
        return result_of(lambda: operate(session, strategy, variable, *does))

    def components() -> list[float]:
        return [float(x) for x in strategy.experimental_local_results(variable)]

    prepared = {}
    if arguments["synchronization"] == "ON_READ":
        inside("replica", "assign_add")
        prepared = {"prepared": components()}
    said = {**prepared, "inside": _short(inside(context, operation))}
    value = result_of(lambda: scoped(strategy, lambda: read(variable)))
    return said | {"components": components(), "value": _short(value)}


def _short(result: JSON) -> JSON:
    """Floats as bare numbers: everything in this topic is a float32 scalar."""
    if result is None or is_error(result):
        return result
    tag, content = next(iter(result.items()))
    if tag == "float32":
        return content
    return {tag: [_short(component) for component in content]}


def creation(replicas: int) -> Iterator[Entry]:
    """What comes out of creating variables where it is unusual: in a replica, with
    defaults, with bad arguments.
    """
    strategy = mirrored(replicas)
    yield from results(made(session, strategy))
    summed = create(session, strategy, "ON_WRITE", "SUM")
    kept: list[Any] = []

    def created_in_run() -> Any:
        if len(kept) < replicas:
            kept.append(tf.Variable(1.0 + replica_id()))
        return kept[-1].read_value()

    def assign_number() -> Any:
        summed.assign(2.0)
        return summed.read_value()

    yield {"name": "in run", "result": result_of(lambda: strategy.run(created_in_run))}
    yield {
        "name": "python number assigned in run",
        "result": result_of(lambda: strategy.run(assign_number)),
    }
    yield {
        "name": "outside, is_distributed",
        "result": encoded(type(tf.Variable(1.0)).__name__ != "MirroredVariable"),
    }
