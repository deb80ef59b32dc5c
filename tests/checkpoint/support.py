"""Models with every kind of state, trained a few steps, and all that can be seen of
them, bit for bit.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import keras
import numpy as np
from keras import layers

import keras_distribute as kd
from keras_distribute._compat.checkpoint import stored_array
from keras_distribute.checkpoint.tracking import track
from tests.support import distributed, mirrored

SEED = 7


@functools.cache
def strategy_of(place: int) -> Any:
    """The one strategy of that many replicas: a model stays with the strategy that it
    was made under.
    """
    return mirrored(place)


def scope(place: int) -> Any:
    """The scope of that many replicas; none for plain Keras, which is 0."""
    return strategy_of(place).scope() if place else contextlib.nullcontext()


def data(rows: int = 48) -> tuple[np.ndarray, np.ndarray]:
    """Rows of six numbers and one of three classes each."""
    random = np.random.default_rng(SEED)
    return random.normal(size=(rows, 6)).astype("float32"), random.integers(0, 3, rows)


def optimizer_of(kind: str) -> Any:
    """A new optimizer, by a name for it."""
    o = keras.optimizers
    return {
        "sgd": lambda: o.SGD(0.05, momentum=0.9),
        "adam": lambda: o.Adam(0.02, epsilon=1e-2),
        "loss_scale_ema": lambda: o.LossScaleOptimizer(
            o.AdamW(0.02, epsilon=1e-2, use_ema=True, ema_overwrite_frequency=3),
            dynamic_growth_steps=2,
        ),
        "accumulating": lambda: o.Adam(
            0.02, epsilon=1e-2, gradient_accumulation_steps=4
        ),
    }[kind]()


def build(optimizer: str = "adam", width: int = 5, head: str = "head") -> keras.Model:
    """Moving statistics, two seeds, layers with and without names."""
    model = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(width),
            layers.BatchNormalization(momentum=0.8),
            layers.Dropout(0.3),
            layers.Dense(4, activation="relu"),
            layers.Dropout(0.2),
            layers.Dense(3, name=head),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer_of(optimizer), loss=loss, metrics=["accuracy"])
    return model


def made(
    place: int, optimizer: str = "adam", seed: int = SEED, **options: Any
) -> keras.Model:
    """A model with a fixed initialization, in the scope of `place`."""
    keras.utils.set_random_seed(seed)
    with scope(place):
        return build(optimizer, **options)


def fit(
    model: keras.Model, epochs: int, initial_epoch: int = 0, **options: Any
) -> dict[str, Any]:
    """Epochs of three steps each; the history."""
    x, y = data()
    settings = {"batch_size": 16, "shuffle": False, "verbose": 0} | options
    return model.fit(
        x, y, epochs=epochs, initial_epoch=initial_epoch, **settings
    ).history


def bits(**objects: Any) -> dict[str, np.ndarray]:
    """What every variable holds, each replica's own components included."""
    return {
        name: np.array(stored_array(v)) for name, v in track(objects).variables.items()
    }


def numbers(**objects: Any) -> dict[str, np.ndarray]:
    """What every variable reads as."""
    return {name: np.array(v.value) for name, v in track(objects).variables.items()}


def assert_same_bits(
    actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]
) -> None:
    assert sorted(actual) == sorted(expected)
    different = [
        n
        for n in expected
        if actual[n].tobytes() != expected[n].tobytes()
        or actual[n].dtype != expected[n].dtype
    ]
    assert different == []


def assert_close(
    actual: dict[str, np.ndarray], expected: dict[str, np.ndarray], rtol: float = 1e-6
) -> None:
    assert sorted(actual) == sorted(expected)
    for name, value in expected.items():
        assert actual[name].dtype == value.dtype, name
        np.testing.assert_allclose(
            actual[name], value, rtol=rtol, atol=1e-7, err_msg=name
        )


class Loop:
    """A custom loop over replicas with an optimizer, a metric and a seed of its own."""

    def __init__(self, place: int) -> None:
        keras.utils.set_random_seed(SEED)
        self.strategy = strategy_of(place)
        with self.strategy.scope():
            self.model = build()
            self.optimizer = optimizer_of("adam")
            self.metric = keras.metrics.SparseCategoricalAccuracy()
            self.seed = keras.random.SeedGenerator(3)
            self.count = keras.Variable(
                0.0, synchronization="on_read", aggregation="sum", trainable=False
            )
        self.progress: dict[str, Any] = {"step": 0}
        self.loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @property
    def objects(self) -> dict[str, Any]:
        """What to save."""
        names = ("model", "optimizer", "metric", "seed", "count", "progress")
        return {name: getattr(self, name) for name in names}

    def step(self, x: Any, y: Any) -> Any:
        x = x + 0.1 * keras.random.normal(x.shape, seed=self.seed)

        def loss_of() -> Any:
            predictions = self.model(x, training=True)
            return self.loss(y, predictions), predictions

        (loss, predictions), grads = kd.value_and_grad(
            loss_of, self.model.trainable_variables, has_aux=True
        )()
        self.optimizer.apply(grads, self.model.trainable_variables)
        self.metric.update_state(y, predictions)
        self.count.assign_add(keras.ops.sum(x))
        return loss

    def run(self, steps: int) -> None:
        x, y = data(16)
        replicas = self.strategy.num_replicas_in_sync
        for _ in range(steps):
            parts = [np.split(a, replicas) for a in (x, y.astype("int32"))]
            args = tuple(distributed(self.strategy, each) for each in parts)
            self.strategy.run(self.step, args=args)
            self.progress["step"] += 1
