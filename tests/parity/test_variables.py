"""Variables against TensorFlow: what they hold, and read as, after each operation in
each context.
"""

import keras
import pytest

import keras_distribute as kd

from . import ours
from .comparing import check_error, entries, record
from .differences import because
from .encoding import decode, is_error
from .ours import encoded, mirrored
from .scenarios import variables
from .scenarios.variables import COMMON, INITIAL, OPERATIONS

COMBINATIONS = [
    pytest.param(entry, operation, id="-".join(
        [entry["synchronization"], entry["aggregation"], entry["context"], operation, f"{entry['replicas']} replicas"]))
    for entry in record()["variables"] if "context" in entry for operation in OPERATIONS
]  # fmt: skip


def create(entry):
    strategy = mirrored(entry["replicas"])
    return variables.create(
        ours, strategy, entry["synchronization"], entry["aggregation"]
    )


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
        variables.operate(ours, strategy, variable, "replica", "assign_add")
        assert components(strategy, variable) == expected["prepared"]

    def call():
        return variables.operate(ours, strategy, variable, entry["context"], operation)

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
        variable = variables.create(ours, strategy, "on_write", "sum")
        strategy.run(lambda: variable.assign(2.0))
        assert because("python numbers")
        assert float(variable.value) == 2.0 * entry["replicas"]
        return
    call = variables.creation(ours, strategy)[name]
    if is_error(expected):
        assert because("keras errors")
        check_error(call, expected, fix=False)
        return
    variable = call()
    assert encoded(strategy, variable)["Variable"] == expected["Variable"]
    assert decode(expected)[0].dtype == variable.dtype
