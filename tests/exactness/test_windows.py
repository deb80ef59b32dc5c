"""Sums, products and extremes in windows over the rows of one batch, each with its own
number beyond the first and last row.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import keras
import numpy as np
import pytest
from jax import lax

import keras_distribute as kd

ROWS = np.random.default_rng(0).normal(size=(16, 4)).astype("float32")
CUMULATIVE = lax.cumsum, lax.cumprod, lax.cummax, lax.cummin, lax.cumlogsumexp
POOLS = (0.0, lax.add), (-np.inf, lax.max), (np.inf, lax.min), (1.0, lax.mul)


class Windows(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.built = True

    def call(self, x: Any) -> Any:
        cumulative = [function(x, axis=0) for function in CUMULATIVE]
        pools = [
            lax.reduce_window(x, jnp.float32(first), function, (3, 1), (1, 1), "SAME")
            for first, function in POOLS
        ]
        return jnp.concatenate([*cumulative, *pools], 1)


@pytest.mark.parametrize("options", [{}, {"num_logical_devices": 2}])
@pytest.mark.parametrize("rows", [16, 15])
def test_windows_over_the_rows(rows: int, options: dict[str, Any]) -> None:
    with kd.MirroredStrategy([f"cpu:{i}" for i in range(4)], **options).scope():
        model = Windows()
        model.compile()
    expected = Windows().call(jnp.asarray(ROWS[:rows]))
    found = model.predict_on_batch(ROWS[:rows])
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("replicas", [1, 2])
def test_over_a_dimension_that_logical_devices_divide(replicas: int) -> None:
    """In `run`, whose program XLA divides over the logical devices of a replica."""
    strategy = kd.MirroredStrategy(
        [f"cpu:{i}" for i in range(2 * replicas)], num_logical_devices=2
    )
    rows = ROWS[:8].reshape(1, 8, 4)
    rows = np.concatenate([rows, rows])
    rows[1, 5, 2] = np.nan

    def fn(x: Any) -> Any:
        divided = strategy.experimental_split_to_logical_devices(x, [1, 2, 1])
        return computed(divided)

    def computed(x: Any) -> list[Any]:
        pools = [
            lax.reduce_window(x, jnp.float32(i), f, (1, 3, 1), (1, 1, 1), "SAME")
            for i, f in POOLS
        ]
        cumulative = [function(x, axis=1) for function in CUMULATIVE]
        return [*pools, *cumulative, x.max(1), x.min((0, 1))]

    for result, expected in zip(
        strategy.run(fn, args=(rows,)), computed(jnp.asarray(rows)), strict=True
    ):
        for value in result.values:
            np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6)
