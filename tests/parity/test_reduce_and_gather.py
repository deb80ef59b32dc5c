"""`strategy.reduce` and `strategy.gather` against TensorFlow."""

import pytest

import keras_distribute as kd

from .comparing import assert_same, cases, check, check_error, value_of
from .differences import because
from .encoding import is_error
from .ours import encoded, mirrored


@pytest.mark.sampled(2)
@cases("reduce")
def test_reduce(entry, case):
    op, axis, expected = case
    strategy = mirrored(entry["replicas"])
    value = value_of(strategy, entry["value"])
    name = entry["name"]
    if isinstance(axis, list) and name != "axis as a list":
        axis = tuple(axis)

    def call():
        return strategy.reduce(
            kd.ReduceOp.SUM if op == "ReduceOp.SUM" else op, value, axis=axis
        )

    if name == "axis as a list":
        assert because("axes in a list")
        assert_same(
            encoded(strategy, call()),
            encoded(strategy, strategy.reduce(op, value, axis=tuple(axis))),
        )
    elif name == "none":
        assert because("none")
        assert call() is None
    elif name == "bool scalars":
        assert because("booleans")
        total = [1, 1, None, 3][entry["replicas"] - 1]
        expected = (
            {"int32": total} if op == "SUM" else {"float32": total / entry["replicas"]}
        )
        assert_same(encoded(strategy, call()), expected)
    elif name == "plain matrix" and op == "SUM" and entry["replicas"] > 1:
        assert because("common values")
        check_error(call, {"error": "ValueError"})
    elif (
        op == "MEAN"
        and axis is None
        and entry["replicas"] == 1
        and "PerReplica" in entry["value"]
    ):
        check(strategy, call, _mean_of_one(expected))
    else:
        check(strategy, call, _as_array(expected))


def _mean_of_one(expected):
    """The mean of one integer: TensorFlow hands the integer back."""
    if "int32" in expected:
        assert because("no 64-bit")
        return {"float32": expected["int32"]}
    if "dict" in expected:
        return {
            "dict": {
                name: _mean_of_one(item) for name, item in expected["dict"].items()
            }
        }
    return expected


def _as_array(expected):
    """The mean of a Python number: TensorFlow hands the number back."""
    if isinstance(expected, dict) and "python" in expected:
        assert because("numbers become arrays")
        return {
            "int32" if isinstance(expected["python"], int) else "float32": expected[
                "python"
            ]
        }
    return expected


@pytest.mark.sampled(2)
@cases("gather")
def test_gather(entry, case):
    axis, expected = case
    strategy = mirrored(entry["replicas"])
    value = value_of(strategy, entry["value"])

    def call():
        return strategy.gather(value, axis=axis)

    if axis < 0 and "PerReplica" in entry["value"]:
        assert because("negative axes")
        assert_same(
            encoded(strategy, call()),
            encoded(strategy, strategy.gather(value, axis=2 + axis)),
        )
    elif entry["name"] in ("dict per replica", "ragged rows of a dict"):
        assert because("gathered structures")
        expected = {
            "dict": {
                name: encoded(strategy, strategy.gather(value[name], axis))
                for name in value
            }
        }
        assert_same(encoded(strategy, call()), expected)
    elif is_error(expected):
        check_error(call, expected)
    elif (entry["name"], axis) == ("float32 matrices", 2) or entry["name"] in (
        "scalars",
        "plain scalar",
        "python int",
    ):
        assert because("refused early")
        check_error(call, {"error": "ValueError"})
    else:
        assert_same(encoded(strategy, call()), expected)
