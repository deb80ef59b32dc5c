"""`strategy.extended` against TensorFlow."""

from . import ours
from .comparing import assert_same, check, check_error, entries
from .differences import because
from .ours import encoded, mirrored
from .scenarios import values


@entries(
    "extended",
    "name",
    where=lambda entry: "update" not in entry["name"] and "reduce" not in entry["name"],
)
def test_devices_and_containers(entry):
    strategy = mirrored(entry["replicas"])
    call = values.containers(ours, strategy)[entry["name"]]
    expected = entry["result"]
    if entry["name"] == "value_container of component":
        assert because("no component objects")
        expected = False
    assert call() == expected


@entries("extended", "name", "op", where=lambda entry: "reduce" in entry["name"])
def test_reduce_to(entry):
    strategy, expected = mirrored(entry["replicas"]), entry["result"]
    calls = values.reductions(ours, strategy, entry.get("op"))
    calls["batch_reduce_to nothing"] = lambda: strategy.extended.batch_reduce_to(
        "SUM", []
    )
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
    variable = values.summed(ours, strategy)
    call = values.updates(ours, strategy, variable, entry["group"])[entry["name"]]
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
    call = values.updates_elsewhere(ours, strategy)[entry["name"]]
    check(strategy, call, entry["result"])
