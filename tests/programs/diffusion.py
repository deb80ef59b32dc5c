"""A diffusion model, sampled and scored by a running average of its weights."""

from __future__ import annotations

from typing import Any

import jax
import keras
import numpy as np
from keras import layers, ops

SIZE, EMA = 8, 0.8


@keras.saving.register_keras_serializable("programs")
def sinusoidal_embedding(x: Any) -> Any:
    """The variance of the noise as sines and cosines."""
    angles = 2.0 * np.pi * ops.exp(ops.linspace(0.0, 3.0, 4)) * x
    return ops.concatenate([ops.sin(angles), ops.cos(angles)], axis=-1)


def network() -> keras.Model:
    """A small U-Net over noisy images and the variance of their noise."""
    images, variances = keras.Input((SIZE, SIZE, 1)), keras.Input((1, 1, 1))
    e = layers.Lambda(sinusoidal_embedding, output_shape=(1, 1, 8))(variances)
    e = layers.UpSampling2D(SIZE, interpolation="nearest")(e)
    x = layers.Concatenate()([layers.Conv2D(4, 1)(images), e])
    skip = x = layers.Conv2D(6, 3, padding="same", activation="swish")(x)
    x = layers.AveragePooling2D(2)(x)
    x = x + layers.Conv2D(6, 3, padding="same", activation="swish")(x)
    x = layers.UpSampling2D(interpolation="bilinear")(x)
    x = layers.Concatenate()([x, skip])
    outputs = layers.Conv2D(1, 1, kernel_initializer="zeros")(x)
    return keras.Model([images, variances], outputs, name="residual_unet")


class DiffusionModel(keras.Model):
    """Two copies of the network: one that is trained, one that follows it."""

    def __init__(self) -> None:
        super().__init__()
        self.normalizer = layers.Normalization()
        self.network = network()
        self.ema_network = keras.models.clone_model(self.network)
        self.ema_network.set_weights(self.network.get_weights())
        self.ema_network.trainable = False
        self.seed_generator = keras.random.SeedGenerator(19)
        self.noise_loss = keras.metrics.Mean(name="noise_loss")

    @property
    def metrics(self) -> list[Any]:
        return [self.noise_loss]

    def call(self, images: Any, training: bool = False) -> Any:
        """The error of the noise that the network sees in images that got some."""
        images = self.normalizer(images)
        rows = ops.shape(images)[0]
        noises = keras.random.normal(ops.shape(images), seed=self.seed_generator)
        times = keras.random.uniform((rows, 1, 1, 1), seed=self.seed_generator)
        noise_rates, signal_rates = self.rates(times)
        used = self.network if training else self.ema_network
        seen = used(
            [signal_rates * images + noise_rates * noises, noise_rates**2],
            training=training,
        )
        return ops.mean(ops.abs(noises - seen))

    def rates(self, times: Any) -> Any:
        angles = ops.arccos(0.95) + times * (ops.arccos(0.02) - ops.arccos(0.95))
        return ops.sin(angles), ops.cos(angles)

    def _loss(self, trainable: Any, non_trainable: Any, images: Any) -> Any:
        return self.stateless_call(trainable, non_trainable, images, training=True)

    def train_step(self, state: Any, images: Any) -> Any:
        trainable, non_trainable, optimizer, metrics = state
        images = keras.utils.unpack_x_y_sample_weight(images)[0]
        gradient = jax.value_and_grad(self._loss, has_aux=True)
        (loss, non_trainable), gradients = gradient(trainable, non_trainable, images)
        trainable, optimizer = self.optimizer.stateless_apply(
            optimizer, gradients, trainable
        )
        metrics = self.noise_loss.stateless_update_state(metrics, loss)
        new = {
            id(variable): value
            for variable, value in zip(self.trainable_variables, trainable, strict=True)
        }
        places = {
            id(variable): place
            for place, variable in enumerate(self.non_trainable_variables)
        }
        for ours, theirs in zip(
            self.ema_network.weights, self.network.weights, strict=True
        ):
            place = places[id(ours)]
            non_trainable[place] = (
                EMA * non_trainable[place] + (1 - EMA) * new[id(theirs)]
            )
        logs = {"noise_loss": self.noise_loss.stateless_result(metrics)}
        return logs, (trainable, non_trainable, optimizer, metrics)

    def test_step(self, state: Any, images: Any) -> Any:
        trainable, non_trainable, metrics = state
        images = keras.utils.unpack_x_y_sample_weight(images)[0]
        loss, non_trainable = self.stateless_call(
            trainable, non_trainable, images, training=False
        )
        metrics = self.noise_loss.stateless_update_state(metrics, loss)
        return {"noise_loss": self.noise_loss.stateless_result(metrics)}, (
            trainable,
            non_trainable,
            metrics,
        )

    def generate(self, rows: int, steps: int) -> Any:
        """Images out of noise, in so many steps."""
        x = keras.random.normal((rows, SIZE, SIZE, 1), seed=self.seed_generator)
        for step in range(steps):
            times = ops.ones((rows, 1, 1, 1)) - step / steps
            noise_rates, signal_rates = self.rates(times)
            noises = self.ema_network.predict([x, noise_rates**2], verbose=0)
            images = (x - noise_rates * noises) / signal_rates
            next_noise, next_signal = self.rates(times - 1 / steps)
            x = next_signal * images + next_noise * noises
        images = self.normalizer.mean + images * self.normalizer.variance**0.5
        return ops.clip(images, 0.0, 1.0)


def program() -> Any:
    images = np.random.default_rng(18).random((29, SIZE, SIZE, 1)).astype("float32")
    model = DiffusionModel()
    model.normalizer.adapt(images)
    model.compile(
        optimizer=keras.optimizers.AdamW(0.01, weight_decay=1e-4, epsilon=1e-3)
    )
    history = model.fit(images, batch_size=11, epochs=2, verbose=0)
    score = model.evaluate(images, batch_size=29, return_dict=True, verbose=0)
    return {
        "history": history,
        "score": score,
        "generated": model.generate(3, 2),
        "model": model,
    }
