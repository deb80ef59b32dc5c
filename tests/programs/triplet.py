"""A Siamese network with a triplet loss: like is nearer than unlike."""

from __future__ import annotations

from typing import Any

import jax
import keras
import numpy as np
from keras import layers, ops


class Distances(layers.Layer):
    """The squared distances from the anchor to both others."""

    def call(self, anchor: Any, positive: Any, negative: Any) -> Any:
        near = ops.sum(ops.square(anchor - positive), axis=-1)
        far = ops.sum(ops.square(anchor - negative), axis=-1)
        return near, far


class SiameseModel(keras.Model):
    """Trains the network that gives both distances with a margin between them."""

    def __init__(self, network: keras.Model, margin: float = 0.5) -> None:
        super().__init__()
        self.network, self.margin = network, margin
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.apart = keras.metrics.Mean(name="apart")

    @property
    def metrics(self) -> list[Any]:
        return [self.loss_tracker, self.apart]

    def call(self, inputs: Any) -> Any:
        return self.network(list(inputs))

    def _loss(self, trainable: Any, non_trainable: Any, data: Any) -> Any:
        (near, far), non_trainable = self.stateless_call(
            trainable, non_trainable, data[0]
        )
        loss = ops.mean(ops.maximum(near - far + self.margin, 0.0))
        return loss, (near < far, non_trainable)

    def _updated(self, metrics: Any, loss: Any, apart: Any) -> Any:
        middle = len(self.loss_tracker.variables)
        losses = self.loss_tracker.stateless_update_state(metrics[:middle], loss)
        rights = self.apart.stateless_update_state(
            metrics[middle:], ops.cast(apart, "float32")
        )
        logs = {
            "loss": self.loss_tracker.stateless_result(losses),
            "apart": self.apart.stateless_result(rights),
        }
        return logs, losses + rights

    def train_step(self, state: Any, data: Any) -> Any:
        trainable, non_trainable, optimizer, metrics = state
        gradient = jax.value_and_grad(self._loss, has_aux=True)
        (loss, (apart, non_trainable)), gradients = gradient(
            trainable, non_trainable, data
        )
        trainable, optimizer = self.optimizer.stateless_apply(
            optimizer, gradients, trainable
        )
        logs, metrics = self._updated(metrics, loss, apart)
        return logs, (trainable, non_trainable, optimizer, metrics)

    def test_step(self, state: Any, data: Any) -> Any:
        trainable, non_trainable, metrics = state
        loss, (apart, non_trainable) = self._loss(trainable, non_trainable, data)
        logs, metrics = self._updated(metrics, loss, apart)
        return logs, (trainable, non_trainable, metrics)


def program() -> Any:
    import tensorflow as tf

    rng = np.random.default_rng(5)
    kinds = rng.normal(size=(4, 9))
    first, second = rng.integers(0, 4, (2, 38))
    second = np.where(first == second, (second + 1) % 4, second)
    noise = rng.normal(size=(3, 38, 9)) / 2
    triplets = (kinds[[first, first, second]] + noise).astype("float32")

    embedding = keras.Sequential(
        [keras.Input((9,)), layers.Dense(8, activation="tanh"), layers.Dense(3)]
    )
    inputs = [
        keras.Input((9,), name=name) for name in ("anchor", "positive", "negative")
    ]
    network = keras.Model(inputs, Distances()(*[embedding(one) for one in inputs]))
    model = SiameseModel(network)
    model.compile(optimizer=keras.optimizers.SGD(0.05))

    dataset = tf.data.Dataset.from_tensor_slices((tuple(triplets),))
    training, validation = dataset.take(27).batch(11), dataset.skip(27).batch(7)
    history = model.fit(training, epochs=3, validation_data=validation, verbose=0)
    cosine = keras.metrics.CosineSimilarity()
    anchor, positive, negative = (embedding(one) for one in triplets)
    return {
        "history": history,
        "embedded": embedding.predict(triplets[0], batch_size=9, verbose=0),
        "like": cosine(anchor, positive),
        "unlike": keras.metrics.CosineSimilarity()(anchor, negative),
        "models": [model, embedding],
    }
