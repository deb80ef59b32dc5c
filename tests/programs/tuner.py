"""A search by KerasTuner for a width and a learning rate."""

from __future__ import annotations

import tempfile
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

keras_tuner = pytest.importorskip("keras_tuner")


def build(hp: Any) -> keras.Model:
    """A model with so many units."""
    model = keras.Sequential([keras.Input((5,))])
    model.add(
        layers.Dense(
            hp.Int("units", 4, 12, step=4),
            activation=hp.Choice("activation", ["tanh", "softplus"]),
        )
    )
    model.add(layers.Dense(3))
    optimizer = keras.optimizers.SGD(hp.Float("rate", 0.05, 0.5, sampling="log"))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
    return model


def program() -> Any:
    rng = np.random.default_rng(22)
    x = rng.normal(size=(41, 5)).astype("float32")
    y = np.argmax(x[:, :3], axis=1).astype("int32")
    with tempfile.TemporaryDirectory() as folder:
        tuner = keras_tuner.RandomSearch(
            build,
            "val_loss",
            max_trials=2,
            seed=1,
            directory=folder,
            project_name="search",
        )
        options = {
            "batch_size": 12,
            "epochs": 2,
            "validation_data": (x[30:], y[30:]),
            "verbose": 0,
        }
        tuner.search(x[:30], y[:30], **options)
        best = tuner.get_best_hyperparameters()[0]
        trials = {
            trial_id: [trial.score, *trial.hyperparameters.values.values()]
            for trial_id, trial in tuner.oracle.trials.items()
        }
        model = tuner.get_best_models()[0]
        predictions = model.predict(x, batch_size=41, verbose=0)
        trained = build(best)
        history = trained.fit(x, y, batch_size=12, verbose=0)
    found = {name: [str(value) for value in values] for name, values in trials.items()}
    scores = [values[0] for values in trials.values()]
    settings = [values[1:] for values in found.values()]
    return {
        "scores": scores,
        "settings": settings,
        "predictions": predictions,
        "history": history,
        "model": trained,
    }
