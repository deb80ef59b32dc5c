"""Transfer: a pretrained body is frozen under a new head, then trained with it."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import layers


def program() -> Any:
    rng = np.random.default_rng(33)
    x = rng.random((35, 8, 8, 3)).astype("float32")
    y = rng.integers(0, 2, (35, 1)).astype("float32")

    inputs = keras.Input((8, 8, 3))
    h = layers.Conv2D(6, 3, strides=2, use_bias=False, name="stem")(inputs)
    h = layers.BatchNormalization(synchronized=True, name="normalized")(h)
    h = layers.SeparableConv2D(6, 2, activation="relu", name="separable")(h)
    body = keras.Model(inputs, h, name="body")
    body.trainable = False

    inputs = keras.Input((8, 8, 3))
    flipped = layers.RandomFlip("horizontal", seed=1)(inputs)
    h = body(layers.Rescaling(2.0, offset=-1.0)(flipped), training=False)
    h = layers.Dropout(0.2)(layers.GlobalAveragePooling2D()(h))
    model = keras.Model(inputs, layers.Dense(1)(h))

    def compile_model(rate: float) -> None:
        optimizer = keras.optimizers.Adam(rate, epsilon=1e-3)
        loss = keras.losses.BinaryCrossentropy(from_logits=True)
        metrics = [keras.metrics.BinaryAccuracy(threshold=0.0)]
        model.compile(optimizer, loss, metrics=metrics)

    compile_model(0.01)
    frozen = model.fit(x, y, batch_size=16, epochs=2, verbose=0)
    body.trainable = True
    compile_model(0.001)
    tuned = model.fit(x, y, batch_size=16, epochs=2, verbose=0)
    return {
        "frozen": frozen,
        "tuned": tuned,
        "predictions": model.predict(x, batch_size=35, verbose=0),
        "model": model,
    }
