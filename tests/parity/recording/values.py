"""Records how results of `run` are put together, what a ValueContext says, and what
`strategy.extended` answers.
"""

from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from ..encoding import JSON
from ..scenarios import values
from . import session
from .session import Entry, encoded, mirrored, per_replica, result_of, results


def regroup(replicas: int) -> Iterator[Entry]:
    """What `run` returns for each kind of result, and its local results."""
    strategy = mirrored(replicas)
    for name, fn in values.results_of_run(session, strategy).items():
        value: list[Any] = []
        yield {
            "name": name,
            "result": result_of(
                lambda fn=fn, value=value: value.append(strategy.run(fn)) or value[0]
            ),
            "local_results": encoded(strategy.experimental_local_results(value[0]))
            if value
            else None,
        }


def local_results(replicas: int) -> Iterator[Entry]:
    """`experimental_local_results` of values that no `run` returned."""
    strategy = mirrored(replicas)
    for name, value in {
        "plain tensor": tf.constant(2.0),
        "python int": 3,
        "none": None,
        "list": [tf.constant(1.0), tf.constant(2.0)],
        "dict": {"a": tf.constant(1.0)},
        "per replica": per_replica(strategy, [1.0, 2.0, 3.0, 4.0]),
    }.items():
        result = result_of(
            lambda value=value: strategy.experimental_local_results(value)
        )
        yield {"name": name, "value": encoded(value), "result": result}


def distribute_values(replicas: int) -> Iterator[Entry]:
    """`experimental_distribute_values_from_function`: its context and its results."""
    strategy = mirrored(replicas)
    distribute = strategy.experimental_distribute_values_from_function
    contexts: list[JSON] = []

    def note(context: tf.distribute.experimental.ValueContext) -> None:
        public = [name for name in dir(context) if not name.startswith("_")]
        contexts.append(
            {name: getattr(context, name) for name in public} | {"str": str(context)}
        )

    functions = values.functions_of_values(session)
    for name, fn in functions.items():
        yield {"name": name, "result": result_of(lambda fn=fn: distribute(fn))}
    distribute(note)
    yield {"name": "contexts", "result": contexts}
    in_run = result_of(lambda: strategy.run(lambda: distribute(functions["tensor"])))
    yield {"name": "in run", "result": in_run}
    yield {
        "name": "defaults",
        "result": {"str": str(tf.distribute.experimental.ValueContext())},
    }


def extended(replicas: int) -> Iterator[Entry]:
    """`strategy.extended`: containers, devices, reductions to somewhere, updates."""
    strategy = mirrored(replicas)
    for name, call in values.containers(session, strategy).items():
        yield {"name": name, "result": call()}
    yield {
        "name": "batch_reduce_to nothing",
        "result": result_of(lambda: strategy.extended.batch_reduce_to("SUM", [])),
    }
    for op in ("SUM", "MEAN"):
        for entry in results(values.reductions(session, strategy, op)):
            yield {"name": entry["name"], "op": op, "result": entry["result"]}
    for group in (True, False):
        for name in ("update plain", "update per replica"):
            variable = values.summed(session, strategy)
            call = values.updates(session, strategy, variable, group)[name]
            result = result_of(call)
            yield {
                "name": name,
                "group": group,
                "result": None if group else result,
                "after": encoded(strategy.experimental_local_results(variable)),
            }
    yield from results(values.updates_elsewhere(session, strategy))
