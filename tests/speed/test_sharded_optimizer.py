"""Slots divided among the replicas: the same numbers, and a part of the memory."""

from __future__ import annotations

from typing import Any

import jax
import keras
import numpy as np
import pytest
from keras import optimizers

import keras_distribute as kd
from tests.processes import sharded
from tests.support import pack_from

pytestmark = pytest.mark.sampled(6)

X, Y = sharded.X, sharded.Y


def built(
    replicas: int, shard: bool, make: Any = lambda: optimizers.Adam(1e-3)
) -> keras.Model:
    devices = [f"cpu:{i}" for i in range(replicas)]
    return sharded.built(
        kd.MirroredStrategy(devices, shard_optimizer_state=shard), make
    )


def bytes_of_slots(model: keras.Model) -> tuple[int, int]:
    """On one device, and of the whole."""
    arrays = [jax.tree.leaves(v._value)[0] for v in model.optimizer.variables]
    return sum(a.addressable_shards[0].data.nbytes for a in arrays), sum(
        a.nbytes for a in arrays
    )


@pytest.fixture(params=["packed", "one by one"], autouse=True)
def packed(request: Any, monkeypatch: Any) -> None:
    pack_from(monkeypatch, 4 if request.param == "packed" else None)


@pytest.mark.parametrize("replicas", [1, 2, 3, 4, 8])
def test_the_same_numbers(replicas: int) -> None:
    expected, actual = built(replicas, False), built(replicas, True)
    for model in (expected, actual):
        # 18 steps, each sixth with 4 rows.
        model.fit(X, Y, batch_size=16, epochs=3, shuffle=False, verbose=0)
    for a, b in zip(sharded.numbers(actual), sharded.numbers(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.sampled(1)
def test_slots_of_which_the_replicas_divide_no_dimension() -> None:
    """Packed, they are divided nevertheless, in their buffer."""
    model = built(3, True)
    with model.optimizer.iterations.distribute_strategy.scope():
        model.optimizer.build(model.trainable_variables)
    assert not any(
        any(axis is not None for axis in v.value_sharding.spec)
        for v in model.optimizer.variables
    )
    model.fit(X, Y, batch_size=16, verbose=0)


@pytest.mark.parametrize("replicas", [2, 8])
def test_memory(replicas: int) -> None:
    model = built(replicas, True)
    with model.optimizer.iterations.distribute_strategy.scope():
        model.optimizer.build(model.trainable_variables)
    for _ in range(2):  # From the beginning, and after training.
        own, whole = bytes_of_slots(model)
        assert own / whole <= 1 / replicas + 0.02
        model.fit(X, Y, batch_size=16, verbose=0)


@pytest.mark.parametrize(
    "make",
    [
        lambda: optimizers.Lamb(1e-3),
        lambda: optimizers.SGD(0.01, momentum=0.9, gradient_accumulation_steps=2),
        lambda: optimizers.LossScaleOptimizer(
            # Where a gradient is next to nothing, epsilon keeps rounding from counting.
            optimizers.Adam(1e-3, epsilon=1e-3),
            initial_scale=8.0,
        ),
        lambda: optimizers.Adafactor(1e-3),
        lambda: optimizers.Adam(1e-3, use_ema=True),
    ],
    ids=["Lamb", "accumulation", "loss scale", "Adafactor", "average"],
)
def test_optimizers(make: Any) -> None:
    expected, actual = built(4, False, make), built(4, True, make)
    for model in (expected, actual):
        model.fit(X, Y, batch_size=16, epochs=2, shuffle=False, verbose=0)
    for a, b in zip(sharded.numbers(actual), sharded.numbers(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_custom_loops_keep_the_parts() -> None:
    outcomes = []
    for shard in (False, True):
        model = built(4, shard)
        sharded.in_a_loop(model)
        outcomes.append(sharded.numbers(model))
        own, whole = bytes_of_slots(model)
        assert own / whole < (0.27 if shard else 1.01)
    for a, b in zip(*outcomes, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_reading_assigning_and_saving(tmp_path: Any) -> None:
    model, plain = built(4, True), built(4, False)
    for each in (model, plain):
        each.fit(X, Y, batch_size=16, verbose=0)
    slot = model.optimizer.variables[2]
    assert slot.values[0].shape == slot.shape and len(slot.values) == 4
    slot.assign(np.ones(slot.shape))
    assert bytes_of_slots(model)[0] < bytes_of_slots(plain)[0] * 0.27
    np.testing.assert_array_equal(slot.numpy(), np.ones(slot.shape))
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    for a, b in zip(model.optimizer.variables, again.optimizer.variables, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())
    checkpoint = kd.Checkpoint(model=model, optimizer=model.optimizer)
    path = checkpoint.write(str(tmp_path / "checkpoint"))
    other = built(2, True)
    with other.optimizer.iterations.distribute_strategy.scope():
        other.optimizer.build(other.trainable_variables)
    kd.Checkpoint(model=other, optimizer=other.optimizer).read(path)
    for a, b in zip(sharded.numbers(model), sharded.numbers(other), strict=True):
        np.testing.assert_array_equal(a, b)
