"""`all_reduce`, `all_gather`, `merge_call` and their gradients, inside `run`, against
TensorFlow.
"""

import pytest

from . import ours
from .comparing import as_run_returns, cases, check, check_error, entries, value_of
from .differences import because
from .encoding import decode, is_error
from .ours import mirrored
from .scenarios import collectives


def run(entry, step):
    strategy = mirrored(entry["replicas"])
    return strategy.run(step, args=(value_of(strategy, entry["value"]),))


@pytest.mark.sampled(2)
@cases("all_reduce")
def test_all_reduce(entry, case):
    op, expected = case
    strategy = mirrored(entry["replicas"])
    if entry["name"] == "mixed dtypes" and is_error(expected):
        expected = _mixed_dtypes(entry, op)
    if (
        entry["name"] in ("int scalar", "mixed dtypes")
        and op == "MEAN"
        and entry["replicas"] == 1
    ):
        expected = _floats(expected)
    check(
        strategy,
        lambda: run(entry, collectives.all_reduce(ours, op)),
        as_run_returns(expected, entry["replicas"]),
    )


def _mixed_dtypes(entry, op):
    """TensorFlow refuses floats beside integers on CPUs; alone each reduces as ever."""
    assert because("mixed dtypes")
    floats, ints = zip(*decode(entry["value"]), strict=True)
    scale = len(floats) if op == "MEAN" else 1
    reduced = [
        {"float32": float(sum(floats)) / scale},
        {"int32" if op == "SUM" else "float32": int(sum(ints)) / scale},
    ]
    return {"tuple": [{"PerReplica": [value] * len(floats)} for value in reduced]}


def _floats(expected):
    """The mean of one integer: TensorFlow hands the integer back."""
    assert because("no 64-bit")
    if "tuple" in expected:
        return {"tuple": [_floats(item) for item in expected["tuple"]]}
    return {"float32": expected["int32"]} if "int32" in expected else expected


@pytest.mark.sampled(2)
@cases("all_gather")
def test_all_gather(entry, case):
    axis, expected = case
    strategy = mirrored(entry["replicas"])

    def call():
        return run(entry, collectives.all_gather(ours, axis))

    if entry["name"] == "scalars" or (entry["name"], axis) == ("float32 matrices", 2):
        assert because("refused early")
        check_error(call, {"error": "ValueError"})
    elif axis in (-1, -2) and is_error(expected):
        assert because("negative axes")
        expected = next(
            result for other, result in entry["results"] if other == 2 + axis
        )
        check(strategy, call, as_run_returns(expected, entry["replicas"]))
    else:
        check(strategy, call, as_run_returns(expected, entry["replicas"]))


@entries("gradients", "collective", "power")
def test_gradient_through_a_collective(entry):
    step = collectives.gradient(ours, entry["collective"], entry["power"])
    expected = as_run_returns(entry["result"], entry["replicas"])
    check(mirrored(entry["replicas"]), lambda: run(entry, step), expected)


@entries("merge_call", "name")
def test_merge_call(entry):
    def call():
        return run(entry, collectives.merge_calls(ours)[entry["name"]])

    if entry["name"] == "raises":  # the user's own error, as it is
        check_error(call, entry["result"], fix=False)
    elif entry["name"] == "last local result":
        assert because("merge_call is traced")
        check_error(call, {"error": "ValueError"})
    else:
        check(
            mirrored(entry["replicas"]),
            call,
            as_run_returns(entry["result"], entry["replicas"]),
        )
