"""A trained model in 8 bits: predictions, LoRA on top of it, and a file of it."""

from __future__ import annotations

import pathlib
import tempfile
from typing import Any

import keras
import numpy as np
from keras import layers


def program() -> Any:
    rng = np.random.default_rng(25)
    x = rng.normal(size=(37, 8)).astype("float32")
    y = np.argmax(x[:, :3], axis=1).astype("int32")
    model = keras.Sequential(
        [keras.Input((8,)), layers.Dense(16, activation="relu"), layers.Dense(3)]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.02, epsilon=1e-3), loss, metrics=["accuracy"])
    history = model.fit(x, y, batch_size=14, epochs=2, verbose=0)
    exact = model.predict(x, batch_size=37, verbose=0)
    model.quantize("int8")
    quantized = model.predict(x, batch_size=37, verbose=0)
    np.testing.assert_allclose(quantized, exact, atol=0.1)
    with tempfile.TemporaryDirectory() as folder:
        model.save(pathlib.Path(folder) / "model.keras")
        loaded = keras.models.load_model(pathlib.Path(folder) / "model.keras")
    again = loaded.predict(x, batch_size=37, verbose=0)

    loaded.layers[0].enable_lora(2)
    loaded.compile(keras.optimizers.SGD(0.1), loss)
    tuned = loaded.fit(x, y, batch_size=14, verbose=0)
    return {
        "history": history,
        "tuned": tuned,
        "predictions": [exact, quantized, again],
        "models": [model, loaded],
    }
