"""How results are put together and taken apart, against TensorFlow: `run`, local
results, values from a function.
"""

import keras_distribute as kd

from . import ours
from .comparing import (
    as_run_returns,
    assert_same,
    check,
    check_error,
    entries,
    value_of,
)
from .differences import because
from .encoding import is_error
from .ours import encoded, mirrored
from .scenarios import values


@entries("regroup", "name")
def test_regrouped_result(entry):
    strategy = mirrored(entry["replicas"])
    functions = values.results_of_run(ours, strategy)
    expected, local = entry["result"], entry["local_results"]
    if entry["name"] == "differing python ints":
        assert because("traced replica id")
        ids = [{"int32": index} for index in range(entry["replicas"])]
        expected, local = {"PerReplica": ids}, {"tuple": ids}
    if entry["name"] == "on read variable":
        assert because("sum initial")
        parts = [{"float32": 3.0}] + [{"float32": 0.0}] * (entry["replicas"] - 1)
        expected, local = {"Variable": parts}, {"tuple": parts}
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
    functions = values.functions_of_values(ours)
    name, expected = entry["name"], entry["result"]
    distribute = strategy.experimental_distribute_values_from_function
    if name == "contexts":
        contexts = []
        distribute(contexts.append)
        names = ("num_replicas_in_sync", "replica_id_in_sync_group")
        assert [{name: getattr(c, name) for name in names} for c in contexts] == [
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
            lambda: strategy.run(lambda: distribute(functions["tensor"])),
            {"error": "RuntimeError"},
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
