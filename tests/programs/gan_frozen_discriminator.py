"""A GAN of two compiled models that share a discriminator, by `train_on_batch`."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import layers

LATENT = 4


def program() -> Any:
    rng = np.random.default_rng(13)
    images = np.tanh(rng.normal(0.5, 0.4, (35, 6, 6, 1))).astype("float32")

    generator = keras.Sequential(
        [
            keras.Input((LATENT,)),
            layers.Dense(3 * 3 * 4, activation="relu"),
            layers.Reshape((3, 3, 4)),
            layers.Conv2DTranspose(1, 4, strides=2, padding="same", activation="tanh"),
        ]
    )
    discriminator = keras.Sequential(
        [
            keras.Input((6, 6, 1)),
            layers.Conv2D(4, 3, strides=2),
            layers.LeakyReLU(0.2),
            layers.Flatten(),
            layers.Dense(1),
        ]
    )
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    discriminator.compile(
        keras.optimizers.Adam(0.005, epsilon=1e-3), loss, metrics=["mae"]
    )
    discriminator.trainable = False
    inputs = keras.Input((LATENT,))
    combined = keras.Model(inputs, discriminator(generator(inputs)))
    combined.compile(keras.optimizers.Adam(0.005, epsilon=1e-3), loss)

    losses = []
    for _ in range(2):
        for start in range(0, len(images), 13):
            real = images[start : start + 13]
            noise = rng.normal(size=(len(real), LATENT)).astype("float32")
            fake = generator.predict_on_batch(noise)
            labels = np.concatenate([np.ones((len(real), 1)), np.zeros((len(real), 1))])
            discriminator.trainable = True
            judged = discriminator.train_on_batch(
                np.concatenate([real, fake]), labels, return_dict=True
            )
            discriminator.trainable = False
            fooled = combined.train_on_batch(
                noise, np.ones((len(real), 1)), return_dict=True
            )
            losses.append(
                [float(judged["loss"]), float(judged["mae"]), float(fooled["loss"])]
            )
    scores = discriminator.predict(images, batch_size=35, verbose=0)
    return {
        "losses": losses,
        "scores": scores,
        "models": [generator, discriminator, combined],
    }
