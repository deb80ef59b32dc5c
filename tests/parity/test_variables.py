"""Variables against TensorFlow: what they hold, and read as, after each operation in
each context.
"""

import jax.numpy as jnp
import keras
import pytest

import keras_distribute as kd

from .comparing import check_error, entries, record
from .differences import because
from .encoding import decode, is_error
from .ours import encoded, mirrored

INITIAL = 10.0
PER_REPLICA = (1.0, 2.0, 3.0, 5.0)
COMMON = 8.0
OPERATIONS = ("read", "assign", "assign_add", "assign_sub")
COMBINATIONS = [
    pytest.param(entry, operation, id="-".join(
        [entry["synchronization"], entry["aggregation"], entry["context"], operation, f"{entry['replicas']} replicas"]))
    for entry in record()["variables"] if "context" in entry for operation in OPERATIONS
]  # fmt: skip


def create(entry):
    with mirrored(entry["replicas"]).scope():
        return keras.Variable(
            INITIAL,
            synchronization=entry["synchronization"].lower(),
            aggregation=entry["aggregation"].lower(),
        )


def operate(variable, operation, operand):
    if operation != "read":
        getattr(variable, operation)(operand)
    return variable.value


def operand():
    return jnp.asarray(PER_REPLICA)[kd.get_replica_context().replica_id_in_sync_group]


def components(strategy, variable):
    return [
        float(component) for component in strategy.experimental_local_results(variable)
    ]


def numbers(strategy, result):
    """One float, or one per replica."""
    if isinstance(result, kd.DistributedValues):
        result = strategy.experimental_local_results(result)
    return (
        [float(component) for component in result]
        if isinstance(result, tuple)
        else float(result)
    )


def drifts(entry, operation):
    """Whether TensorFlow lets the copies of a mirrored variable differ here."""
    return (
        entry["aggregation"] == "NONE"
        and entry["synchronization"] != "ON_READ"
        and entry["context"] == "replica"
        and operation != "read"
        and entry["replicas"] > 1
    )


def as_ours(entry, operation):
    """What the record says after `operation`, with the sums that are synchronized on
    read as ours are.
    """
    expected = dict(entry[operation])
    if entry["replicas"] == 1 and entry["context"] == "replica":
        assert because("one replica")
        expected["inside"] = {"PerReplica": [expected["inside"]]}
    if (entry["synchronization"], entry["aggregation"]) != ("ON_READ", "SUM"):
        return expected
    assert because("sum initial")

    def moved(components):
        return [x if index == 0 else x - INITIAL for index, x in enumerate(components)]

    prepared = moved(expected["prepared"])
    if operation != "assign":
        components = moved(expected["components"])
        if entry["context"] == "cross-replica":
            assert because("sum added")
            change = {"read": 0.0, "assign_add": COMMON, "assign_sub": -COMMON}[
                operation
            ]
            components = [prepared[0] + change, *prepared[1:]]
            inside = sum(components)
        else:
            inside = {"components": components}
        return {
            "prepared": prepared,
            "inside": inside,
            "components": components,
            "value": sum(components),
        }
    if entry["context"] == "cross-replica":
        assert because("sum assigned")
        expected["components"] = [COMMON] + [0.0] * (len(prepared) - 1)
    return {**expected, "prepared": prepared}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("entry", "operation"), COMBINATIONS)
def test_variable(entry, operation):
    strategy = mirrored(entry["replicas"])
    expected = as_ours(entry, operation)
    variable = create(entry)
    if "prepared" in expected:
        strategy.run(lambda: operate(variable, "assign_add", operand()))
        assert components(strategy, variable) == expected["prepared"]

    def call():
        if entry["context"] == "replica":
            return strategy.run(lambda: operate(variable, operation, operand()))
        with strategy.scope():
            if entry["context"] == "cross-replica":
                return operate(variable, operation, COMMON)
            return strategy.extended.update(
                variable, operate, args=(operation, COMMON), group=False
            )

    if drifts(entry, operation):
        assert because("none aggregation")
        check_error(call, {"error": "ValueError"})
        assert components(strategy, variable) == [INITIAL] * entry["replicas"]
        return
    inside = expected["inside"]
    if is_error(inside):
        check_error(call, inside)
    else:
        assert numbers(strategy, call()) == (
            next(iter(inside.values())) if isinstance(inside, dict) else inside
        )
    assert components(strategy, variable) == expected["components"]
    with strategy.scope():
        if is_error(expected["value"]):
            check_error(lambda: variable.value, expected["value"])
        else:
            assert float(variable.value) == expected["value"]


@pytest.mark.parametrize("entry", [entry for entry in record()["variables"] if "created" in entry],
                         ids=lambda entry: entry["aggregation"])  # fmt: skip
def test_synchronization_none_is_refused(entry):
    check_error(lambda: create(entry), entry["created"])


@entries("creation", "name")
def test_creation(entry):
    strategy = mirrored(entry["replicas"])
    name, expected = entry["name"], entry["result"]

    def in_scope(initializer, **options):
        with strategy.scope():
            return keras.Variable(initializer, **options)

    if name == "in run":
        assert because("creation in run")
        check_error(
            lambda: strategy.run(lambda: keras.Variable(1.0).value),
            {"error": "ValueError"},
            fix=False,
        )
        return
    if name == "outside, is_distributed":
        assert not isinstance(keras.Variable(1.0), kd.DistributedValues)
        assert not strategy.extended.variable_created_in_scope(keras.Variable(1.0))
        return
    if name == "python number assigned in run":
        variable = in_scope(1.0, aggregation="sum")
        strategy.run(lambda: variable.assign(2.0))
        assert because("python numbers")
        assert float(variable.value) == 2.0 * entry["replicas"]
        return
    arguments = {
        "defaults": ((1.0,), {}),
        "not trainable": ((1.0,), {"trainable": False}),
        "integer": ((1,), {"dtype": "int32"}),
        "on read, trainable": (
            (1.0,),
            {"trainable": True, "synchronization": "on_read"},
        ),
        "bad aggregation": ((1.0,), {"aggregation": "most"}),
        "bad synchronization": ((1.0,), {"synchronization": "later"}),
        "initial value by replica": (
            (lambda shape, dtype: jnp.asarray(1.0, dtype),),
            {"shape": ()},
        ),
    }
    args, options = arguments[name]
    if is_error(expected):
        assert because("keras errors")
        check_error(lambda: in_scope(*args, **options), expected, fix=False)
        return
    variable = in_scope(*args, **options)
    assert encoded(strategy, variable)["Variable"] == expected["Variable"]
    assert decode(expected)[0].dtype == variable.dtype
