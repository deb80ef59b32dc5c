"""Deep Q-learning: replayed steps, a target network, and `train_on_batch`."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import layers

CELLS, GAMMA = 6, 0.9


def network() -> keras.Model:
    """The value of both moves in each cell."""
    return keras.Sequential(
        [keras.Input((CELLS,)), layers.Dense(10, activation="tanh"), layers.Dense(2)]
    )


def program() -> Any:
    rng = np.random.default_rng(17)
    online, target = network(), network()
    target.set_weights(online.get_weights())
    online.compile(
        keras.optimizers.Adam(0.02, epsilon=1e-3, clipnorm=1.0),
        keras.losses.Huber(),
        metrics=["mae"],
    )

    one_hot, memory, losses = np.eye(CELLS, dtype="float32"), [], []
    cell = 0
    for step in range(40):
        values = online.predict_on_batch(one_hot[[cell]])[0]
        move = int(rng.integers(2)) if rng.random() < 0.5 else int(np.argmax(values))
        following = min(max(cell + (1 if move else -1), 0), CELLS - 1)
        memory.append((cell, move, float(following == CELLS - 1), following))
        cell = 0 if following == CELLS - 1 else following
        if step % 4 == 3:
            cells, moves, rewards, next_cells = map(
                np.array, zip(*memory[-11:], strict=True)
            )
            rows = np.arange(len(cells))
            wanted = online.predict_on_batch(one_hot[cells]).copy()
            best = target.predict_on_batch(one_hot[next_cells]).max(axis=1)
            wanted[rows, moves] = rewards + GAMMA * best * (1 - rewards)
            weight = np.where(rewards > 0, 2.0, 1.0)
            losses.append(
                online.train_on_batch(one_hot[cells], wanted, sample_weight=weight)
            )
        if step % 8 == 7:
            followed = zip(target.get_weights(), online.get_weights(), strict=True)
            target.set_weights([0.7 * old + 0.3 * new for old, new in followed])
    return {
        "losses": losses,
        "values": online.predict(one_hot, verbose=0),
        "models": [online, target],
    }
