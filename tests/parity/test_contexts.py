"""Which context each place is in, and what calls in the wrong one do, against
TensorFlow.
"""

import pytest

import keras_distribute as kd

from . import ours
from .comparing import as_run_returns, check, check_error, entries, numbers, record
from .differences import because
from .encoding import is_error
from .ours import encoded, mirrored
from .scenarios import contexts


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_places(replicas):
    strategy = mirrored(replicas)
    noted = contexts.places(ours, strategy)
    places = [entry for entry in record()["places"] if entry["replicas"] == replicas]
    assert noted == {
        e["place"]: {key: e[key] for key in e if key not in ("replicas", "place")}
        for e in places
    }


# What TensorFlow lets pass and we refuse, with the builtin class of our error.
REFUSED = {
    "run with a bad options": "TypeError",
    "no devices": "ValueError",
    "an unknown device": "ValueError",
    "exit scopes in wrong order": "RuntimeError",
    "run in update": "RuntimeError",
    "scope in update": "RuntimeError",
}


@entries("misuse", "name")
def test_misuse(entry):
    strategy, name, expected = (
        mirrored(entry["replicas"]),
        entry["name"],
        entry["result"],
    )
    call = contexts.misuse(ours, strategy)[name]
    if name == "devices not a list":
        assert because("one device name")
        assert call() == 1
    elif name in REFUSED and not is_error(expected):
        assert because("refused early")
        check_error(call, {"error": REFUSED[name]})
    elif name == "error in run":  # the user's own error, as it is
        check_error(call, expected, fix=False)
    elif is_error(expected):
        check_error(call, expected)
    elif name.endswith("in update"):
        assert because("updates are one program")
        assert all(
            float(number) == 1.0 for number in numbers(encoded(strategy, call()))
        )
    elif name.startswith("default") or name == "scope in own scope":
        check(strategy, call, expected)
    else:
        check(strategy, call, as_run_returns(expected, entry["replicas"]))
    assert not kd.has_strategy(), "a scope was left open"
