"""A time series in windows, with callbacks that stop, slow down, save and restore."""

from __future__ import annotations

import pathlib
import tempfile
from typing import Any

import keras
import numpy as np
from keras import layers


def program() -> Any:
    rng = np.random.default_rng(32)
    series = np.sin(np.arange(60) / 3)[:, None] + 0.1 * rng.normal(size=(60, 2))
    series = series.astype("float32")

    def windows(first: int, last: int) -> Any:
        part = series[first:last]
        return keras.utils.timeseries_dataset_from_array(
            part[:-4], part[4:, 0], sequence_length=5, sampling_rate=1, batch_size=13
        )

    normalization = layers.Normalization()
    normalization.adapt(series[:40])
    model = keras.Sequential(
        [keras.Input((5, 2)), normalization, layers.GRU(5), layers.Dense(1)]
    )
    model.compile(keras.optimizers.Adam(0.02, epsilon=1e-3), "mae", metrics=["mse"])
    with tempfile.TemporaryDirectory() as folder:
        path = str(pathlib.Path(folder) / "best.weights.h5")
        rates: list[float] = []
        callbacks = [
            keras.callbacks.ModelCheckpoint(
                path, "val_loss", save_weights_only=True, save_best_only=True
            ),
            keras.callbacks.ReduceLROnPlateau("val_loss", min_delta=1.0, patience=1),
            keras.callbacks.EarlyStopping(
                "val_loss", min_delta=0.5, patience=2, restore_best_weights=True
            ),
            keras.callbacks.LambdaCallback(
                on_epoch_end=lambda epoch, logs: rates.append(
                    float(model.optimizer.learning_rate)
                )
            ),
        ]
        history = model.fit(
            windows(0, 40),
            epochs=6,
            validation_data=windows(40, 60),
            callbacks=callbacks,
            verbose=0,
        )
        restored = model.get_weights()
        model.load_weights(path)
    return {
        "history": history,
        "rates": rates,
        "restored": [[weight] for weight in restored],
        "predictions": model.predict(windows(40, 60), verbose=0),
        "model": model,
    }
