"""An extreme over the rows of a batch is NaN where one of them is, on whatever replica,
in each kind of step.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from jax import lax

import keras_distribute as kd

ROWS = np.arange(32.0, dtype="float32").reshape(16, 2)
ROWS[5] = np.nan


def _extremes(x: Any) -> dict[str, Any]:
    x = x[0] if isinstance(x, tuple) else x
    most = jax.jit(lambda x: x.max(0))
    whole = x[: len(x) // 2 * 2]
    return {
        "max": jnp.max(x),
        "min": jnp.min(x, 0)[1],
        "moved": jnp.max(x.T, 1)[0],
        "in halves": whole.reshape(2, -1, 2).max(1).sum(),
        "in pairs": whole.reshape(-1, 2, 2).max(1).sum(),
        "half": jnp.max(x.astype("bfloat16")).astype("float32"),
        "of segments": jax.ops.segment_max(x[:, 0], jnp.arange(len(x)) % 3, 3).sum(),
        "least of segments": jnp.zeros(2).at[jnp.arange(len(x)) % 2].min(x[:, 0])[1],
        "by a function": lax.reduce(x, -np.inf, lambda a, b: jnp.maximum(a, b), (0,))[
            1
        ],
        "of sizes": lax.reduce(x, 0.0, lambda a, b: jnp.maximum(abs(a), abs(b)), (0,))[
            0
        ],
        "called": most(x)[0],
        "in a branch": lax.cond(x.shape[0] > 1, most, lambda x: x[0], x)[1],
        "in a loop": lax.scan(lambda _, y: (y.min(), None), x[0, 0], x.T[None])[0],
    }


class Model(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def test_step(self, state: Any, data: Any) -> Any:
        logs, state = super().test_step(state, data)
        return {**logs, **_extremes(data)}, state

    def predict_step(self, state: Any, data: Any) -> Any:
        _, state = super().predict_step(state, data)
        return _extremes(data), state

    def train_step(self, state: Any, data: Any) -> Any:
        logs, state = super().train_step(state, data)
        return {**logs, **_extremes(data)}, state


@pytest.mark.parametrize("options", [{}, {"num_logical_devices": 2}])
@pytest.mark.parametrize("rows", [16, 15])
def test_nans_are_seen(rows: int, options: dict[str, Any]) -> None:
    devices = [f"cpu:{i}" for i in range(4)]
    with kd.MirroredStrategy(devices, **options).scope():
        model = Model()
        model.compile("sgd", "mse")
    x = ROWS[:rows]
    for logs in (
        model.test_on_batch(x, x[:, :1], return_dict=True),
        model.predict_on_batch(x),
        model.train_on_batch(x, x[:, :1], return_dict=True),
    ):
        numbers = {name: float(value) for name, value in logs.items()}
        assert all(map(np.isnan, numbers.values())), numbers


def test_others_are_as_they_were() -> None:
    with kd.MirroredStrategy([f"cpu:{i}" for i in range(4)]).scope():
        model = Model()
        model.compile("sgd", "mse")
    for rows in (np.arange(32.0, dtype="float32").reshape(16, 2), -ROWS[6:]):
        found = model.predict_on_batch(rows)
        assert found["max"] == rows.max() and found["min"] == rows[:, 1].min()
