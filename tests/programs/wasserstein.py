"""A Wasserstein GAN in a JAX loop: several steps of the critic, a gradient penalty."""

from __future__ import annotations

from typing import Any

import jax
import keras
import numpy as np
from keras import layers, ops

LATENT, CRITIC_STEPS = 3, 3


def program() -> Any:
    rng = np.random.default_rng(15)
    real = rng.normal(2.0, 0.5, (33, 4)).astype("float32")
    generator = keras.Sequential(
        [
            keras.Input((LATENT,)),
            layers.Dense(8, activation="softplus"),
            layers.Dense(4),
        ]
    )
    critic = keras.Sequential(
        [keras.Input((4,)), layers.Dense(8, activation="softplus"), layers.Dense(1)]
    )
    optimizers = [
        keras.optimizers.Adam(0.005, beta_1=0.5, beta_2=0.9, epsilon=1e-3)
        for _ in range(2)
    ]
    optimizers[0].build(generator.trainable_variables)
    optimizers[1].build(critic.trainable_variables)

    def score(weights: Any, rows: Any) -> Any:
        return critic.stateless_call(weights, [], rows)[0][:, 0]

    def draw(weights: Any, noise: Any) -> Any:
        return generator.stateless_call(weights, [], noise)[0]

    def critic_loss(weights: Any, fake: Any, rows: Any, mixture: Any) -> Any:
        between = mixture * rows + (1 - mixture) * fake
        slopes = jax.vmap(jax.grad(lambda row: score(weights, row[None])[0]))(between)
        penalty = ops.mean(
            ops.square(ops.sqrt(ops.sum(ops.square(slopes), axis=1)) - 1)
        )
        return (
            ops.mean(score(weights, fake))
            - ops.mean(score(weights, rows))
            + 10 * penalty
        )

    def generator_loss(weights: Any, judge: Any, noise: Any) -> Any:
        return -ops.mean(score(judge, draw(weights, noise)))

    @jax.jit
    def train_step(state: Any, rows: Any, noise: Any, mixture: Any) -> Any:
        drawn, judge, drawn_slots, judge_slots = state
        for step in range(CRITIC_STEPS):
            fake = draw(drawn, noise[step])
            loss, gradients = jax.value_and_grad(critic_loss)(
                judge, fake, rows, mixture[step]
            )
            judge, judge_slots = optimizers[1].stateless_apply(
                judge_slots, gradients, judge
            )
        fooled, gradients = jax.value_and_grad(generator_loss)(drawn, judge, noise[-1])
        drawn, drawn_slots = optimizers[0].stateless_apply(
            drawn_slots, gradients, drawn
        )
        return (loss, fooled), (drawn, judge, drawn_slots, judge_slots)

    variables = [
        generator.trainable_variables,
        critic.trainable_variables,
        *(one.variables for one in optimizers),
    ]
    state = tuple([variable.value for variable in group] for group in variables)
    losses = []
    for start in range(0, len(real), 12):
        rows = real[start : start + 12]
        noise = rng.normal(size=(CRITIC_STEPS + 1, len(rows), LATENT)).astype("float32")
        mixture = rng.random((CRITIC_STEPS, len(rows), 1)).astype("float32")
        step_losses, state = train_step(state, rows, noise, mixture)
        losses.append([float(loss) for loss in step_losses])
    for group, values in zip(variables, state, strict=True):
        for variable, value in zip(group, values, strict=True):
            variable.assign(value)
    drawn = generator.predict(rng.normal(size=(9, LATENT)), verbose=0)
    return {
        "losses": losses,
        "drawn": drawn,
        "models": [generator, critic],
        "optimizers": optimizers,
    }
