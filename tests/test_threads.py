"""Several threads with one model or one strategy: right numbers, or a clear error."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax.numpy as jnp
import keras
import numpy as np
import pytest
from keras import layers

import keras_distribute as kd
from keras_distribute.devices.launches import launches
from keras_distribute.errors import ContextError
from keras_distribute.training import trainer
from tests.support import mirrored

RNG = np.random.RandomState(0)
X = RNG.randn(64, 6).astype("float32")
Y = RNG.randn(64, 1).astype("float32")


def built(strategy: kd.Strategy, seed: int = 0) -> keras.Model:
    keras.utils.set_random_seed(seed)
    with strategy.scope():
        blocks = [
            layers.Dense(16, "tanh"),
            layers.BatchNormalization(),
            layers.Dense(1),
        ]
        model = keras.Sequential([keras.Input((6,)), *blocks])
        model.compile("adam", "mse")
    return model


def together(*functions: Callable[[], Any]) -> list[Any]:
    """What functions return, begun at one moment; raises what one of them raises."""
    begin = threading.Barrier(len(functions))

    def run(function: Callable[[], Any]) -> Any:
        begin.wait()
        return function()

    with ThreadPoolExecutor(len(functions)) as pool:
        return [future.result() for future in [pool.submit(run, f) for f in functions]]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("replicas", [1, 2, 4, 8])
def test_predicting_as_a_web_server_does(replicas: int) -> None:
    """Requests of several sizes from several threads, the first of which compile."""
    model = built(mirrored(replicas))
    expected = {rows: model.predict(X[:rows], verbose=0) for rows in (1, 4, 7, 64)}

    def requests(shift: int) -> Callable[[], Any]:
        def run() -> None:
            for i in range(40):
                rows = [1, 4, 7, 64][(i + shift) % 4]
                call = model.predict_on_batch if i % 8 else silently(model.predict)
                np.testing.assert_allclose(
                    call(X[:rows]), expected[rows], rtol=2e-5, atol=2e-6
                )

        return run

    together(*map(requests, range(4)))
    with mirrored(replicas).scope():
        unbuilt = keras.Sequential([layers.Dense(3), layers.Dense(2)])
    results = together(*[lambda: unbuilt.predict_on_batch(X)] * 3)
    for result in results:
        np.testing.assert_array_equal(result, results[0])
    assert len(unbuilt.weights) == 4


def silently(predict: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x: predict(x, verbose=0)


def test_predicting_while_the_model_is_trained() -> None:
    """The training is what it is alone, and each prediction is that of a whole step."""
    alone, model = built(mirrored(4)), built(mirrored(4))
    possible = [alone.predict(X, verbose=0)]

    class Note(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            possible.append(alone.predict_on_batch(X))

    options = {"batch_size": 16, "epochs": 6, "shuffle": False, "verbose": 0}
    history = alone.fit(X, Y, callbacks=[Note()], **options).history
    done, found = threading.Event(), list[Any]()

    def train() -> Any:
        try:
            return model.fit(X, Y, **options).history
        finally:
            done.set()

    def predict() -> None:
        while not done.is_set() or not found:
            found.append(model.predict_on_batch(X))

    def read() -> None:
        while not done.is_set():
            for variable in (*model.variables, *model.optimizer.variables):
                assert np.isfinite(np.asarray(variable)).all()

    trained, *_ = together(train, predict, read)
    np.testing.assert_allclose(trained["loss"], history["loss"], rtol=1e-5)
    for prediction in found:
        assert any(np.allclose(prediction, p, rtol=1e-4, atol=1e-5) for p in possible)
    for a, b in zip(model.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


CALLS = {
    "fit": lambda model: model.fit(X, Y, verbose=0),
    "evaluate": lambda model: model.evaluate(X, Y, verbose=0),
    "train_on_batch": lambda model: model.train_on_batch(X, Y),
    "test_on_batch": lambda model: model.test_on_batch(X, Y),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CALLS)
def test_training_one_model_in_two_threads_is_refused_and_harms_nothing(
    name: str,
) -> None:
    strategy = mirrored(2)
    alone, model = built(strategy), built(strategy)
    begun, tried = threading.Event(), threading.Event()

    class Wait(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            begun.set()
            assert tried.wait(60)

    def second() -> None:
        assert begun.wait(60)
        try:
            with pytest.raises(ContextError) as error:
                CALLS[name](model)
            with strategy.scope():
                copy = keras.models.clone_model(model)
            copy.set_weights(model.get_weights())
            assert (copy.get_weights()[0] == model.get_weights()[0]).all()
        finally:
            tried.set()
        text = str(error.value)
        assert "A model is trained and evaluated by one thread at a time." in text
        assert f"Received: {name} in the thread" in text
        assert "is in fit of the same model." in text
        assert "Fix: wait for it (a threading.Lock around both), or use a copy" in text
        assert "copy.set_weights(model.get_weights())" in text

    options = {"batch_size": 16, "epochs": 2, "shuffle": False, "verbose": 0}
    trained, _ = together(
        lambda: model.fit(X, Y, callbacks=[Wait()], **options), second
    )
    history = alone.fit(X, Y, **options).history
    assert trained.history == history
    CALLS[name](model)  # Afterwards it is allowed, also here.
    with ThreadPoolExecutor(1) as pool:
        pool.submit(CALLS[name], model).result()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("replicas", [2, 4])
def test_two_models_of_one_strategy_are_trained_in_two_threads(replicas: int) -> None:
    strategy = mirrored(replicas)
    models = [built(strategy, seed) for seed in (1, 2)]
    alone = [built(strategy, seed) for seed in (1, 2)]
    options = {"batch_size": 10, "epochs": 3, "shuffle": False, "verbose": 0}
    both = together(*[lambda m=m: m.fit(X, Y, **options).history for m in models])
    for model, other, history in zip(models, alone, both, strict=True):
        expected = other.fit(X, Y, **options).history
        np.testing.assert_allclose(history["loss"], expected["loss"], rtol=1e-5)
        for a, b in zip(model.get_weights(), other.get_weights(), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_loops_of_two_threads_with_collectives_between() -> None:
    """`run` and `reduce` of one strategy: their programs meet on the devices."""
    strategy = mirrored(4)
    with strategy.scope():
        totals = [
            keras.Variable(0.0, aggregation="sum", trainable=False) for _ in range(3)
        ]

    def loop(total: Any) -> Callable[[], Any]:
        def step(x: Any) -> Any:
            total.assign_add(x)
            return kd.get_replica_context().all_reduce("SUM", x)

        def run() -> None:
            for _ in range(50):
                value = strategy.run(step, (np.float32(1),))
                assert float(strategy.reduce("MEAN", value, axis=None)) == 4.0

        return run

    together(*map(loop, totals))
    assert [float(total.numpy()) for total in totals] == [200.0] * 3


def test_a_step_that_runs_operation_by_operation_calls_a_model_while_one_is_built() -> (
    None
):
    """Each of them traces, and reads what the other one's programs leave behind."""
    strategy, in_step, in_build = mirrored(2), threading.Event(), threading.Event()
    teacher = built(strategy)

    class Student(keras.Sequential):
        def train_step(self, state: Any, data: Any) -> Any:
            in_step.set()
            in_build.wait(2)
            teacher.predict_on_batch(X[:8])
            return super().train_step(state, data)

    class Slow(layers.Layer):
        def build(self, input_shape: Any) -> None:
            self.weight = self.add_weight(shape=(6,))

        def call(self, x: Any) -> Any:
            in_build.set()
            time.sleep(0.3)
            return x * self.weight

    with strategy.scope():
        student = Student([keras.Input((6,)), layers.Dense(1)])
        student.compile("sgd", "mse", run_eagerly=True)
        unbuilt = keras.Sequential([Slow()])

    def predict() -> Any:
        in_step.wait(30)
        return unbuilt.predict(X[:8], verbose=0).shape

    threads = [
        threading.Thread(target=function, daemon=True)
        for function in (lambda: student.train_on_batch(X[:8], Y[:8]), predict)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert [thread.is_alive() for thread in threads] == [False, False]


def test_predictions_that_are_on_their_way_are_awaited_without_the_lock() -> None:
    """Of workers, one of which may have to be told again what to do."""

    class Late:
        def __jax_array__(self) -> Any:
            def takes_the_lock() -> bool:
                taken = launches.lock.acquire(timeout=10)
                if taken:
                    launches.lock.release()
                return taken

            with ThreadPoolExecutor(1) as pool:
                assert pool.submit(takes_the_lock).result()
            return jnp.ones((2, 1))

    step = trainer._joining(lambda state, batch: ({"y": Late()}, state), 2)
    outputs, _ = step(None, iter([1, 2]))
    np.testing.assert_array_equal(outputs["y"], np.ones((4, 1)))
