"""The rest of the cases that the peers get wrong: saving, callbacks, scopes, custom
loops. See `test_peers`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import keras
import numpy as np
import pytest
from keras import layers, ops

import keras_distribute as kd

from . import harness
from .harness import equals_one_device, fit_only, table

pytestmark = pytest.mark.timeout(120)

X, Y = table(70)


def body() -> keras.Model:
    """An uncompiled classifier."""
    return keras.Sequential(
        [keras.Input((6,)), layers.Dense(8, activation="tanh"), layers.Dense(3)]
    )


def compiled(model: keras.Model, optimizer: Any = None) -> keras.Model:
    """The model, compiled."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(
        optimizer=optimizer or keras.optimizers.Adam(0.02, epsilon=1e-2),
        loss=loss,
        metrics=["accuracy"],
    )
    return model


@pytest.mark.sampled(2)
@pytest.mark.parametrize("target", [0, 1, 2, 4])
def test_save_and_load_on_1_2_4_replicas(target: int, tmp_path: Any) -> None:
    """TF: predictions differ by 9.4e-3 with BatchNorm. KD ok. 0 is plain Keras."""

    def build() -> keras.Model:
        return compiled(
            keras.Sequential(
                [keras.Input((6,)), layers.BatchNormalization(), layers.Dense(3)]
            )
        )

    saved = harness.observe(build, fit_only(X[:64], Y[:64]), harness.mirrored(4)).model
    saved.save(tmp_path / "model.keras")
    if target:
        with harness.mirrored(target).scope():
            loaded = keras.models.load_model(tmp_path / "model.keras")
    else:
        loaded = keras.models.load_model(tmp_path / "model.keras")
    harness.assert_close_tree(
        loaded.predict(X, verbose=0), saved.predict(X, verbose=0), "predictions"
    )


class Crash(keras.callbacks.Callback):
    """Fails once, at the end of a given step."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.remaining = step

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.remaining -= 1
        if self.remaining == 0:
            raise InterruptedError("the machine went away")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("save_freq", ["epoch", 1])
def test_backup_and_restore(save_freq: Any, tmp_path: Any) -> None:
    """After a crash in the second epoch: as one device, where `save_freq=1` repeats a
    step (both peers as well).
    """
    folders = iter(["one", "many"])

    def run(model: keras.Model) -> Any:
        backup = keras.callbacks.BackupAndRestore(
            str(tmp_path / next(folders)), save_freq=save_freq
        )
        fit = {"batch_size": 32, "epochs": 3, "shuffle": False, "verbose": 0}
        with pytest.raises(InterruptedError):
            model.fit(X, Y, callbacks=[backup, Crash(5)], **fit)
        return model.fit(X, Y, callbacks=[backup], **fit).history

    equals_one_device(lambda: compiled(body()), run)


def test_orbax_checkpoint(tmp_path: Any) -> None:
    """TF: TypeError. KD ok."""
    pytest.importorskip("orbax.checkpoint")

    def run(model: keras.Model) -> Any:
        folder = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        callback = keras.callbacks.OrbaxCheckpoint(
            directory=str(folder), save_freq="epoch"
        )
        return model.fit(X, Y, callbacks=[callback], shuffle=False, verbose=0).history

    equals_one_device(lambda: compiled(body()), run)


def _outside_model(strategy: Any) -> keras.Model:
    model = body()
    with strategy.scope():
        return compiled(model)


def _outside_optimizer(strategy: Any) -> keras.Model:
    optimizer = keras.optimizers.Adam(0.01)
    with strategy.scope():
        return compiled(body(), optimizer)


def _outside_backbone(strategy: Any) -> keras.Model:
    backbone = body()
    with strategy.scope():
        return compiled(
            keras.Sequential([keras.Input((6,)), backbone, layers.Dense(3)])
        )


@pytest.mark.parametrize(
    "build", [_outside_model, _outside_optimizer, _outside_backbone]
)
def test_parts_built_outside_the_scope(build: Callable[[Any], keras.Model]) -> None:
    """TF: errors that do not name the cause. KD: "incompatible devices". Ours names a
    variable and the scope.
    """
    with pytest.raises(
        ValueError,
        match=re.compile(
            r"(kernel|bias|iteration|learning_rate|momentum).*scope", re.S
        ),
    ):
        build(harness.mirrored(4)).fit(X, Y, verbose=0)


class Watched(layers.Layer):
    """Notes how its input is laid out over the devices when the compiled step runs."""

    def __init__(self, note: Callable[[Any], None]) -> None:
        super().__init__()
        self.note = note

    def call(self, inputs: Any) -> Any:
        if isinstance(inputs, jax.core.Tracer):
            jax.debug.inspect_array_sharding(
                inputs,
                callback=lambda sharding: self.note(sharding.shard_shape(inputs.shape)),
            )
        return inputs * 1.0


def test_built_and_compiled_inside_fit_outside() -> None:
    """TF ok. KD: each device silently does the whole batch. Ours: its quarter."""
    seen: list[Any] = []

    def build() -> keras.Model:
        seen.clear()
        return compiled(
            keras.Sequential([keras.Input((6,)), Watched(seen.append), layers.Dense(3)])
        )

    equals_one_device(build, fit_only(X[:64], Y[:64]))
    assert set(seen) == {(8, 6)}, f"the devices hold {set(seen)} of each (32, 6) batch"


def test_custom_loop_run_reduce_gather() -> None:
    """TF ok, KD has none: one step of a custom loop is the step of one device."""
    strategy = harness.mirrored(4)
    x, y = X[:32], Y[:32]
    run = fit_only(x, y, epochs=1)
    expected = harness.observe(lambda: compiled(body(), keras.optimizers.SGD(0.1)), run)

    keras.utils.set_random_seed(harness.SEED)
    with strategy.scope():
        model = body()
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build(model.trainable_variables)
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def loss_of(trainable: Any, rows: Any, labels: Any) -> Any:
        logits, _ = model.stateless_call(
            trainable, [v.value for v in model.non_trainable_variables], rows
        )
        return loss_fn(labels, logits)

    def step(rows: Any, labels: Any) -> Any:
        trainable = [variable.value for variable in model.trainable_variables]
        loss, gradients = jax.value_and_grad(loss_of)(trainable, rows, labels)
        optimizer.apply(gradients, model.trainable_variables)
        return loss, ops.argmax(model(rows), axis=-1)

    shares = [
        strategy.experimental_distribute_values_from_function(
            lambda context, values=values: np.split(values, 4)[
                context.replica_id_in_sync_group
            ]
        )
        for values in (x, y)
    ]
    loss, kinds = strategy.run(step, args=shares)
    total = strategy.reduce("SUM", loss, axis=None)
    harness.assert_close_tree(
        np.asarray(total), np.float32(expected.result["loss"][0]), "loss"
    )
    for variable, (path, value) in zip(model.weights, expected.weights, strict=True):
        harness.assert_close_tree(np.asarray(variable.value), value, path)
    assert np.asarray(strategy.gather(kinds, axis=0)).shape == (32,)
    assert strategy.num_replicas_in_sync == 4


def test_two_strategies_in_one_process() -> None:
    """TF: collective errors. KD ok. Two fits that take turns, on the same and on other
    devices.
    """
    expected = harness.observe(lambda: compiled(body()), fit_only(X, Y, epochs=2))
    meshes = [
        ["cpu:0", "cpu:1"],
        ["cpu:4", "cpu:5", "cpu:6"],
        ["cpu:0", "cpu:1", "cpu:2", "cpu:3"],
    ]
    models = []
    for devices in meshes:
        keras.utils.set_random_seed(harness.SEED)
        with kd.MirroredStrategy(devices).scope():
            models.append(compiled(body()))
    for epoch in range(2):
        for model in models:
            model.fit(
                X,
                Y,
                batch_size=32,
                initial_epoch=epoch,
                epochs=epoch + 1,
                shuffle=False,
                verbose=0,
            )
    for model in models:
        for variable, (path, value) in zip(
            model.weights, expected.weights, strict=True
        ):
            harness.assert_close_tree(np.asarray(variable.value), value, path)
