"""Repaired before the next step, a training gives the bits of an undisturbed one; what
cannot be repaired says so; a report goes on.
"""

import logging

import pytest

import keras_distribute as kd
from tests.support import mirrored, pack_from

from . import training

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(params=[False, True], ids=["one by one", "packed"])
def is_packed(request, monkeypatch):
    pack_from(monkeypatch, 4 if request.param else None)
    return request.param


def flip(model, step, kind, which, replica, bit):
    variable = training.variables_of(model)[kind][which]
    given = {"variable": variable, "replica": replica, "bit": bit}
    return kd.testing.Fault("flip", step=step, **given)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("replicas", [4, 8])
@pytest.mark.parametrize("per_execution", [1, 2])
def test_majority_repair_gives_the_bits_of_an_undisturbed_run(
    replicas, per_execution, is_packed, caplog
):
    compiled = {"steps_per_execution": per_execution}
    expected = training.built(mirrored(replicas), compiled=compiled)
    training.fitted(expected, epochs=2)
    model = training.built(mirrored(replicas), compiled=compiled)
    training.fitted(model)
    faults = [
        flip(model, 7, "weights", 0, 1, 30),
        flip(model, 9, "slots", 2, replicas - 1, 3),
        flip(model, 9, "weights", 3, 0, 22),  # Two at once, of two replicas.
        flip(model, 11, "statistics", 0, 2, 29),
        flip(model, 12, "slots", -1, 3, 31),
    ]
    check = kd.callbacks.ReplicaConsistency(every=1, action="repair")
    with caplog.at_level(logging.WARNING, "keras_distribute"):
        history = training.fitted(model, *faults, check)
    assert all(fault.came for fault in faults)
    assert history.history["replica_differences"] == [5]
    shown = [r for r in caplog.records if "right copies were put" in r.getMessage()]
    assert len(shown) == (4 if per_execution == 1 else 3)
    assert training.bits_of(model) == training.bits_of(expected)


def test_two_copies_cannot_be_repaired():
    model = training.built(mirrored(2))
    check = kd.callbacks.ReplicaConsistency(every=1, action="repair")
    with pytest.raises(kd.errors.ReplicaConsistencyError) as caught:
        training.fitted(model, flip(model, 2, "weights", 0, 1, 30), check)
    text = str(caught.value)
    assert "Nobody knows which copies are right." in text
    assert "replica 1 (cpu:1, process 0) differs from replica 0 (cpu:0, proc" in text
    assert "three replicas or more" in text


def test_nothing_is_repaired_where_one_variable_cannot_be():
    strategy = mirrored(4)
    model = training.built(strategy)
    for which, replicas in ((0, [1]), (1, [2, 3])):
        for replica in replicas:
            flip(model, 0, "weights", which, replica, replica).now(0)
    before = strategy.check_consistency(model, action="report")
    with pytest.raises(kd.errors.ReplicaConsistencyError):
        strategy.check_consistency(model, action="repair")
    assert strategy.check_consistency(model, action="report") == before


def test_a_report_goes_on(caplog, is_packed):
    model = training.built(mirrored(4))
    check = kd.callbacks.ReplicaConsistency(every=3, action="report")
    with caplog.at_level(logging.WARNING, "keras_distribute"):
        history = training.fitted(
            model, flip(model, 8, "weights", 0, 1, 12), check, epochs=3
        )
    first, second, third = history.history["replica_differences"]
    assert first == 0 < second <= third
    assert "is not the same on all 4 replicas at step 9" in caplog.text
