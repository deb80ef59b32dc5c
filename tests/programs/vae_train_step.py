"""A variational autoencoder with its own `train_step`, and two losses as metrics."""

from __future__ import annotations

from typing import Any

import jax
import keras
import numpy as np
from keras import layers, ops


class Sampling(layers.Layer):
    """Draws from the normal distribution of a mean and a log variance."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.seed_generator = keras.random.SeedGenerator(1337)

    def call(self, inputs: Any) -> Any:
        mean, log_variance = inputs
        noise = keras.random.normal(ops.shape(mean), seed=self.seed_generator)
        return mean + ops.exp(0.5 * log_variance) * noise


def encoder_network() -> keras.Model:
    """An image to the mean, the log variance, and a sample."""
    inputs = keras.Input((8, 8, 1))
    x = layers.Conv2D(4, 3, activation="relu", strides=2, padding="same")(inputs)
    x = layers.Dense(8, activation="relu")(layers.Flatten()(x))
    mean, log_variance = (
        layers.Dense(2, name="mean")(x),
        layers.Dense(2, name="log_variance")(x),
    )
    return keras.Model(
        inputs, [mean, log_variance, Sampling()([mean, log_variance])], name="encoder"
    )


def decoder_network() -> keras.Model:
    """The sample to an image."""
    inputs = keras.Input((2,))
    x = layers.Reshape((4, 4, 4))(layers.Dense(64, activation="relu")(inputs))
    x = layers.Conv2DTranspose(4, 3, activation="relu", strides=2, padding="same")(x)
    outputs = layers.Conv2DTranspose(1, 3, activation="sigmoid", padding="same")(x)
    return keras.Model(inputs, outputs, name="decoder")


class VAE(keras.Model):
    """Reconstruction, summed over pixels, and the divergence from a normal."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = encoder_network(), decoder_network()
        self.trackers = [
            keras.metrics.Mean(name=name) for name in ("loss", "reconstruction", "kl")
        ]

    @property
    def metrics(self) -> list[Any]:
        return self.trackers

    def call(self, inputs: Any) -> Any:
        mean, log_variance, sample = self.encoder(inputs)
        return mean, log_variance, self.decoder(sample)

    def _both_losses(self, trainable: Any, non_trainable: Any, images: Any) -> Any:
        outputs, non_trainable = self.stateless_call(trainable, non_trainable, images)
        mean, log_variance, image = outputs
        crossentropy = keras.losses.binary_crossentropy(images, image)
        reconstruction = ops.mean(ops.sum(crossentropy, axis=(1, 2)))
        divergence = -0.5 * (
            1 + log_variance - ops.square(mean) - ops.exp(log_variance)
        )
        kl = ops.mean(ops.sum(divergence, axis=1))
        return reconstruction + kl, (reconstruction, kl, non_trainable)

    def train_step(self, state: Any, data: Any) -> Any:
        trainable, non_trainable, optimizer, metrics = state
        gradient = jax.value_and_grad(self._both_losses, has_aux=True)
        images = keras.utils.unpack_x_y_sample_weight(data)[0]
        (total, (*parts, non_trainable)), gradients = gradient(
            trainable, non_trainable, images
        )
        trainable, optimizer = self.optimizer.stateless_apply(
            optimizer, gradients, trainable
        )
        logs, updated = {}, []
        for tracker, value in zip(self.trackers, [total, *parts], strict=True):
            mine = metrics[len(updated) : len(updated) + len(tracker.variables)]
            mine = tracker.stateless_update_state(mine, value)
            logs[tracker.name] = tracker.stateless_result(mine)
            updated += mine
        return logs, (trainable, non_trainable, optimizer, updated)


def program() -> Any:
    images = np.random.default_rng(6).random((41, 8, 8, 1)).astype("float32")
    vae = VAE()
    vae.compile(optimizer=keras.optimizers.Adam(0.005, epsilon=1e-3))
    history = vae.fit(images, epochs=2, batch_size=12, verbose=0)
    mean, _, _ = vae.encoder.predict(images, batch_size=41, verbose=0)
    return {
        "history": history,
        "mean": mean,
        "image": vae.decoder.predict(np.ones((3, 2)), verbose=0),
        "vae": vae,
    }
