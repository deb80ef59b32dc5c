"""A GAN trained by one `train_step` with two optimizers, one of them its own."""

from __future__ import annotations

from typing import Any

import jax
import keras
import numpy as np
from keras import layers, ops

LATENT = 3


def logits_loss(labels: Any, logits: Any) -> Any:
    """The mean cross-entropy."""
    return ops.mean(keras.losses.binary_crossentropy(labels, logits, from_logits=True))


class GAN(keras.Model):
    """The slots of the second optimizer are weights that are not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = keras.Sequential(
            [
                keras.Input((LATENT,)),
                layers.Dense(9),
                layers.LeakyReLU(0.2),
                layers.Dense(5),
            ],
            name="generator",
        )
        self.discriminator = keras.Sequential(
            [
                keras.Input((5,)),
                layers.Dense(9),
                layers.LeakyReLU(0.2),
                layers.Dropout(0.2),
                layers.Dense(1),
            ],
            name="discriminator",
        )
        self.seed_generator = keras.random.SeedGenerator(31)
        self.built = True

    def compile(self, generator_optimizer: Any, discriminator_optimizer: Any) -> None:
        super().compile(optimizer=generator_optimizer)
        generator_optimizer.build(self.generator.trainable_variables)
        discriminator_optimizer.build(self.discriminator.trainable_variables)
        self.discriminator_optimizer = discriminator_optimizer
        self.discriminator_slots = list(discriminator_optimizer.variables)
        self.generator_loss = keras.metrics.Mean(name="generator_loss")
        self.discriminator_loss = keras.metrics.Mean(name="discriminator_loss")

    def call(self, noise: Any) -> Any:
        return self.generator(noise)

    @property
    def metrics(self) -> list[Any]:
        return [self.generator_loss, self.discriminator_loss]

    def train_step(self, state: Any, data: Any) -> Any:
        trainable, non_trainable, optimizer, metrics = state
        images = keras.utils.unpack_x_y_sample_weight(data)[0]
        rows = ops.shape(images)[0]
        places = {
            id(variable): index
            for index, variable in enumerate(self.non_trainable_variables)
        }
        split = len(self.generator.trainable_variables)
        generator, discriminator = trainable[:split], trainable[split:]
        dropout = [
            places[id(variable)]
            for variable in self.discriminator.non_trainable_variables
        ]
        slots = [places[id(variable)] for variable in self.discriminator_slots]
        seed = places[id(self.seed_generator.state)]

        scope = keras.StatelessScope([(self.seed_generator.state, non_trainable[seed])])
        with scope:
            noise = keras.random.normal((2, rows, LATENT), seed=self.seed_generator)
        non_trainable[seed] = scope.get_current_value(self.seed_generator.state)

        def judge(
            discriminator: Any, masks: Any, fake: Any, labels: Any, real: Any = None
        ) -> Any:
            batch = fake if real is None else ops.concatenate([fake, real])
            logits, masks = self.discriminator.stateless_call(
                discriminator, masks, batch, training=True
            )
            return logits_loss(labels, logits), masks

        def fool(generator: Any, masks: Any) -> Any:
            fake, _ = self.generator.stateless_call(generator, [], noise[1])
            return judge(discriminator, masks, fake, ops.zeros((rows, 1)))

        fake, _ = self.generator.stateless_call(generator, [], noise[0])
        labels = ops.concatenate([ops.ones((rows, 1)), ops.zeros((rows, 1))])
        masks = [non_trainable[place] for place in dropout]
        (d_loss, masks), gradients = jax.value_and_grad(judge, has_aux=True)(
            discriminator, masks, fake, labels, images
        )
        discriminator, new_slots = self.discriminator_optimizer.stateless_apply(
            [non_trainable[place] for place in slots], gradients, discriminator
        )
        (g_loss, masks), gradients = jax.value_and_grad(fool, has_aux=True)(
            generator, masks
        )
        generator, optimizer = self.optimizer.stateless_apply(
            optimizer, gradients, generator
        )
        for place, value in zip([*dropout, *slots], [*masks, *new_slots], strict=True):
            non_trainable[place] = value

        half = len(self.generator_loss.variables)
        first = self.generator_loss.stateless_update_state(metrics[:half], g_loss)
        second = self.discriminator_loss.stateless_update_state(metrics[half:], d_loss)
        logs = {
            "generator_loss": self.generator_loss.stateless_result(first),
            "discriminator_loss": self.discriminator_loss.stateless_result(second),
        }
        return logs, (
            [*generator, *discriminator],
            non_trainable,
            optimizer,
            [*first, *second],
        )


class Monitor(keras.callbacks.Callback):
    """Draws with the generator after each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[Any] = []

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        noise = keras.random.normal((2, LATENT), seed=keras.random.SeedGenerator(epoch))
        self.drawn.append(np.asarray(self.model.generator(noise)))


def program() -> Any:
    images = np.random.default_rng(11).normal(1.0, 0.5, (46, 5)).astype("float32")
    gan, monitor = GAN(), Monitor()
    gan.compile(
        generator_optimizer=keras.optimizers.Adam(0.01, beta_1=0.5, epsilon=1e-3),
        discriminator_optimizer=keras.optimizers.RMSprop(0.01, epsilon=1e-3),
    )
    history = gan.fit(images, batch_size=18, epochs=2, callbacks=[monitor], verbose=0)
    noise = np.random.default_rng(12).normal(size=(7, LATENT))
    return {
        "history": history,
        "drawn": monitor.drawn,
        "images": gan.predict(noise, verbose=0),
        "gan": gan,
    }
