"""Fine-tuning with LoRA in three kinds of layers, then merged into the weights."""

from __future__ import annotations

import pathlib
import tempfile
from typing import Any

import keras
import numpy as np
from keras import layers


def build() -> keras.Model:
    """A classifier of short texts."""
    inputs = keras.Input((6,), dtype="int32")
    x = layers.Embedding(15, 8)(inputs)
    x = x + layers.EinsumDense(
        "abc,cd->abd", output_shape=(None, 8), bias_axes="d", activation="tanh"
    )(x)
    x = layers.GlobalAveragePooling1D()(x)
    outputs = layers.Dense(3)(layers.Dense(8, activation="gelu")(x))
    model = keras.Model(inputs, outputs)
    compile_model(model)
    return model


def compile_model(model: keras.Model) -> None:
    """Again after each change of what is trained."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(
        keras.optimizers.AdamW(0.02, epsilon=1e-3), loss, metrics=["accuracy"]
    )


def program() -> Any:
    rng = np.random.default_rng(24)
    x = rng.integers(0, 15, (42, 6)).astype("int32")
    y = (x.sum(axis=1) % 3).astype("int32")
    model = build()
    pretrained = model.fit(x, y, batch_size=16, verbose=0)
    before = [np.array(weight) for weight in model.get_weights()]
    for layer in model.layers:
        if isinstance(layer, (layers.Embedding, layers.EinsumDense, layers.Dense)):
            layer.enable_lora(2)
    compile_model(model)
    tuned = model.fit(x, y, batch_size=16, epochs=2, verbose=0)
    predictions = model.predict(x, batch_size=42, verbose=0)
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "merged.weights.h5"
        model.save_weights(path)
        merged = build()
        merged.load_weights(path)
    again = merged.predict(x, batch_size=42, verbose=0)
    np.testing.assert_allclose(again, predictions, rtol=1e-4, atol=1e-5)
    return {
        "pretrained": pretrained,
        "tuned": tuned,
        "trained": [weight.shape for weight in model.trainable_variables],
        "changed": [
            np.abs(a - b).max()
            for a, b in zip(before, merged.get_weights(), strict=True)
        ],
        "predictions": [predictions, again],
        "model": model,
    }
