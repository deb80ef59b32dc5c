"""Contrastive pretraining: two views of a row find one another in the batch."""

from __future__ import annotations

from typing import Any

import jax
import keras
import numpy as np
from keras import layers, ops

TEMPERATURE = 0.2


def nt_xent(left: Any, right: Any) -> Any:
    """The cross-entropy of each view against the whole batch."""
    left, right = ops.normalize(left), ops.normalize(right)
    similarity = ops.matmul(left, ops.transpose(right)) / TEMPERATURE
    labels = ops.arange(ops.shape(left)[0])
    crossentropy = keras.losses.sparse_categorical_crossentropy
    there = crossentropy(labels, similarity, from_logits=True)
    back = crossentropy(labels, ops.transpose(similarity), from_logits=True)
    return ops.mean(there + back) / 2


class ContrastiveModel(keras.Model):
    """An encoder and a projection head, trained without labels."""

    def __init__(self) -> None:
        super().__init__()
        self.augment = keras.Sequential(
            [layers.GaussianNoise(0.3), layers.Dropout(0.1)]
        )
        self.encoder = keras.Sequential(
            [layers.Dense(12, activation="tanh"), layers.Dense(8)], name="encoder"
        )
        self.head = layers.Dense(6, name="head")
        self.loss_tracker = keras.metrics.Mean(name="contrast")

    @property
    def metrics(self) -> list[Any]:
        return [self.loss_tracker]

    def call(self, inputs: Any, training: bool = False) -> Any:
        views = [self.augment(inputs, training=training) for _ in range(2)]
        return [self.head(self.encoder(view)) for view in views]

    def _loss(self, trainable: Any, non_trainable: Any, x: Any) -> Any:
        (left, right), non_trainable = self.stateless_call(
            trainable, non_trainable, x, training=True
        )
        return nt_xent(left, right), non_trainable

    def train_step(self, state: Any, data: Any) -> Any:
        trainable, non_trainable, optimizer, metrics = state
        x = keras.utils.unpack_x_y_sample_weight(data)[0]
        gradient = jax.value_and_grad(self._loss, has_aux=True)
        (loss, non_trainable), gradients = gradient(trainable, non_trainable, x)
        trainable, optimizer = self.optimizer.stateless_apply(
            optimizer, gradients, trainable
        )
        metrics = self.loss_tracker.stateless_update_state(metrics, loss)
        return {"contrast": self.loss_tracker.stateless_result(metrics)}, (
            trainable,
            non_trainable,
            optimizer,
            metrics,
        )


def program() -> Any:
    rng = np.random.default_rng(3)
    x = rng.normal(size=(45, 10)).astype("float32")
    y = (x.sum(axis=1) > 0).astype("int32")

    pretraining = ContrastiveModel()
    pretraining.compile(keras.optimizers.Adam(0.01, epsilon=1e-3))
    pretrained = pretraining.fit(x, batch_size=17, epochs=2, verbose=0)

    pretraining.encoder.trainable = False
    probe = keras.Sequential([pretraining.encoder, layers.Dense(2)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    probe.compile(keras.optimizers.Adam(0.05, epsilon=1e-3), loss, metrics=["accuracy"])
    probed = probe.fit(x, y, batch_size=17, epochs=2, verbose=0)
    return {
        "pretrained": pretrained,
        "probed": probed,
        "models": [pretraining, probe],
        "predictions": probe.predict(x, batch_size=45, verbose=0),
    }
