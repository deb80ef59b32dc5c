"""Reads and writes Keras's files without `keras_distribute`: `python plain_keras.py
FOLDER PLACE...`.

For each folder `FOLDER/PLACE` it loads each file there, and writes what the models hold
and predict to `FOLDER/loaded.pickle`. Then it trains, and writes the same files to
`FOLDER/plain`. Used by test_keras_files.
"""

from __future__ import annotations

import os
import pathlib
import pickle
import sys
from typing import Any

os.environ["KERAS_BACKEND"] = "jax"
import keras
import numpy as np
from keras import layers

BEST, ORBAX = "best.keras", "orbax"
FILES = ("model.keras", "model.weights.h5", "sharded.weights.json", BEST, ORBAX)


def rows() -> tuple[np.ndarray, np.ndarray]:
    """Rows of six numbers and one of three classes each; 22 of them."""
    random = np.random.default_rng(5)
    return random.normal(size=(22, 6)).astype("float32"), random.integers(0, 3, 22)


def build() -> keras.Model:
    """Moving statistics, a seed, an optimizer with two slots.

    A functional model: Keras 3.15 loads nothing into a `Sequential` from an Orbax
    checkpoint, and does not say so, since its variables have other paths once it is
    loaded.
    """
    inputs = x = keras.Input((6,))
    x = layers.Dense(5, name="hidden")(x)
    x = layers.BatchNormalization(name="normalization")(x)
    x = layers.Dropout(0.2, name="dropout")(x)
    model = keras.Model(inputs, layers.Dense(3, name="head")(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.02), loss, metrics=["accuracy"])
    return model


def train_and_save(model: keras.Model, folder: pathlib.Path) -> dict[str, Any]:
    """Two epochs of three steps, with Keras's callbacks, and every kind of file; what
    the model then is.
    """
    folder.mkdir()
    x, y = rows()
    c = keras.callbacks
    best = c.ModelCheckpoint(
        folder / BEST,
        monitor="loss",
        mode="max",
        save_best_only=True,
        save_freq="epoch",
    )
    saving = [best, c.OrbaxCheckpoint(str(folder / ORBAX))]
    model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0, callbacks=saving)
    model.save(folder / "model.keras")
    model.save_weights(folder / "model.weights.h5")
    # Several files, even of this model.
    model.save_weights(folder / "sharded.weights.json", max_shard_size=3e-7)
    return seen_of(model)


def seen_of(model: keras.Model) -> dict[str, Any]:
    """Weights and optimizer state by path, and predictions."""
    variables = [*model.weights, *model.optimizer.variables]
    return {
        "variables": [np.array(v) for v in variables],
        "predictions": model.predict(rows()[0], verbose=0),
    }


def load(path: pathlib.Path) -> keras.Model:
    """The model in a file, or a new one with the weights in it."""
    if ".weights." not in path.name:
        return keras.models.load_model(path)
    model = build()
    model.optimizer.build(model.trainable_variables)
    model.load_weights(path)
    return model


def main() -> None:
    folder = pathlib.Path(sys.argv[1])
    loaded = {
        place: {
            name: seen_of(load(folder / place / name))
            for name in FILES
            if (folder / place / name).exists()
        }
        for place in sys.argv[2:]
    }
    (folder / "loaded.pickle").write_bytes(pickle.dumps(loaded))
    (folder / "plain.pickle").write_bytes(
        pickle.dumps(train_and_save(build(), folder / "plain"))
    )
    assert "keras_distribute" not in sys.modules


if __name__ == "__main__":
    main()
