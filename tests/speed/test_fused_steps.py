"""`steps_per_execution`: several steps in one dispatch, with the numbers of single
steps.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

from keras_distribute.training.steps import compiled_step
from tests.support import mirrored_or_default

pytestmark = pytest.mark.sampled(9)

RNG = np.random.RandomState(0)
X, Y = RNG.randn(70, 4, 4, 1).astype("float32"), RNG.randint(0, 3, 70)


def built(replicas: int, size: int, convolution: bool = False) -> keras.Model:
    keras.utils.set_random_seed(3)
    with mirrored_or_default(replicas).scope():
        first = (
            layers.Conv2D(3, 2, use_bias=False)
            if convolution
            else layers.Dense(4, activation="tanh")
        )
        blocks = [
            first,
            layers.BatchNormalization(synchronized=True),
            layers.Flatten(),
            layers.Dense(3),
        ]
        model = keras.Sequential([keras.Input((4, 4, 1)), *blocks])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, metrics=["accuracy"], steps_per_execution=size)
    return model


class Log(keras.callbacks.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.seen.append(("begin", batch))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append(("end", batch, round(float(logs["loss"]), 4)))


def outcome(model: keras.Model, rows: int = 70, **options: Any) -> dict[str, Any]:
    log = Log()
    arguments = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0} | options
    history = model.fit(X[:rows], Y[:rows], callbacks=[log], **arguments).history
    evaluation = model.evaluate(X, Y, batch_size=8, verbose=0)
    predictions = model.predict(X, batch_size=8, verbose=0)
    weights = [v.numpy() for v in (*model.variables, *model.optimizer.variables)]
    return {
        "history": history,
        "evaluation": evaluation,
        "predictions": predictions,
        "log": log.seen,
        "weights": weights,
    }


def assert_close(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    for key in expected["history"]:
        np.testing.assert_allclose(
            actual["history"][key], expected["history"][key], rtol=1e-5
        )
    np.testing.assert_allclose(actual["evaluation"], expected["evaluation"], rtol=1e-5)
    np.testing.assert_allclose(
        actual["predictions"], expected["predictions"], rtol=1e-4, atol=1e-5
    )
    for a, b in zip(actual["weights"], expected["weights"], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("replicas", [1, 2, 4])
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("rows", [70, 64, 20])
def test_the_numbers_and_calls_of_plain_keras(
    replicas: int, size: int, rows: int
) -> None:
    """70 rows: eight batches and a short one; some groups are short, too."""
    expected, actual = (outcome(built(n, size), rows) for n in (0, replicas))
    assert_close(actual, expected)
    assert [entry[:2] for entry in actual["log"]] == [
        entry[:2] for entry in expected["log"]
    ]
    for a, b in zip(actual["log"], expected["log"], strict=True):
        assert a[2:] == pytest.approx(b[2:], abs=2e-4)


def counting(monkeypatch: Any) -> dict[str, int]:
    """How often a single step, and a group of steps, is dispatched."""
    count = {"one": 0, "fused": 0}

    def fused(
        self: Any, *arguments: Any, fused: Any = compiled_step.CompiledStep._fused
    ) -> Any:
        count["fused"] += 1
        return fused(self, *arguments)

    def one(
        self: Any, *arguments: Any, one: Any = compiled_step.CompiledStep._one
    ) -> Any:
        count["one"] += 1
        return one(self, *arguments)

    monkeypatch.setattr(compiled_step.CompiledStep, "_fused", fused)
    monkeypatch.setattr(compiled_step.CompiledStep, "_one", one)
    return count


def test_a_group_is_one_dispatch(monkeypatch: Any) -> None:
    count = counting(monkeypatch)
    built(2, 4).fit(X, Y, batch_size=8, verbose=0)
    assert count == {"fused": 2, "one": 1}  # Eight batches of 8 rows, and one of 6.


def test_a_group_on_cpus_keeps_no_second_copy_of_its_batches(monkeypatch: Any) -> None:
    memory: list[Any] = []

    def fused(
        self: Any, *arguments: Any, fused: Any = compiled_step.CompiledStep._fused
    ) -> Any:
        logs = fused(self, *arguments)
        program = self.executable(arguments[1][0], len(arguments[1]))
        memory.append(program.compile().memory_analysis())
        return logs

    monkeypatch.setattr(compiled_step.CompiledStep, "_fused", fused)
    with mirrored_or_default(2).scope():
        model = keras.Sequential([keras.Input((4096,)), layers.Dense(1)])
        model.compile("sgd", "mse", steps_per_execution=8)
    x = np.ones((8 * 32, 4096), "float32")
    model.fit(x, x[:, :1], batch_size=32, verbose=0)
    (analysis,) = memory
    one_of_a_replica = x.nbytes / 8 / 2
    assert analysis.temp_size_in_bytes < 4 * one_of_a_replica


def test_convolutions_are_not_put_into_a_loop_on_a_cpu(monkeypatch: Any) -> None:
    count = counting(monkeypatch)
    expected, actual = (
        outcome(built(0, 4, convolution=True)),
        outcome(built(2, 4, convolution=True)),
    )
    assert_close(actual, expected)
    assert count["fused"] == 0 < count["one"]


@pytest.mark.parametrize("steps", [3, 4, 10])
def test_steps_per_epoch(steps: int) -> None:
    def generator() -> Any:
        for i in range(100):
            yield X[i % 7 * 8 :][:8], Y[i % 7 * 8 :][:8]

    def run(replicas: int) -> Any:
        model = built(replicas, 4)
        history = model.fit(
            generator(), steps_per_epoch=steps, epochs=2, verbose=0
        ).history
        return history["loss"], int(model.optimizer.iterations)

    expected, actual = run(0), run(2)
    np.testing.assert_allclose(actual[0], expected[0], rtol=1e-5)
    assert actual[1] == expected[1]


def test_input_that_breaks_within_a_group(monkeypatch: Any) -> None:
    def broken() -> Any:
        for _ in range(5):
            yield X[:8], Y[:8]
        raise LookupError("the pipeline broke")

    model = built(2, 4)
    with pytest.raises(LookupError, match="the pipeline broke"):
        model.fit(broken(), verbose=0)
    assert int(model.optimizer.iterations) == 4
    model.fit(X, Y, batch_size=8, verbose=0)
    assert int(model.optimizer.iterations) == 4 + 9


def test_the_second_fit_compiles_nothing(compilations: Any) -> None:
    model = built(4, 3)
    outcome(model)
    before = len(compilations)
    outcome(model)
    assert len(compilations) == before
