"""Records what variables hold after reads and assignments, for every synchronization,
aggregation and context.
"""

from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from ..encoding import JSON, is_error
from .session import Entry, encoded, mirrored, replica_id, result_of

INITIAL = 10.0
PER_REPLICA = (1.0, 2.0, 3.0, 5.0)
COMMON = 8.0
OPERATIONS = ("read", "assign", "assign_add", "assign_sub")
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
                        lambda common=common: create(replicas, **common)
                    ),
                }
                continue
            for context in ("replica", "cross-replica", "update"):
                operations = {
                    operation: _did(replicas, common, context, operation)
                    for operation in OPERATIONS
                }
                yield {**common, "context": context, **operations}


def create(replicas: int, synchronization: str, aggregation: str) -> tf.Variable:
    """The variable under the strategy's scope."""
    with mirrored(replicas).scope():
        return tf.Variable(
            INITIAL,
            synchronization=getattr(tf.VariableSynchronization, synchronization),
            aggregation=getattr(tf.VariableAggregation, aggregation),
        )


def _did(
    replicas: int, arguments: dict[str, str], context: str, operation: str
) -> dict[str, JSON]:
    strategy = mirrored(replicas)
    variable = create(replicas, **arguments)
    prepared = {}
    if arguments["synchronization"] == "ON_READ":
        result_of(
            lambda: strategy.run(lambda: _operate(variable, "assign_add", _operand()))
        )
        prepared = {"prepared": _numbers(strategy.experimental_local_results(variable))}
    if context == "replica":
        inside = result_of(
            lambda: strategy.run(lambda: _operate(variable, operation, _operand()))
        )
    elif context == "cross-replica":
        inside = result_of(
            lambda: _in_scope(strategy, lambda: _operate(variable, operation, COMMON))
        )
    else:
        inside = result_of(
            lambda: _in_scope(
                strategy,
                lambda: strategy.extended.update(
                    variable, _operate, args=(operation, COMMON), group=False
                ),
            )
        )
    value = result_of(lambda: _in_scope(strategy, lambda: variable.read_value()))
    components = _numbers(strategy.experimental_local_results(variable))
    return {
        **prepared,
        "inside": _short(inside),
        "components": components,
        "value": _short(value),
    }


def _in_scope(strategy: tf.distribute.Strategy, fn: Any) -> Any:
    with strategy.scope():
        return fn()


def _operand() -> tf.Tensor:
    return tf.constant(
        PER_REPLICA[replica_id()]
    )  # a Python number raises AttributeError: see "python number" below


def _operate(variable: Any, operation: str, operand: Any) -> Any:
    if operation != "read":
        getattr(variable, operation)(operand)
    return variable.read_value()


def _numbers(components: Any) -> list[float]:
    return [float(component) for component in components]


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

    def in_scope(*args: Any, **options: Any) -> Any:
        return _in_scope(strategy, lambda: tf.Variable(*args, **options))

    summed = create(replicas, "ON_WRITE", "SUM")

    def assign_number() -> Any:
        summed.assign(2.0)
        return summed.read_value()

    kept: list[Any] = []

    def created_in_run() -> Any:
        if len(kept) < replicas:
            kept.append(tf.Variable(1.0 + replica_id()))
        return kept[-1].read_value()

    yield {"name": "defaults", "result": result_of(lambda: in_scope(1.0))}
    yield {
        "name": "not trainable",
        "result": result_of(lambda: in_scope(1.0, trainable=False)),
    }
    yield {"name": "integer", "result": result_of(lambda: in_scope(1))}
    yield {
        "name": "on read, trainable",
        "result": result_of(
            lambda: in_scope(
                1.0, trainable=True, synchronization=tf.VariableSynchronization.ON_READ
            )
        ),
    }
    yield {
        "name": "bad aggregation",
        "result": result_of(lambda: in_scope(1.0, aggregation="most")),
    }
    yield {
        "name": "bad synchronization",
        "result": result_of(lambda: in_scope(1.0, synchronization="later")),
    }
    yield {
        "name": "initial value by replica",
        "result": result_of(lambda: in_scope(lambda: 1.0 + _or_zero())),
    }
    yield {"name": "in run", "result": result_of(lambda: strategy.run(created_in_run))}
    yield {
        "name": "python number assigned in run",
        "result": result_of(lambda: strategy.run(assign_number)),
    }
    yield {
        "name": "outside, is_distributed",
        "result": encoded(type(tf.Variable(1.0)).__name__ != "MirroredVariable"),
    }


def _or_zero() -> float:
    context = tf.distribute.get_replica_context()
    return 0.0 if context is None else float(replica_id())
