"""BatchNormalization: the statistics of a replica's own rows where they divide evenly,
those of all rows otherwise.

The reference for the first is written out here: a layer that splits the batch into
groups, in plain Keras on one device, and NumPy for a single step.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

import keras_distribute as kd
from tests.support import mirrored_or_default

from . import harness
from .harness import equals_one_device, fit_evaluate_predict, fit_only, table

pytestmark = pytest.mark.timeout(120)

EPSILON, MOMENTUM = 1e-3, 0.8


class GroupNormalizedBatch(layers.Layer):
    """What `BatchNormalization` computes on `groups` replicas, computed on one device."""

    def __init__(self, groups: int) -> None:
        super().__init__(name="normalization")
        self.groups = groups

    def build(self, shape: Any) -> None:
        self.gamma = self.add_weight(shape=shape[-1:], initializer="ones", name="gamma")
        self.beta = self.add_weight(shape=shape[-1:], initializer="zeros", name="beta")
        self.mean = self.add_weight(
            shape=shape[-1:], initializer="zeros", trainable=False, name="moving_mean"
        )
        self.variance = self.add_weight(
            shape=shape[-1:],
            initializer="ones",
            trainable=False,
            name="moving_variance",
        )

    def call(self, inputs: Any, training: bool = False) -> Any:
        if not training:
            scale = self.gamma / ops.sqrt(self.variance + EPSILON)
            return (inputs - self.mean) * scale + self.beta
        rows = inputs.shape[0]
        groups = self.groups if rows % self.groups == 0 else 1
        grouped = ops.reshape(inputs, (groups, rows // groups, *inputs.shape[1:]))
        axes = tuple(range(1, len(grouped.shape) - 1))
        mean = ops.mean(grouped, axis=axes, keepdims=True)
        variance = ops.var(grouped, axis=axes, keepdims=True)
        around = (*range(len(grouped.shape) - 1),)
        self.mean.assign(
            self.mean * MOMENTUM + ops.mean(mean, axis=around) * (1 - MOMENTUM)
        )
        self.variance.assign(
            self.variance * MOMENTUM + ops.mean(variance, axis=around) * (1 - MOMENTUM)
        )
        normal = (grouped - mean) / ops.sqrt(variance + EPSILON)
        return ops.reshape(normal, inputs.shape) * self.gamma + self.beta


def normalization(**options: Any) -> layers.Layer:
    """The layer under test, or under a strategy's reference the grouped one."""
    return layers.BatchNormalization(
        momentum=MOMENTUM, epsilon=EPSILON, name="normalization", **options
    )


def network(layer: layers.Layer, image: bool = False) -> keras.Model:
    """A dense or convolutional classifier around the layer."""
    if image:
        body = [
            keras.Input((5, 5, 2)),
            layers.Conv2D(3, 3, use_bias=False),
            layer,
            layers.Flatten(),
        ]
    else:
        body = [keras.Input((6,)), layers.Dense(5, use_bias=False), layer]
    model = keras.Sequential([*body, layers.Activation("tanh"), layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.SGD(0.1), loss=loss, metrics=["accuracy"])
    return model


@pytest.mark.sampled(3)
@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_batch_normalization_uses_each_replicas_statistics(replicas: int) -> None:
    """TF: each replica keeps its own moving statistics, the first is saved. KD: global
    ones, no others.
    """
    x, y = table(64)
    expected = harness.observe(
        lambda: network(GroupNormalizedBatch(replicas)), fit_evaluate_predict(x, y)
    )
    equals_one_device(
        lambda: network(normalization()),
        fit_evaluate_predict(x, y),
        replicas,
        reference=expected,
    )


def test_convolutional_batch_normalization() -> None:
    """The statistics are over a replica's rows and all positions."""
    _, y = table(48)
    x = np.random.default_rng(0).normal(1.0, 2.0, (48, 5, 5, 2)).astype("float32")
    run = fit_only(x, y, batch_size=16)
    expected = harness.observe(
        lambda: network(GroupNormalizedBatch(4), image=True), run
    )
    equals_one_device(
        lambda: network(normalization(), image=True), run, reference=expected
    )


def test_batch_normalization_70_samples() -> None:
    """TF: every weight silently NaN, a replica is empty. KD: IndivisibleError. Six rows
    are normalized as one group.
    """
    x, y = table(70)
    expected = harness.observe(
        lambda: network(GroupNormalizedBatch(4)), fit_evaluate_predict(x, y)
    )
    equals_one_device(
        lambda: network(normalization()), fit_evaluate_predict(x, y), reference=expected
    )


def test_moving_statistics_by_hand_and_as_saved(tmp_path: Any) -> None:
    """One step on rows whose groups differ: the moving statistics are the mean over the
    replicas, in the file, too.
    """
    x = (
        np.random.default_rng(1).normal(size=(32, 6)).astype("float32")
        + np.repeat(np.arange(4), 8)[:, None] * 3
    )
    x = x.astype("float32")
    groups = x.astype("float64").reshape(4, 8, 6)
    mean = groups.mean(axis=1).mean(axis=0) * (1 - MOMENTUM)
    variance = MOMENTUM + groups.var(axis=1).mean(axis=0) * (1 - MOMENTUM)

    with harness.mirrored(4).scope():
        model = keras.Sequential(
            [keras.Input((6,)), normalization(trainable=True), layers.Dense(1)]
        )
        model.compile(optimizer=keras.optimizers.SGD(0.0), loss="mse")
    model.fit(x, np.zeros((32, 1)), batch_size=32, shuffle=False, verbose=0)
    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")
    saved = keras.models.load_model(tmp_path / "model.keras")
    weights = keras.models.clone_model(model)
    weights.load_weights(tmp_path / "model.weights.h5")
    for candidate in (model, saved, weights):
        layer = candidate.get_layer("normalization")
        np.testing.assert_allclose(
            np.asarray(layer.moving_mean.value), mean, rtol=1e-5, atol=1e-6
        )
        np.testing.assert_allclose(
            np.asarray(layer.moving_variance.value), variance, rtol=1e-5, atol=1e-6
        )
    everything = x.astype("float64").var(axis=0) * (1 - MOMENTUM) + MOMENTUM
    assert np.all(np.abs(everything - variance) > 0.1), (
        "the rows do not tell the two kinds of statistics apart"
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("image", [False, True], ids=["dense", "convolutional"])
@pytest.mark.parametrize("samples", [64, 70])
def test_batch_normalization_synchronized(image: bool, samples: int) -> None:
    """TF ok. KD: ValueError, only with TensorFlow. Ours is one device's, with tails."""
    x, y = table(samples)
    if image:
        x = (
            np.random.default_rng(0)
            .normal(1.0, 2.0, (samples, 5, 5, 2))
            .astype("float32")
        )
    equals_one_device(
        lambda: network(normalization(synchronized=kd.has_strategy()), image=image),
        fit_evaluate_predict(x, y) if not image else fit_only(x, y, epochs=1),
    )


@pytest.mark.parametrize("synchronized", [False, True])
def test_batch_normalization_under_a_mask(synchronized: bool) -> None:
    """Masked positions are in no statistics; when synchronized, every real token weighs
    the same.
    """
    rng = np.random.default_rng(2)
    tokens = rng.integers(1, 10, (35, 4)).astype("int32")
    tokens[np.arange(4) > rng.integers(0, 4, (35, 1))] = 0
    targets = rng.integers(0, 3, (35, 4)).astype("int32")

    def build() -> keras.Model:
        layer = normalization(synchronized=synchronized and kd.has_strategy())
        body = [
            keras.Input((4,)),
            layers.Embedding(10, 4, mask_zero=True),
            layer,
            layers.Dense(3),
        ]
        model = keras.Sequential(body)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer=keras.optimizers.SGD(0.1), loss=loss)
        return model

    run = fit_only(tokens, targets, batch_size=16 if synchronized else 35)
    equals_one_device(build, run)


def test_trainable_false_freezes_the_statistics() -> None:
    """A frozen layer normalizes with its moving statistics, which stay."""
    x, y = table(70)

    def build() -> keras.Model:
        layer = normalization()
        layer.trainable = False
        return network(layer)

    outcome = equals_one_device(build, fit_only(x, y))
    before = {path: value for path, value in outcome.initial if "moving" in path}
    assert before and all(
        np.array_equal(before[path], value)
        for path, value in outcome.weights
        if path in before
    )


class OneMask(layers.Layer):
    """Normalizes under a mask of one row."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = layers.BatchNormalization()

    def call(self, inputs: Any, training: Any = None) -> Any:
        mask = np.array([[True, True, False]])
        return self.norm(inputs, mask=mask, training=training)


def test_a_mask_of_one_row_is_for_all_rows() -> None:
    means = []
    x = np.tile(np.arange(6.0, dtype="float32").reshape(1, 3, 2), (4, 1, 1))
    for replicas in (0, 2):
        with mirrored_or_default(replicas).scope():
            model = keras.Sequential([keras.Input((3, 2)), OneMask()])
            model.compile("sgd", "mse")
        model.train_on_batch(x, x)
        means.append(model.layers[0].norm.moving_mean.numpy())
    np.testing.assert_allclose(means[1], means[0], rtol=1e-6)
