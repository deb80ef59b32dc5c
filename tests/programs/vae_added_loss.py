"""A variational autoencoder whose divergence a layer adds to the loss."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import layers, ops


class Sampling(layers.Layer):
    """Draws a latent row and adds the divergence to the loss."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.seed_generator = keras.random.SeedGenerator(7)

    def call(self, mean: Any, log_variance: Any) -> Any:
        kl = -0.5 * ops.mean(
            1 + log_variance - ops.square(mean) - ops.exp(log_variance)
        )
        self.add_loss(kl)
        noise = keras.random.normal(ops.shape(mean), seed=self.seed_generator)
        return mean + ops.exp(0.5 * log_variance) * noise


def program() -> Any:
    x = np.random.default_rng(7).random((39, 12)).astype("float32")

    inputs = keras.Input((12,))
    hidden = layers.Dense(9, activation="gelu")(inputs)
    latent = Sampling(name="latent")(layers.Dense(3)(hidden), layers.Dense(3)(hidden))
    outputs = layers.Dense(12, activation="sigmoid")(
        layers.Dense(9, activation="gelu")(latent)
    )
    vae = keras.Model(inputs, outputs)
    encoder = keras.Model(inputs, latent)
    vae.compile(
        keras.optimizers.Adam(0.01, epsilon=1e-3),
        keras.losses.BinaryCrossentropy(),
        metrics=["mse"],
    )
    history = vae.fit(x, x, batch_size=11, epochs=3, validation_split=0.25, verbose=0)
    return {
        "history": history,
        "evaluation": vae.evaluate(x, x, batch_size=39, return_dict=True, verbose=0),
        "codes": encoder.predict(x, batch_size=39, verbose=0),
        "vae": vae,
    }
