"""A trained model as a SavedModel: `export`, and an `ExportArchive` of two ends."""

from __future__ import annotations

import pathlib
import tempfile
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

tf = pytest.importorskip("tensorflow")


def program() -> Any:
    x = np.random.default_rng(26).normal(size=(33, 6)).astype("float32")
    inputs = keras.Input((6,))
    features = layers.Dense(4, activation="gelu", name="features")(inputs)
    model = keras.Model(inputs, layers.Dense(2)(features))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    history = model.fit(x, x[:, :2] * 2, batch_size=13, epochs=2, verbose=0)
    predictions = model.predict(x, batch_size=33, verbose=0)
    embedder = keras.Model(inputs, features)

    with tempfile.TemporaryDirectory() as folder:
        exported = str(pathlib.Path(folder) / "exported")
        model.export(exported, verbose=False)
        serving = tf.saved_model.load(exported)
        served = np.asarray(serving.serve(x[:5]))

        archive = keras.export.ExportArchive()
        archive.track(model)
        archive.add_endpoint(
            "predict",
            model,
            input_signature=[keras.InputSpec(shape=(None, 6), dtype="float32")],
        )
        archive.add_endpoint(
            "embed",
            embedder,
            input_signature=[keras.InputSpec(shape=(None, 6), dtype="float32")],
        )
        both = str(pathlib.Path(folder) / "both")
        archive.write_out(both, verbose=False)
        loaded = tf.saved_model.load(both)
        archived, embedded = (
            np.asarray(loaded.predict(x[:5])),
            np.asarray(loaded.embed(x[:5])),
        )
    np.testing.assert_allclose(served, predictions[:5], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(archived, predictions[:5], rtol=1e-5, atol=1e-6)
    return {
        "history": history,
        "served": served,
        "archived": archived,
        "embedded": embedded,
        "model": model,
    }
