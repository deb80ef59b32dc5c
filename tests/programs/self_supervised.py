"""Two networks that teach one another; one follows the other after each batch."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import layers, ops


def encoder() -> keras.Model:
    """Rows to vectors."""
    hidden = layers.Dense(8, activation="tanh")
    return keras.Sequential([keras.Input((6,)), hidden, layers.Dense(4)])


class Follow(keras.callbacks.Callback):
    """Moves the target's weights towards those that are trained."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        online, target = (
            self.model.online.get_weights(),
            self.model.target.get_weights(),
        )
        pairs = zip(online, target, strict=True)
        self.model.target.set_weights([0.1 * new + 0.9 * old for new, old in pairs])


class Byol(keras.Model):
    """Predicts the target's vectors of another view."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.target = encoder(), encoder()
        self.target.trainable = False
        self.predictor = layers.Dense(4)
        self.noise = layers.GaussianNoise(0.2)

    def call(self, x: Any, training: bool = False) -> Any:
        one, other = self.noise(x, training=training), self.noise(x, training=training)
        guess = self.predictor(self.online(one))
        wanted = ops.stop_gradient(self.target(other))
        distance = ops.square(ops.normalize(guess) - ops.normalize(wanted))
        self.add_loss(ops.mean(ops.sum(distance, axis=-1)))
        return guess


def program() -> Any:
    x = np.random.default_rng(35).normal(size=(39, 6)).astype("float32")
    model = Byol()
    model.compile(keras.optimizers.Lion(0.003))
    history = model.fit(x, batch_size=14, epochs=2, callbacks=[Follow()], verbose=0)
    vectors = model.target.predict(x, batch_size=39, verbose=0)
    return {"history": history, "vectors": vectors, "model": model}
