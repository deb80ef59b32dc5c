"""A library's model that overrides how `fit` takes its state and gives it back."""

from __future__ import annotations

from typing import Any

import jax
import keras
import numpy as np
from keras import layers, ops

LATENT = 2


class TwoOptimizers(keras.Model):
    """The state of a step has the variables of all `optimizers`."""

    optimizers: list[Any]

    @property
    def optimizer_variables(self) -> list[Any]:
        return [
            variable
            for optimizer in self.optimizers
            for variable in optimizer.variables
        ]

    def _get_jax_state(
        self,
        trainable_variables: bool = False,
        non_trainable_variables: bool = False,
        optimizer_variables: bool = False,
        metrics_variables: bool = False,
        purge_model_variables: bool = False,
    ) -> Any:
        groups = []
        if trainable_variables:
            groups.append(self.trainable_variables)
        if non_trainable_variables:
            groups.append(self.non_trainable_variables)
        if optimizer_variables:
            groups.append(self.optimizer_variables)
        if metrics_variables:
            groups.append(self.metrics_variables)
        state = tuple([variable.value for variable in group] for group in groups)
        if purge_model_variables:
            for group in groups:
                for variable in group:
                    variable._value = None
        return state

    def jax_state_sync(self) -> None:
        if not getattr(self, "_jax_state", None) or self._jax_state_synced:
            return
        for name in (
            "trainable_variables",
            "non_trainable_variables",
            "optimizer_variables",
            "metrics_variables",
        ):
            values = self._jax_state.get(name, None)
            if values:
                for variable, value in zip(getattr(self, name), values):  # noqa: B905
                    variable.assign(value)
        self._jax_state_synced = True

    def _get_state_sharding_spec(self) -> Any:
        groups = [
            self.trainable_variables,
            self.non_trainable_variables,
            self.optimizer_variables,
        ]
        return tuple(
            [variable.value.sharding for variable in group]
            for group in [*groups, self.metrics_variables]
        )


class Imputer(TwoOptimizers):
    """Fills in what is missing in a table, against one that guesses what was."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.generator = keras.Sequential(
            [layers.Dense(8, activation="relu"), layers.Dense(width)]
        )
        self.discriminator = keras.Sequential(
            [layers.Dense(8, activation="relu"), layers.Dense(width)]
        )
        self.generator_tracker = keras.metrics.Mean(name="generator_loss")
        self.discriminator_tracker = keras.metrics.Mean(name="discriminator_loss")
        self.width = width

    def build(self, input_shape: Any) -> None:
        self.generator.build((None, 2 * self.width))
        self.discriminator.build((None, self.width))
        self.optimizers[0].build(self.generator.trainable_variables)
        self.optimizers[1].build(self.discriminator.trainable_variables)
        self.built = True

    def compile(self, generator_optimizer: Any, discriminator_optimizer: Any) -> None:
        super().compile(optimizer=None)
        self.optimizers = [generator_optimizer, discriminator_optimizer]

    @property
    def metrics(self) -> list[Any]:
        return [self.generator_tracker, self.discriminator_tracker]

    def call(self, x: Any) -> Any:
        known = ops.cast(~ops.isnan(x), "float32")
        filled = ops.where(ops.isnan(x), 0.0, x)
        drawn = self.generator(ops.concatenate([filled, known], axis=-1))
        return known * filled + (1 - known) * drawn

    def train_step(self, state: Any, data: Any) -> Any:
        trainable, non_trainable, optimizer, metrics = state
        x = keras.utils.unpack_x_y_sample_weight(data)[0]
        known = ops.cast(~ops.isnan(x), "float32")
        filled = ops.where(ops.isnan(x), 0.0, x)
        split, slots = (
            len(self.generator.trainable_variables),
            len(self.optimizers[0].variables),
        )

        def drawn(generator: Any) -> Any:
            inputs = ops.concatenate([filled, known], axis=-1)
            return self.generator.stateless_call(generator, [], inputs)[0]

        def guesses(discriminator: Any, generator: Any) -> Any:
            imputed = known * filled + (1 - known) * drawn(generator)
            return ops.sigmoid(
                self.discriminator.stateless_call(discriminator, [], imputed)[0]
            )

        def discriminator_loss(discriminator: Any, generator: Any) -> Any:
            return ops.mean(
                keras.losses.binary_crossentropy(
                    known, guesses(discriminator, generator)
                )
            )

        def generator_loss(generator: Any, discriminator: Any) -> Any:
            fooled = -ops.mean(
                (1 - known) * ops.log(guesses(discriminator, generator) + 1e-6)
            )
            distance = ops.sum(known * ops.square(filled - drawn(generator))) / ops.sum(
                known
            )
            return fooled + 10.0 * distance

        generator, discriminator = trainable[:split], trainable[split:]
        d_loss, gradients = jax.value_and_grad(discriminator_loss)(
            discriminator, generator
        )
        discriminator, second = self.optimizers[1].stateless_apply(
            optimizer[slots:], gradients, discriminator
        )
        g_loss, gradients = jax.value_and_grad(generator_loss)(generator, discriminator)
        generator, first = self.optimizers[0].stateless_apply(
            optimizer[:slots], gradients, generator
        )

        g_state = self.generator_tracker.stateless_update_state(metrics[:2], g_loss)
        d_state = self.discriminator_tracker.stateless_update_state(metrics[2:], d_loss)
        logs = {
            "generator_loss": self.generator_tracker.stateless_result(g_state),
            "discriminator_loss": self.discriminator_tracker.stateless_result(d_state),
        }
        state = (
            [*generator, *discriminator],
            non_trainable,
            [*first, *second],
            [*g_state, *d_state],
        )
        return logs, state


def program() -> Any:
    rng = np.random.default_rng(14)
    x = rng.normal(size=(40, 5)).astype("float32")
    x[rng.random(x.shape) < 0.2] = np.nan
    imputer = Imputer(5)
    optimizers = [keras.optimizers.Adam(0.01, epsilon=1e-3) for _ in range(2)]
    imputer.compile(*optimizers)
    history = imputer.fit(x, batch_size=17, epochs=3, shuffle=True, verbose=0)
    imputed = imputer.predict(x, batch_size=40, verbose=0)
    return {
        "history": history,
        "imputed": imputed,
        "model": imputer,
        "optimizers": optimizers,
    }
