"""Topologies and device assignments, against the record of TensorFlow's."""

import json
from pathlib import Path

import pytest

import keras_distribute as kd

from .assignments import CASES, MESHES, TOPOLOGIES, build, described, topology

RECORD = json.loads(Path(__file__).with_name("tensorflow_tpu.json").read_text())
OURS = kd.tpu.experimental


def agrees(theirs, ours):
    """The same, or our `ValueError` where TensorFlow has an error."""
    if isinstance(theirs, dict) and "error" in theirs:
        return isinstance(ours, dict) and "ValueError" in ours["error"]
    return theirs == ours


def test_replicas_get_the_devices_that_tensorflow_gives_them():
    assert len(CASES) == len(RECORD["assignments"]) > 500
    said = [
        (case, theirs, build(OURS, case))
        for case, theirs in zip(CASES, RECORD["assignments"], strict=True)
    ]
    assert [
        (case, theirs, ours) for case, theirs, ours in said if not agrees(theirs, ours)
    ] == []
    assert sum(isinstance(theirs, list) for _, theirs, _ in said) > 200


@pytest.mark.parametrize("mesh", [name for name in MESHES if name != "one chip"])
def test_names_and_numbers_are_tensorflows(mesh):
    names = [name for name in MESHES if name != "one chip"]
    theirs, ours = RECORD["descriptions"][names.index(mesh)], described(OURS, mesh)
    assert list(theirs) == list(ours)
    assert {name for name in theirs if not agrees(theirs[name], ours[name])} <= {
        "replicas of"
    }
    assert all(map(agrees, theirs["replicas of"], ours["replicas of"]))


def test_topologies_that_tensorflow_refuses_are_refused():
    for arguments, theirs in zip(TOPOLOGIES, RECORD["topologies"], strict=True):
        assert agrees(theirs, topology(OURS, arguments)), arguments
