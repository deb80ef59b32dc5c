"""Models whose steps run out of memory beyond a number of rows, and their state."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

import keras_distribute as kd

ABSURD = 2**48  # Elements; four bytes of each are more than any machine has.
X = np.random.default_rng(0).normal(size=(96, 16)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


class Hungry(keras.layers.Layer):
    """Allocates an absurd array where a batch has more than `most` rows."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def call(self, x: Any) -> Any:
        if x.shape[0] <= self._most:
            return x
        first = jax.lax.stop_gradient(x)[0, 0].astype("int32")
        absurd = jnp.sort(jax.lax.iota("int32", ABSURD) * first)
        return x + absurd[0].astype("float32")

    def compute_output_shape(self, input_shape: Any) -> Any:
        return input_shape


def build(*more: keras.layers.Layer, **options: Any) -> keras.Model:
    layers = [
        keras.layers.Dense(8, "relu"),
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.2),
        keras.layers.Dense(1),
    ]
    model = keras.Sequential([keras.Input((16,)), *more, *layers])
    model.compile("adam", "mse", metrics=["mae"], **options)
    return model


def trained(strategy: kd.Strategy | None, *more: Any, **options: Any) -> keras.Model:
    """A model that has taken some steps."""
    keras.utils.set_random_seed(7)
    if strategy is None:
        model = build(*more, **options)
    else:
        with strategy.scope():
            model = build(*more, **options)
    model.fit(X[:16], Y[:16], batch_size=8, shuffle=False, verbose=0)
    return model


def bits(model: keras.Model) -> list[bytes]:
    """All that a step changes, as each device has it."""
    variables = [
        *model.trainable_variables,
        *model.non_trainable_variables,
        *model.optimizer.variables,
        *model.metrics_variables,
    ]
    arrays = [getattr(v, "stored", v.value) for v in variables]
    return [
        np.asarray(shard.data).tobytes()
        for array in arrays
        for shard in array.addressable_shards
    ]
