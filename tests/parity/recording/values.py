"""Records how results of `run` are put together, what a ValueContext says, and what
`strategy.extended` answers.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from ..encoding import JSON, Marker, Pair
from .session import Entry, encoded, mirrored, per_replica, replica_id, result_of

MARKER = Marker()
OWN = [1.0, 2.0, 3.0, 5.0]
PAIRS = np.arange(1, 9, dtype=np.float32).reshape(4, 2)


def regroup(replicas: int) -> Iterator[Entry]:
    """What `run` returns for each kind of result, and its local results."""
    strategy = mirrored(replicas)
    with strategy.scope():
        variable = tf.Variable(3.0, aggregation=tf.VariableAggregation.MEAN)
        on_read = tf.Variable(
            3.0,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
        )

    def tensor(scale: float = 10.0) -> tf.Tensor:
        return tf.constant(scale * replica_id())

    results: dict[str, Any] = {
        "tensor": tensor,
        "same tensor value": lambda: tf.constant(7.0),
        "none": lambda: None,
        "str": lambda: "text",
        "python int": lambda: 3,
        "python float": lambda: 2.5,
        "bool": lambda: True,
        "differing python ints": replica_id,
        "same object": lambda: MARKER,
        "list": lambda: [tensor(), tensor(2.0)],
        "tuple": lambda: (tensor(), None),
        "empty tuple": lambda: (),
        "empty dict": dict,
        "dict": lambda: {"a": tensor(), "b": "text", "c": 3},
        "named tuple": lambda: Pair(tensor(), {"x": tensor(2.0)}),
        "nested": lambda: {
            "a": [tensor(), (tensor(2.0), None)],
            "b": Pair("text", [1, tensor()]),
        },
        "mirrored variable": lambda: variable,
        "read of a mirrored variable": lambda: variable.read_value(),
        "on read variable": lambda: on_read,
        "all_reduce": lambda: tf.distribute.get_replica_context().all_reduce(
            "SUM", tensor()
        ),
    }
    for name, fn in results.items():
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
    """`experimental_distribute_values_from_function`: what its context says and what
    comes back.
    """
    strategy = mirrored(replicas)
    contexts: list[JSON] = []

    def note(context: tf.distribute.experimental.ValueContext) -> tf.Tensor:
        public = [name for name in dir(context) if not name.startswith("_")]
        contexts.append(
            {name: getattr(context, name) for name in public} | {"str": str(context)}
        )
        return tf.constant(context.replica_id_in_sync_group)

    functions: dict[str, Any] = {
        "tensor": note,
        "python float": lambda context: 2.5,
        "python int by replica": lambda context: context.replica_id_in_sync_group,
        "str": lambda context: "text",
        "none": lambda context: None,
        "dict": lambda context: {"a": tf.constant(1.0), "b": tf.constant(2)},
        "list": lambda context: [tf.constant(1.0), "text"],
        "not a function": None,
    }
    for name, fn in functions.items():
        yield {
            "name": name,
            "result": result_of(lambda fn=fn: _distributed(strategy, fn)),
        }
    yield {"name": "contexts", "result": contexts[:replicas]}
    in_run = result_of(lambda: strategy.run(lambda: _distributed(strategy, note)))
    yield {"name": "in run", "result": in_run}
    yield {
        "name": "defaults",
        "result": {"str": str(tf.distribute.experimental.ValueContext())},
    }


def _distributed(strategy: tf.distribute.Strategy, fn: Any) -> Any:
    return strategy.experimental_distribute_values_from_function(fn)


def extended(replicas: int) -> Iterator[Entry]:
    """`strategy.extended`: containers, device lists, reductions to a destination and
    updates.
    """
    strategy = mirrored(replicas)
    ext = strategy.extended
    variable, outside = _summed(strategy), tf.Variable(10.0)
    component = strategy.experimental_local_results(variable)[-1]
    yield {"name": "len(worker_devices)", "result": len(ext.worker_devices)}
    yield {"name": "len(parameter_devices)", "result": len(ext.parameter_devices)}
    yield {"name": "num_replicas_in_sync", "result": strategy.num_replicas_in_sync}
    yield {
        "name": "created_in_scope own",
        "result": ext.variable_created_in_scope(variable),
    }
    yield {
        "name": "created_in_scope outside",
        "result": ext.variable_created_in_scope(outside),
    }
    yield {
        "name": "value_container of variable",
        "result": ext.value_container(variable) is variable,
    }
    yield {
        "name": "value_container of component",
        "result": ext.value_container(component) is variable,
    }
    yield {
        "name": "value_container of array",
        "result": ext.value_container(outside) is outside,
    }
    yield {
        "name": "batch_reduce_to nothing",
        "result": result_of(lambda: ext.batch_reduce_to("SUM", [])),
    }
    for op in ("SUM", "MEAN"):
        yield from _reductions(strategy, op)
    for group in (True, False):
        yield from _updates(strategy, group)


def _reductions(strategy: tf.distribute.Strategy, op: str) -> Iterator[Entry]:
    ext, variable, own = (
        strategy.extended,
        _summed(strategy),
        per_replica(strategy, OWN),
    )
    pairs = [(own, variable), (per_replica(strategy, PAIRS), variable)]
    calls = {
        "reduce_to variable": lambda: ext.reduce_to(op, own, variable),
        "reduce_to device": lambda: ext.reduce_to(op, own, ext.parameter_devices[0]),
        "reduce_to plain": lambda: ext.reduce_to(op, 3.0, variable),
        "batch_reduce_to": lambda: ext.batch_reduce_to(op, pairs),
    }
    for name, call in calls.items():
        with strategy.scope():
            yield {"name": name, "op": op, "result": result_of(call)}
    in_run = result_of(
        lambda: strategy.run(lambda: ext.reduce_to(op, tf.constant(1.0), variable))
    )
    yield {"name": "reduce_to in run", "op": op, "result": in_run}


def _updates(strategy: tf.distribute.Strategy, group: bool) -> Iterator[Entry]:
    ext = strategy.extended
    for name, argument in {
        "plain": 2.0,
        "per replica": per_replica(strategy, OWN),
    }.items():
        variable = _summed(strategy)
        with strategy.scope():
            result = result_of(
                lambda v=variable, a=argument: ext.update(
                    v, _add, args=(a,), group=group
                )
            )
        after = encoded(strategy.experimental_local_results(variable))
        yield {
            "name": f"update {name}",
            "group": group,
            "result": None if group else result,
            "after": after,
        }
    if not group:
        variable, outside = _summed(strategy), tf.Variable(10.0)
        calls = {
            "update returns a dict": lambda: ext.update(
                variable, lambda v: {"a": v + 1.0, "b": v + 2.0}, group=False
            ),
            "update of another's variable": lambda: ext.update(
                outside, _add, (1.0,), group=False
            ),
        }
        for name, call in calls.items():
            with strategy.scope():
                yield {"name": name, "result": result_of(call)}
        yield {
            "name": "update outside scope",
            "result": result_of(
                lambda: ext.update(variable, _add, (1.0,), group=False)
            ),
        }


def _summed(strategy: tf.distribute.Strategy) -> tf.Variable:
    with strategy.scope():
        return tf.Variable(10.0, aggregation=tf.VariableAggregation.SUM)


def _add(variable: Any, amount: Any) -> Any:
    variable.assign_add(amount)
    return variable.read_value()
