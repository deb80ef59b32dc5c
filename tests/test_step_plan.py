"""Which training step a model has, and what keeps it from the faster one: as users are
told.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import keras
import numpy as np
import pytest
from keras import layers

import keras_distribute as kd

LOCAL = "The training step computes the gradients of each replica's rows, and sums them"
GLOBAL = "The training step runs over the global batch, because "
X = np.ones((8, 3), "float32")


class Centred(layers.Layer):
    def call(self, x: Any) -> Any:
        return x - keras.ops.mean(x, 0)


class Mixing(layers.Layer):
    """Too large to be gathered."""

    def call(self, x: Any) -> Any:
        return keras.ops.cumsum(keras.ops.tile(x, (1, 20_000)), 0)[:, :3]


class Subclassed(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.dense = layers.Dense(1)

    def call(self, x: Any) -> Any:
        return self.dense(x)


class OwnStep(keras.Sequential):
    def train_step(self, *args: Any) -> Any:
        return super().train_step(*args)


def sequential(*inside: Any, model: Any = keras.Sequential, **more: Any) -> Any:
    made = model([keras.Input((3,)), *inside, layers.Dense(1)])
    made.compile(**{"optimizer": "sgd", "loss": "mse"} | more)
    return made


def subclassed() -> Any:
    model = Subclassed()
    model.compile("sgd", "mse")
    model.build((None, 3))
    return model


def scaled() -> Any:
    inner = keras.optimizers.SGD(0.1)
    return keras.optimizers.LossScaleOptimizer(inner, initial_scale=8.0)


def accumulating() -> Any:
    return keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)


MODELS: dict[str, tuple[Callable[[], Any], str]] = {
    "built-in layers": (lambda: sequential(layers.Dense(4)), LOCAL),
    "accumulation": (
        lambda: sequential(optimizer=accumulating()),
        "The training step adds up the gradients of each replica's rows on the replica",
    ),
    "a layer of one's own": (lambda: sequential(Centred()), LOCAL),
    "a subclassed model": (subclassed, LOCAL),
    "an own step": (lambda: sequential(model=OwnStep), LOCAL),
    "random numbers": (lambda: sequential(layers.Dropout(0.5)), LOCAL),
    "a scaled loss": (lambda: sequential(optimizer=scaled()), LOCAL),
    "operation by operation": (
        lambda: sequential(run_eagerly=True),
        "The training step runs operation by operation, since the model is compiled",
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_summary_says_which_step_a_model_has(name: str) -> None:
    make, text = MODELS[name]
    strategy = kd.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        model = make()
    summary = strategy.summary(model)
    assert [step.startswith(text) for step in summary.training_steps] == [True]
    for shown in (summary.text(), summary._repr_html_()):
        assert text.split("`")[0].replace("'", "") in shown.replace(
            "&#x27;", ""
        ).replace("'", "")


def test_one_replica_has_the_step_of_one_device() -> None:
    strategy = kd.MirroredStrategy(["cpu:0"])
    with strategy.scope():
        model = sequential()
    assert strategy.summary(model).training_steps == (
        "The training step is that of one device.",
    )


def test_nothing_is_said_of_what_has_no_training_step() -> None:
    strategy = kd.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), layers.Dense(1)])
        unbuilt = keras.Sequential([layers.Dense(1)])
        unbuilt.compile("sgd", "mse")
    assert strategy.summary(model, unbuilt, model.weights[0]).training_steps == ()


UNLESS = "unless an operation mixes rows, which the first batch shows."


@pytest.mark.parametrize(
    "name", [n for n, (_, text) in MODELS.items() if text == LOCAL]
)
def test_the_first_batch_shows_that_it_is_so(name: str) -> None:
    strategy = kd.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        model = MODELS[name][0]()
    assert strategy.summary(model).training_steps[0].endswith(UNLESS)
    model.fit(X, X[:, :1], batch_size=4, verbose=0)
    assert strategy.summary(model).training_steps == (f"{LOCAL} once.",)


def test_what_mixes_rows_is_named() -> None:
    strategy = kd.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        model = sequential(Mixing(name="mine"))
    model.fit(X, X[:, :1], batch_size=4, verbose=0)
    assert strategy.summary(model).training_steps == (
        f"{GLOBAL}the operation `cumsum` in `mine` mixes rows. Faster: operations on "
        "each row alone.",
    )


class Printing(layers.Layer):
    """Shows Python what it is given."""

    def call(self, inputs: Any) -> Any:
        jax.debug.callback(lambda rows: shown.append(len(rows)), inputs)
        return inputs


shown: list[int] = []


def test_what_shows_python_the_rows_is_named() -> None:
    strategy = kd.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        model = sequential(Printing(name="mine"))
    model.fit(X, X[:, :1], batch_size=4, verbose=0)
    jax.effects_barrier()
    assert set(shown) == {4}
    assert strategy.summary(model).training_steps == (
        f"{GLOBAL}the operation `debug_callback` in `mine` shows Python the rows of "
        "all. Faster: a step without it.",
    )


def test_what_mixed_rows_is_forgotten_when_the_model_is_compiled_again() -> None:
    def mixing(y: Any, prediction: Any) -> Any:
        rows = keras.ops.cumsum(keras.ops.tile(prediction, (1, 20_000)), 0)
        return keras.ops.mean(rows - y, -1) ** 2

    strategy = kd.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        model = sequential(loss=mixing)
    model.fit(X, X[:, :1], batch_size=4, verbose=0)
    assert strategy.summary(model).training_steps[0].startswith(GLOBAL)
    model.compile("sgd", "mse")
    assert strategy.summary(model).training_steps[0].endswith(UNLESS)


def test_the_report_of_step_times_says_it_too() -> None:
    with kd.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        model = sequential(Mixing(name="mine"))
    report = kd.callbacks.StepTimeReport(num_steps=2, skip=1, verbose=0)
    model.fit(X, X[:, :1], batch_size=2, verbose=0, callbacks=[report])
    assert report.summary().splitlines()[-1].startswith(f"{GLOBAL}the operation")
