"""Own parts everywhere: an optimizer, a layer that counts, a metric, noise."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import layers, ops


class Centralized(keras.optimizers.RMSprop):
    """Takes the mean of each kernel's gradient away."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        centred = []
        for gradient in grads:
            if len(gradient.shape) > 1:
                axes = tuple(range(len(gradient.shape) - 1))
                gradient = gradient - ops.mean(gradient, axis=axes, keepdims=True)
            centred.append(gradient)
        return super().apply(centred, trainable_variables)


class Running(layers.Layer):
    """Centres by a mean that it keeps, and counts the rows that it has seen."""

    def build(self, input_shape: Any) -> None:
        self.mean = self.add_weight(
            shape=input_shape[-1:], initializer="zeros", trainable=False, name="mean"
        )
        self.rows = self.add_weight(
            shape=(), initializer="zeros", dtype="int32", trainable=False, name="rows"
        )

    def call(self, inputs: Any, training: bool = False) -> Any:
        if training:
            self.mean.assign(0.9 * self.mean + 0.1 * ops.mean(inputs, axis=0))
            self.rows.assign_add(ops.shape(inputs)[0])
        return inputs - self.mean


class Largest(keras.metrics.Metric):
    """The largest error so far."""

    def __init__(self, name: str = "largest") -> None:
        super().__init__(name=name)
        self.value = self.add_weight(name="value", initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        error = ops.max(ops.abs(ops.reshape(y_true, (-1, 1)) - y_pred))
        self.value.assign(ops.maximum(self.value, error))

    def result(self) -> Any:
        return self.value + 0.0


def program() -> Any:
    rng = np.random.default_rng(34)
    x = rng.normal(1.0, 1.0, (41, 7)).astype("float32")
    y = x.sum(axis=1)
    model = keras.Sequential(
        [
            keras.Input((7,)),
            Running(),
            layers.Dense(9, activation="mish"),
            layers.GaussianDropout(0.2),
            layers.Dense(1),
        ]
    )
    model.compile(Centralized(0.01, epsilon=1e-3), "log_cosh", metrics=[Largest()])
    history = model.fit(x, y, batch_size=15, epochs=2, verbose=0)
    # Dropout that stays on: several predictions of the same rows.
    drawn = [np.asarray(model(x[:5], training=True)) for _ in range(2)]
    assert not np.array_equal(*drawn)
    return {"history": history, "drawn": drawn, "model": model}
