"""What exists once: checksums of divided arrays, across a save, a restore, and steps
that must not change them.
"""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import keras_distribute as kd
from keras_distribute.checkpoint import values
from keras_distribute.consistency import checksums
from tests.support import mirrored

from . import training

RNG = np.random.default_rng(0)
X = RNG.normal(size=(60, 8)).astype("float32")
OPTIONS = {"batch_size": 8, "shuffle": False, "verbose": 0}
DTYPES = ["float32", "int8", "uint8", "bool", "bfloat16", "float16", "complex64"]
DTYPES += ["int4", "uint4", "float8_e4m3fn", "int32"]


def divided(replicas, **options):
    return mirrored(replicas, shard_variables=True, min_shard_bytes=16, **options)


def built(strategy, kind="lora"):
    """A model of which most of a weight is frozen."""
    keras.utils.set_random_seed(0)
    with strategy.scope():
        layers = [keras.layers.Dense(16, "relu"), keras.layers.BatchNormalization()]
        model = keras.Sequential([keras.Input((8,)), *layers, keras.layers.Dense(8)])
        if kind == "int8":
            model.layers[0].quantize("int8")
        if kind == "frozen":
            model.layers[0].trainable = False
        else:
            model.layers[0].enable_lora(2)
        model.compile("adam", "mse", metrics=["mae"])
    return model


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_checksum_does_not_depend_on_the_division(dtype):
    dtype = jnp.dtype(dtype)
    is_real = jnp.issubdtype(dtype, jnp.inexact)
    low = 0 if dtype in (jnp.uint8, jnp.uint4, bool) else -7
    array = RNG.normal(size=(8, 16, 3)) if is_real else RNG.integers(low, 7, (8, 16, 3))
    array = array.astype(dtype)
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("a", "b"))
    expected = checksums.on_host(array)
    for spec in [
        (),
        ("a",),
        (("a", "b"),),
        ("b", "a"),
        (None, "a"),
        (None, ("b", "a")),
    ]:
        where = NamedSharding(mesh, PartitionSpec(*spec))
        (found,) = checksums.of_arrays({0: jax.device_put(array, where)}).values()
        assert found.whole == expected
    changed = array.copy()
    changed.view(np.uint8).reshape(-1)[77] ^= 1
    assert checksums.on_host(changed) != expected
    # Words of the same values at other places make another one.
    assert checksums.on_host(array[::-1]) != expected


def test_a_large_array_is_hashed_in_blocks(monkeypatch):
    array = RNG.normal(size=(100, 7))
    whole = checksums.on_host(array)
    monkeypatch.setattr(checksums, "_BLOCK", 64)
    assert checksums.on_host(array) == whole


@pytest.mark.sampled(4)
@pytest.mark.parametrize("replicas", [2, 4, 8])
@pytest.mark.parametrize("kind", ["lora", "int8", "frozen"])
@pytest.mark.parametrize("element", [0, 5])
def test_a_frozen_weight_that_changes_is_found(kind, replicas, element):
    """And no other variable, nor the step before, gives an alarm."""
    strategy = divided(replicas)
    model = built(strategy, kind)
    kernel = model.layers[0]._kernel
    assert not kernel.stored.sharding.is_fully_replicated
    place = {"replica": replicas - 1, "element": element, "bit": 6}
    fault = kd.testing.Fault("flip", step=11, variable=kernel, **place)
    check = kd.callbacks.ReplicaConsistency(every=1)
    report = training.differences(
        lambda: model.fit(X, X, epochs=2, callbacks=[fault, check], **OPTIONS)
    )
    (found,) = report.differences
    assert (found.path, found.replica) == (kernel.path, replicas - 1)
    assert (found.device, found.since) == (f"cpu:{replicas - 1}", 10)
    assert report.step == 11
    assert found.size == 8 * 16 // replicas


def test_the_error():
    strategy = divided(4)
    model = built(strategy)
    kernel = model.layers[0]._kernel
    fault = kd.testing.Fault("flip", step=3, variable=kernel, replica=2, bit=20)
    check = kd.callbacks.ReplicaConsistency(every=2, action="repair")
    with pytest.raises(kd.errors.ReplicaConsistencyError) as caught:
        model.fit(X, X, callbacks=[fault, check], **OPTIONS)
    assert str(caught.value).splitlines() == [
        "1 variable has changed at step 4, though no step changes it.",
        f"  Received: {kernel.path} on replica 2 (cpu:2, process 0) has other bits "
        "than at step 2: its part of 32 element(s) exists once, and no step changes "
        "it.",
        "  Fix: restore the last checkpoint: what exists once cannot be repaired. "
        "Without cpu:2, if it happens again.",
    ]


def test_it_is_reported_once():
    model = built(divided(2))
    kernel = model.layers[0]._kernel
    fault = kd.testing.Fault("flip", step=2, variable=kernel, replica=1, bit=20)
    check = kd.callbacks.ReplicaConsistency(every=1, action="report")
    history = model.fit(X, X, epochs=2, callbacks=[fault, check], **OPTIONS)
    assert history.history["replica_differences"] == [1, 0]


class WithTarget(keras.Model):
    """A network that a step assigns to, though no gradient reaches it."""

    def __init__(self):
        super().__init__()
        self.online, self.target = (keras.layers.Dense(8) for _ in range(2))
        self.target.trainable = False

    def call(self, x):
        return self.online(x) + self.target(x)

    def train_step(self, state, data):
        logs, state = super().train_step(state, data)
        trainable, others, *rest = state
        kernel, bias = (
            0.9 * o + 0.1 * t for o, t in zip(others, trainable, strict=True)
        )
        return logs, (trainable, [kernel, bias], *rest)


class Assigns(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 3:
            self.model.layers[0]._kernel.assign(np.zeros((8, 16)))


@pytest.mark.parametrize("kind", ["target", "assigned", "validated"])
def test_no_false_alarm(kind):
    strategy = divided(4)
    if kind == "target":
        with strategy.scope():
            model = WithTarget()
            model.compile("sgd", "mse")
    else:
        model = built(strategy)
    check = kd.callbacks.ReplicaConsistency(every=1, action="report")
    callbacks = [check] + ([Assigns()] if kind == "assigned" else [])
    options = OPTIONS | ({"validation_data": (X, X)} if kind == "validated" else {})
    history = model.fit(X, X, epochs=3, callbacks=callbacks, **options)
    assert history.history["replica_differences"] == [0, 0, 0]
    weights = model.non_trainable_variables
    assert any(not v.stored.sharding.is_fully_replicated for v in weights)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("replicas", [1, 2, 8])
@pytest.mark.parametrize("is_divided", [False, True])
def test_a_checksum_goes_to_other_devices(replicas, is_divided, tmp_path):
    model = built(divided(4))
    model.fit(X, X, **OPTIONS)
    path = kd.checkpoint.Checkpoint(model=model).save(tmp_path / "ckpt")
    other = built(divided(replicas) if is_divided else mirrored(replicas))
    kd.checkpoint.Checkpoint(model=other).restore(path)
    for a, b in zip(model.weights, other.weights, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())


def test_a_copy_on_the_host_that_differs_is_not_saved(tmp_path, monkeypatch):
    model = built(divided(4))
    copied = values._copied

    def flipped(array):
        copy = np.array(copied(array))
        if copy.shape == (8, 16):
            copy.view(np.uint8).reshape(-1)[9] ^= 4
        return copy

    monkeypatch.setattr(values, "_copied", flipped)
    with pytest.raises(kd.errors.CheckpointError) as caught:
        kd.checkpoint.Checkpoint(model=model).save(tmp_path / "ckpt")
    first, received, fix = str(caught.value).splitlines()
    assert first.startswith("1 variable has other bits on the host than on the devices")
    assert "kernel" in first and "Nothing was written" in received
    assert fix.startswith("  Fix: save again.")
    assert list(tmp_path.iterdir()) == []


def test_devices_that_have_something_else_after_a_restore(tmp_path, monkeypatch):
    model = built(divided(4))
    checkpoint = kd.checkpoint.Checkpoint(model=model)
    path = checkpoint.save(tmp_path / "ckpt")
    kernel, assign = model.layers[0]._kernel, values.assign

    def badly(variable, *args):
        assign(variable, *args)
        if variable is kernel:
            kd.testing.Fault("flip", variable=kernel, replica=1, bit=7).now(0)

    monkeypatch.setattr(values, "assign", badly)
    with pytest.raises(kd.errors.CheckpointError) as caught:
        checkpoint.restore(path)
    first, received, fix = str(caught.value).splitlines()
    assert first.startswith("1 variable has on the devices other bits than were saved:")
    assert "the files are intact" in received and "restore again" in fix
    monkeypatch.undo()
    checkpoint.restore(path)
