"""An actor and a critic, taught by a loop: episodes on the host, updates in `run`."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import layers, ops

import keras_distribute as kd

ACTIONS, GAMMA = 2, 0.95


def episode(act: Any, rng: Any, length: int) -> Any:
    """Keeping a point near zero: states, actions, discounted returns."""
    position, speed = rng.normal(size=2) / 2
    states, actions, rewards = [], [], []
    for _ in range(length):
        state = np.array([position, speed], "float32")
        action = int(rng.random() < act(state)[1])
        speed += 0.3 if action else -0.3
        position += 0.3 * speed
        states.append(state)
        actions.append(action)
        rewards.append(-abs(position))
        if abs(position) > 2:
            break
    returns = np.zeros(len(rewards), "float32")
    total = 0.0
    for step in reversed(range(len(rewards))):
        total = returns[step] = rewards[step] + GAMMA * total
    return np.stack(states), np.array(actions, "int32"), returns


def program() -> Any:
    rng = np.random.default_rng(16)
    strategy = kd.get_strategy()
    inputs = keras.Input((2,))
    common = layers.Dense(12, activation="tanh")(inputs)
    outputs = [
        layers.Dense(ACTIONS, activation="softmax")(common),
        layers.Dense(1)(common),
    ]
    model = keras.Model(inputs, outputs)
    optimizer = keras.optimizers.Adam(0.01, epsilon=1e-3)
    optimizer.build(model.trainable_variables)
    reward = keras.metrics.Mean("reward")
    huber = keras.losses.Huber(reduction="none")

    def train_step(states: Any, actions: Any, returns: Any, count: Any) -> Any:
        def compute_loss() -> Any:
            chances, guesses = model(states)
            chosen = ops.log(
                ops.sum(chances * ops.one_hot(actions, ACTIONS), axis=1) + 1e-6
            )
            advantage = ops.stop_gradient(returns - guesses[:, 0])
            rows = huber(returns[:, None], guesses) - chosen * advantage
            return kd.nn.compute_average_loss(rows, global_batch_size=count)

        loss, gradients = kd.value_and_grad(compute_loss, model.trainable_variables)()
        optimizer.apply_gradients(
            zip(gradients, model.trainable_variables, strict=True)
        )
        reward.update_state(returns)
        return loss

    losses = []
    for index in range(3):
        rollouts = [
            episode(lambda state: np.asarray(model(state[None])[0])[0], rng, 6 + index)
            for _ in range(3)
        ]
        batch = [np.concatenate(part) for part in zip(*rollouts, strict=True)]
        rows = len(batch[0])
        dataset = kd.ArrayDataset(tuple(batch), batch_size=rows)
        for states, actions, returns in strategy.experimental_distribute_dataset(
            dataset
        ):
            loss = strategy.run(train_step, (states, actions, returns, np.int32(rows)))
            losses.append(float(strategy.reduce("SUM", loss, axis=None)))
    return {
        "losses": losses,
        "reward": reward.result(),
        "model": model,
        "optimizer": optimizer,
    }
