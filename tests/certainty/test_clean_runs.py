"""No alarm where nothing is wrong: every step of many kinds of training is checked."""

import keras
import numpy as np
import pytest

import keras_distribute as kd
from keras_distribute.training import calls
from tests.logical import HIDDEN, LABELS, ROWS, dense_classifier, tpu_strategy
from tests.support import mirrored

from . import training

pytestmark = pytest.mark.timeout(300)

KINDS = {
    "plain": {},
    "float16": {"policy": "mixed_float16"},
    "bfloat16": {"policy": "mixed_bfloat16"},
    "accumulation": {
        "compiled": lambda: {
            "optimizer": keras.optimizers.Adam(0.01, gradient_accumulation_steps=3)
        }
    },
    "several steps": {"compiled": lambda: {"steps_per_execution": 4}},
    "averages": {
        "compiled": lambda: {
            "optimizer": keras.optimizers.SGD(
                0.1, momentum=0.9, use_ema=True, ema_overwrite_frequency=5
            )
        }
    },
    "divided slots": {"strategy": {"shard_optimizer_state": True}},
    "narrow sums": {"strategy": {"communication_dtype": "bfloat16"}},
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("replicas", [2, 4, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_no_false_alarm(kind, replicas):
    options = KINDS[kind]
    strategy = mirrored(replicas, **options.get("strategy", {}))
    compiled = options.get("compiled", dict)
    with strategy.scope():
        given = compiled()
    policy = options.get("policy")
    model = training.built(strategy, compiled=given, policy=policy)
    seen = []
    check = strategy.check_consistency
    strategy.check_consistency = lambda *a, **k: seen.append(check(*a, **k)) or seen[-1]
    training.fitted(model, kd.callbacks.ReplicaConsistency(every=1), epochs=10)
    dispatches = 2 if kind == "several steps" else 6
    # One after each dispatch but the last of an epoch, and one at its end.
    assert len(seen) >= 10 * dispatches
    assert all(report.differences == () for report in seen)
    skipped = seen[-1].skipped
    if kind == "divided slots":
        assert skipped and all("momentum" in p or "velocity" in p for p in skipped)
    elif kind == "accumulation":
        assert all("gradient_accumulator" in path for path in skipped)
    else:
        assert skipped == ()
    assert seen[-1].num_variables >= 15


@pytest.mark.sampled(2)
@pytest.mark.parametrize("element", [5, 31])
def test_several_logical_devices_a_replica(element):
    """Each part of a divided weight is compared over the replicas."""
    strategy = tpu_strategy(2, layout_map=HIDDEN)
    with strategy.scope():
        model = dense_classifier()
    options = {"batch_size": 8, "verbose": 0}
    model.fit(
        ROWS,
        LABELS,
        callbacks=[kd.callbacks.ReplicaConsistency(every=1)],
        **options,
    )
    kernel = model.get_layer("hidden").kernel
    flip = {"variable": kernel, "replica": 2, "element": element, "bit": 31}
    kd.testing.Fault("flip", **flip).now(0)
    (found,) = training.differences(
        lambda: strategy.check_consistency(model)
    ).differences
    device = strategy.replica_mesh.first_devices[2]
    assert (found.replica, found.device) == (2, f"cpu:{device.id}")
    # Of 16 columns each logical device has 8.
    part = kernel.stored.sharding.devices_indices_map((192, 16))[device]
    column = (part[1].start or 0) + element % 8
    assert [each.index for each in found.elements] == [(element // 8, column)]
    assert strategy.check_consistency(model, action="repair").is_repaired
    assert strategy.check_consistency(model).differences == ()


def test_a_loop_of_ones_own():
    """What `run` has assigned is looked at where it stands."""
    strategy = mirrored(4)
    with strategy.scope():
        weight = keras.Variable(np.ones(3, "float32"))

    def step():
        total = kd.get_replica_context().all_reduce("SUM", weight.value)
        weight.assign(0.2 * total)

    for _ in range(5):
        strategy.run(step)
        assert strategy.check_consistency(weight).differences == ()
    kd.testing.Fault("flip", variable=weight, replica=1, bit=3).now(0)
    report = strategy.check_consistency(weight, action="repair")
    assert [d.replica for d in report.differences] == [1] and report.is_repaired
    strategy.run(step)
    assert strategy.check_consistency(weight).differences == ()


def test_validation_between_the_epochs():
    """Weights and metrics move from the state of one step to that of another."""
    model = training.built(mirrored(4))
    check = kd.callbacks.ReplicaConsistency(every=2, action="report")
    data = (training.X, training.Y)
    history = model.fit(
        *data, epochs=4, verbose=0, validation_data=data, callbacks=[check]
    )
    assert history.history["replica_differences"] == [0] * 4
    assert {"val_loss", "val_mae"} < history.history.keys()


def test_steps_are_still_grouped():
    """By `steps_per_execution="auto"`, which leaves callbacks that see steps alone."""
    strategy = mirrored(2)
    check = kd.callbacks.ReplicaConsistency()
    model = training.built(strategy)
    for callbacks, sees in ([check], False), ([check, kd.testing.Fault("delay")], True):
        training.fitted(model, *callbacks)
        assert getattr(model, calls._SEES_STEPS) is sees


def test_without_a_strategy_nothing_is_compared():
    model = training.built(kd.get_strategy())
    history = training.fitted(
        model, kd.callbacks.ReplicaConsistency(every=1, action="report")
    )
    assert history.history["replica_differences"] == [0]
