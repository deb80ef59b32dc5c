"""`strategy.extended` against TensorFlow."""

import jax.numpy as jnp
import keras

from .comparing import assert_same, check, check_error, entries, value_of
from .differences import because
from .encoding import encode
from .ours import encoded, mirrored

OWN = [1.0, 2.0, 3.0, 5.0]
PAIRS = [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]]


def per_replica(strategy, components):
    return value_of(
        strategy,
        {"PerReplica": [encode(jnp.asarray(component)) for component in components]},
    )


def summed(strategy):
    with strategy.scope():
        return keras.Variable(10.0, aggregation="sum")


def add(variable, amount):
    variable.assign_add(amount)
    return variable.value


@entries(
    "extended",
    "name",
    where=lambda entry: "update" not in entry["name"] and "reduce" not in entry["name"],
)
def test_devices_and_containers(entry):
    strategy = mirrored(entry["replicas"])
    ext, variable, outside = strategy.extended, summed(strategy), keras.Variable(10.0)
    component = strategy.experimental_local_results(variable)[-1]
    results = {
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
    expected = entry["result"]
    if entry["name"] == "value_container of component":
        assert because("no component objects")
        expected = False
    assert results[entry["name"]]() == expected


@entries("extended", "name", "op", where=lambda entry: "reduce" in entry["name"])
def test_reduce_to(entry):
    strategy, op, expected = (
        mirrored(entry["replicas"]),
        entry.get("op"),
        entry["result"],
    )
    ext, variable, own = strategy.extended, summed(strategy), per_replica(strategy, OWN)
    calls = {
        "reduce_to variable": lambda: ext.reduce_to(op, own, variable),
        "reduce_to device": lambda: ext.reduce_to(op, own, ext.parameter_devices[0]),
        "reduce_to plain": lambda: ext.reduce_to(op, 3.0, variable),
        "batch_reduce_to": lambda: ext.batch_reduce_to(
            op, [(own, variable), (per_replica(strategy, PAIRS), variable)]
        ),
        "batch_reduce_to nothing": lambda: ext.batch_reduce_to("SUM", []),
        "reduce_to in run": lambda: strategy.run(
            lambda: ext.reduce_to(op, jnp.asarray(1.0), variable)
        ),
    }
    if entry["name"] == "batch_reduce_to nothing":
        assert because("nothing to reduce")
        expected = {"list": []}
    elif entry["name"] == "reduce_to device" and "float32" in expected:
        assert because("no single destination")
        expected = {"Mirrored": [expected] * entry["replicas"]}
    elif entry["name"] == "reduce_to plain" and "python" in expected:
        assert because("numbers become arrays")
        expected = {"float32": expected["python"]}
    elif entry["replicas"] == 1 and entry["name"] in (
        "reduce_to variable",
        "batch_reduce_to",
    ):
        assert because("one replica")
        expected = _mirrored(expected)
    elif entry["name"] == "reduce_to in run":
        check_error(calls[entry["name"]], expected)
        return
    with strategy.scope():
        check(strategy, calls[entry["name"]], expected)


def _mirrored(expected):
    """TensorFlow's bare values of one replica as Mirrored."""
    return (
        {"list": [_mirrored(item) for item in expected["list"]]}
        if "list" in expected
        else {"Mirrored": [expected]}
    )


@entries(
    "extended",
    "name",
    "group",
    where=lambda entry: entry["name"] in ("update plain", "update per replica"),
)
def test_update(entry):
    strategy = mirrored(entry["replicas"])
    variable = summed(strategy)
    amount = 2.0 if entry["name"] == "update plain" else per_replica(strategy, OWN)

    def call():
        with strategy.scope():
            return strategy.extended.update(
                variable, add, args=(amount,), group=entry["group"]
            )

    if entry["name"] == "update per replica" and entry["replicas"] > 1:
        assert because("none aggregation")
        check_error(call, {"error": "ValueError"})
        assert float(variable.value) == 10.0
        return
    result = call()
    if not entry["group"]:
        assert_same(encoded(strategy, result), entry["result"])
    assert_same(
        encoded(strategy, strategy.experimental_local_results(variable)), entry["after"]
    )


@entries(
    "extended",
    "name",
    where=lambda entry: entry["name"].startswith("update ") and "group" not in entry,
)
def test_update_elsewhere(entry):
    strategy = mirrored(entry["replicas"])
    ext, variable, outside = strategy.extended, summed(strategy), keras.Variable(10.0)
    calls = {
        "update returns a dict": lambda: ext.update(
            variable, lambda v: {"a": v.value + 1.0, "b": v.value + 2.0}, group=False
        ),
        "update outside scope": lambda: ext.update(variable, add, (1.0,), group=False),
        "update of another's variable": lambda: ext.update(
            outside, add, (1.0,), group=False
        ),
    }
    check(strategy, calls[entry["name"]], entry["result"])
