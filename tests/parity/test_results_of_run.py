"""How results are put together and taken apart, against TensorFlow: `run`, local
results, values from a function.
"""

import jax.numpy as jnp
import keras

import keras_distribute as kd

from .comparing import (
    as_run_returns,
    assert_same,
    check,
    check_error,
    entries,
    value_of,
)
from .differences import because
from .encoding import Marker, Pair, is_error
from .ours import encoded, mirrored

MARKER = Marker()


@entries("regroup", "name")
def test_regrouped_result(entry):
    strategy = mirrored(entry["replicas"])
    with strategy.scope():
        variable = keras.Variable(3.0, aggregation="mean")
        on_read = keras.Variable(3.0, synchronization="on_read", aggregation="sum")

    def tensor(scale=10.0):
        return scale * jnp.asarray(
            kd.get_replica_context().replica_id_in_sync_group, "float32"
        )

    functions = {
        "tensor": tensor,
        "same tensor value": lambda: jnp.asarray(7.0),
        "none": lambda: None,
        "str": lambda: "text",
        "python int": lambda: 3,
        "python float": lambda: 2.5,
        "bool": lambda: True,
        "differing python ints": lambda: (
            kd.get_replica_context().replica_id_in_sync_group
        ),
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
        "read of a mirrored variable": lambda: variable.value,
        "on read variable": lambda: on_read,
        "all_reduce": lambda: kd.get_replica_context().all_reduce("SUM", tensor()),
    }
    expected, local = entry["result"], entry["local_results"]
    if entry["name"] == "differing python ints":
        assert because("traced replica id")
        ids = [{"int32": index} for index in range(entry["replicas"])]
        expected, local = {"PerReplica": ids}, {"tuple": ids}
    if entry["name"] == "on read variable":
        assert because("sum initial")
        values = [{"float32": 3.0}] + [{"float32": 0.0}] * (entry["replicas"] - 1)
        expected, local = {"Variable": values}, {"tuple": values}
    result = strategy.run(functions[entry["name"]])
    assert_same(encoded(strategy, result), as_run_returns(expected, entry["replicas"]))
    assert_same(encoded(strategy, strategy.experimental_local_results(result)), local)


@entries("local_results", "name")
def test_local_results(entry):
    strategy = mirrored(entry["replicas"])
    value = value_of(strategy, entry["value"])
    check(strategy, lambda: strategy.experimental_local_results(value), entry["result"])


@entries("distribute_values", "name")
def test_values_from_a_function(entry):
    strategy = mirrored(entry["replicas"])
    contexts = []

    def note(context):
        contexts.append(
            {
                "num_replicas_in_sync": context.num_replicas_in_sync,
                "replica_id_in_sync_group": context.replica_id_in_sync_group,
            }
        )
        return jnp.asarray(context.replica_id_in_sync_group)

    functions = {
        "tensor": note,
        "python float": lambda context: 2.5,
        "python int by replica": lambda context: context.replica_id_in_sync_group,
        "str": lambda context: "text",
        "none": lambda context: None,
        "dict": lambda context: {"a": jnp.asarray(1.0), "b": jnp.asarray(2)},
        "list": lambda context: [jnp.asarray(1.0), "text"],
        "not a function": None,
    }
    name, expected = entry["name"], entry["result"]
    distribute = strategy.experimental_distribute_values_from_function
    if name == "contexts":
        distribute(note)
        assert contexts == [
            {key: value for key, value in said.items() if key != "str"}
            for said in expected
        ]
    elif name == "defaults":
        context = kd.experimental.ValueContext()
        assert (context.replica_id_in_sync_group, context.num_replicas_in_sync) == (
            0,
            1,
        )
    elif name == "in run":
        assert because("values in run")
        check_error(
            lambda: strategy.run(lambda: distribute(note)), {"error": "RuntimeError"}
        )
    elif name.startswith("python"):
        assert because("numbers become arrays")
        dtype = "float32" if name == "python float" else "int32"
        expected = {
            "PerReplica": [
                {dtype: component["python"]} for component in expected["PerReplica"]
            ]
        }
        assert_same(encoded(strategy, distribute(functions[name])), expected)
    elif is_error(expected):
        check_error(lambda: distribute(functions[name]), expected)
    else:
        assert_same(encoded(strategy, distribute(functions[name])), expected)
