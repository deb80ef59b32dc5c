"""Reading texts out of images: recurrent layers, and CTC over labels of any length."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import layers, ops

CHARACTERS, BLANK, LONGEST = 5, 0, 4


class CTCLayer(layers.Layer):
    """Adds the loss of labels that are filled up with zeros at their ends."""

    def call(self, labels: Any, logits: Any) -> Any:
        rows, steps = ops.shape(logits)[0], ops.shape(logits)[1]
        label_lengths = ops.sum(ops.cast(labels != BLANK, "int32"), axis=-1)
        logit_lengths = ops.full((rows,), steps, dtype="int32")
        loss = ops.ctc_loss(
            labels, logits, label_lengths, logit_lengths, mask_index=BLANK
        )
        self.add_loss(ops.mean(loss))
        return logits


def data(num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Images of bars, and the texts that they stand for."""
    rng = np.random.default_rng(8)
    lengths = rng.integers(1, LONGEST + 1, num_rows)
    labels = rng.integers(1, CHARACTERS, (num_rows, LONGEST)).astype("int32")
    labels[np.arange(LONGEST) >= lengths[:, None]] = BLANK
    images = (
        np.repeat(labels[:, :, None, None], 4, axis=1)
        * np.ones((1, 1, 6, 1))
        / CHARACTERS
    )
    return (images + 0.1 * rng.normal(size=images.shape)).astype("float32"), labels


def reader() -> tuple[Any, Any]:
    """The input, and a row of logits for each column of the image."""
    image = keras.Input((16, 6, 1), name="image")
    x = layers.Conv2D(4, 3, activation="relu", padding="same")(image)
    x = layers.MaxPooling2D((1, 2))(x)
    x = layers.Dense(8, activation="relu")(layers.Reshape((16, 12))(x))
    x = layers.Bidirectional(layers.LSTM(5, return_sequences=True))(x)
    return image, layers.Dense(CHARACTERS, name="logits")(x)


def program() -> Any:
    images, labels = data(34)

    image, logits = reader()
    target = keras.Input((LONGEST,), dtype="int32", name="label")
    training = keras.Model([image, target], CTCLayer()(target, logits))
    training.compile(keras.optimizers.Adam(0.01, epsilon=1e-3))
    by_layer = training.fit(
        {"image": images, "label": labels}, batch_size=10, epochs=2, verbose=0
    )
    reading = keras.Model(image, logits)
    predictions = reading.predict(images, batch_size=34, verbose=0)
    texts, _ = ops.ctc_decode(
        predictions, np.full(34, 16), strategy="greedy", mask_index=BLANK
    )

    by_loss = keras.Model(*reader())
    by_loss.compile(keras.optimizers.Adam(0.01, epsilon=1e-3), keras.losses.CTC())
    return {
        "by layer": by_layer,
        "by loss": by_loss.fit(images, labels, batch_size=10, epochs=2, verbose=0),
        "evaluation": by_loss.evaluate(images, labels, batch_size=34, verbose=0),
        "predictions": predictions,
        "texts": texts,
        "models": [training, by_loss],
    }
