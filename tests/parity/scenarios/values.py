"""Results of `run`, values from functions, and what `strategy.extended` does."""

from collections.abc import Callable
from typing import Any

import numpy as np

from ..encoding import Marker, Pair
from .side import Calls, Side, scoped

MARKER = Marker()
OWN = [1.0, 2.0, 3.0, 5.0]
PAIRS = np.arange(1, 9, dtype=np.float32).reshape(4, 2)


def results_of_run(side: Side, strategy: Any) -> Calls:
    """Functions that return each kind of result."""
    with strategy.scope():
        variable = side.variable(3.0, aggregation="mean")
        on_read = side.variable(3.0, synchronization="on_read", aggregation="sum")

    def tensor(scale: float = 10.0) -> Any:
        return side.tensor(scale * side.replica_id())

    return {
        "tensor": tensor,
        "same tensor value": lambda: side.tensor(7.0),
        "none": lambda: None,
        "str": lambda: "text",
        "python int": lambda: 3,
        "python float": lambda: 2.5,
        "bool": lambda: True,
        "differing python ints": side.replica_id,
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
        "read of a mirrored variable": lambda: side.read(variable),
        "on read variable": lambda: on_read,
        "all_reduce": lambda: side.distribute.get_replica_context().all_reduce(
            "SUM", tensor()
        ),
    }


def functions_of_values(side: Side) -> dict[str, Callable[[Any], Any] | None]:
    """What may be given to `experimental_distribute_values_from_function`."""
    return {
        "tensor": lambda context: side.tensor(context.replica_id_in_sync_group),
        "python float": lambda context: 2.5,
        "python int by replica": lambda context: context.replica_id_in_sync_group,
        "str": lambda context: "text",
        "none": lambda context: None,
        "dict": lambda context: {"a": side.tensor(1.0), "b": side.tensor(2)},
        "list": lambda context: [side.tensor(1.0), "text"],
        "not a function": None,
    }


def summed(side: Side, strategy: Any) -> Any:
    """A variable of 10 whose updates are summed."""
    return scoped(strategy, lambda: side.variable(10.0, aggregation="sum"))


def containers(side: Side, strategy: Any) -> Calls:
    """Devices, and what belongs to what."""
    ext, variable, outside = (
        strategy.extended,
        summed(side, strategy),
        side.variable(10.0),
    )
    component = strategy.experimental_local_results(variable)[-1]
    return {
        "len(worker_devices)": lambda: len(ext.worker_devices),
        "len(parameter_devices)": lambda: len(ext.parameter_devices),
        "num_replicas_in_sync": lambda: strategy.num_replicas_in_sync,
        "created_in_scope own": lambda: ext.variable_created_in_scope(variable),
        "created_in_scope outside": lambda: ext.variable_created_in_scope(outside),
        "value_container of variable": lambda: (
            ext.value_container(variable) is variable
        ),
        "value_container of component": lambda: (
            ext.value_container(component) is variable
        ),
        "value_container of array": lambda: ext.value_container(outside) is outside,
    }


def reductions(side: Side, strategy: Any, op: str) -> Calls:
    """Reductions to a destination."""
    ext, variable = strategy.extended, summed(side, strategy)
    own, pairs = (side.per_replica(strategy, values) for values in (OWN, PAIRS))
    calls: Calls = {
        "reduce_to variable": lambda: ext.reduce_to(op, own, variable),
        "reduce_to device": lambda: ext.reduce_to(op, own, ext.parameter_devices[0]),
        "reduce_to plain": lambda: ext.reduce_to(op, 3.0, variable),
        "batch_reduce_to": lambda: ext.batch_reduce_to(
            op, [(own, variable), (pairs, variable)]
        ),
    }
    return in_scope(strategy, calls) | {
        "reduce_to in run": lambda: strategy.run(
            lambda: ext.reduce_to(op, side.tensor(1.0), variable)
        )
    }


def updates(side: Side, strategy: Any, variable: Any, group: bool) -> Calls:
    """Updates of the variable by one number, and by one for each replica."""

    def update(amount: Any) -> Any:
        return strategy.extended.update(
            variable, _adder(side), args=(amount,), group=group
        )

    return in_scope(
        strategy,
        {
            "update plain": lambda: update(2.0),
            "update per replica": lambda: update(side.per_replica(strategy, OWN)),
        },
    )


def updates_elsewhere(side: Side, strategy: Any) -> Calls:
    """Updates with another result, of another's variable, and outside of the scope."""
    update, add = strategy.extended.update, _adder(side)
    variable, outside = summed(side, strategy), side.variable(10.0)
    calls: Calls = {
        "update returns a dict": lambda: update(
            variable,
            lambda v: {"a": side.read(v) + 1.0, "b": side.read(v) + 2.0},
            group=False,
        ),
        "update of another's variable": lambda: update(
            outside, add, (1.0,), group=False
        ),
    }
    return in_scope(strategy, calls) | {
        "update outside scope": lambda: update(variable, add, (1.0,), group=False)
    }


def _adder(side: Side) -> Callable[[Any, Any], Any]:
    def add(variable: Any, amount: Any) -> Any:
        variable.assign_add(amount)
        return side.read(variable)

    return add


def in_scope(strategy: Any, calls: Calls) -> Calls:
    """The same calls, each under the strategy's scope."""
    return {
        name: lambda call=call: scoped(strategy, call) for name, call in calls.items()
    }
