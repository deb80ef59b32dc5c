"""Batches of any size: no example lost, repeated or counted twice, and nothing compiled
more often than need be.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

from . import harness, zoo
from .harness import equals_one_device, fit_evaluate_predict

pytestmark = [pytest.mark.timeout(120), pytest.mark.sampled(6)]

NUM_IDS = 128


class Seen(keras.metrics.Metric):
    """How often each example was seen: targets are `[value, id]`, and every id has a
    counter of its own.
    """

    def __init__(self) -> None:
        super().__init__(name="seen")
        self.times = self.add_variable((NUM_IDS,), initializer="zeros", name="times")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        ids = ops.cast(y_true[:, 1], "int32")
        self.times.assign_add(ops.sum(ops.one_hot(ids, NUM_IDS), axis=0))

    def result(self) -> Any:
        return {
            "rows": ops.sum(self.times),
            "ids": ops.sum(self.times > 0),
            "most": ops.max(self.times),
        }


def first_column_error(y_true: Any, y_pred: Any) -> Any:
    """The squared error of the values; the ids are no targets."""
    return ops.mean(ops.square(y_true[:, :1] - y_pred), axis=-1)


def data(num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Features, and targets with the row number in the second column."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=(num_rows, 4)).astype("float32")
    y = np.stack([x.sum(axis=1), np.arange(num_rows)], axis=1).astype("float32")
    return x, y


class Trace(keras.callbacks.Callback):
    """The weights and the running numbers after every step."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[dict[str, Any]] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        kernel = np.array(self.model.layers[0].kernel.value)
        self.steps.append(
            {
                "kernel": kernel,
                **{name: float(value) for name, value in (logs or {}).items()},
            }
        )


def build(**options: Any) -> keras.Model:
    """A regression that counts its examples."""
    model = keras.Sequential(
        [keras.Input((4,)), layers.Dense(5, activation="tanh"), layers.Dense(1)]
    )
    model.compile(
        optimizer=keras.optimizers.SGD(0.05),
        loss=first_column_error,
        metrics=[Seen()],
        **options,
    )
    return model


def all_seen_once(logs: dict[str, Any], num_rows: int, prefix: str = "") -> None:
    """Every example was counted, and once."""
    for name, count in (("rows", num_rows), ("ids", num_rows), ("most", 1)):
        value = np.ravel(logs[prefix + name])
        assert np.all(value == count), f"{prefix + name}: {value}, expected {count}"


@pytest.mark.parametrize(
    ("samples", "batch_size", "replicas"),
    [(70, 32, 4), (70, 32, 8), (33, 32, 4), (5, 1, 8), (7, 7, 4), (22, 5, 3)],
)
def test_every_example_once(samples: int, batch_size: int, replicas: int) -> None:
    """Fit, evaluate and predict with a tail smaller than, larger than, and not
    divisible by the replicas.
    """
    x, y = data(samples)
    outcome = equals_one_device(
        build, fit_evaluate_predict(x, y, batch_size=batch_size), replicas
    )
    all_seen_once(outcome.result["history"], samples)
    all_seen_once(outcome.result["evaluation"], samples)
    assert outcome.result["predictions"].shape == (samples, 1)


def test_weights_after_every_step() -> None:
    """A callback that reads a weight after each step sees one device's numbers, the
    step of the tail included.
    """
    x, y = data(42)

    def run(model: keras.Model) -> Any:
        trace = Trace()
        model.fit(
            x, y, batch_size=16, epochs=2, shuffle=False, verbose=0, callbacks=[trace]
        )
        return trace.steps

    outcome = equals_one_device(build, run)
    assert [step["rows"] for step in outcome.result] == [16, 32, 42] * 2


class Sorted(layers.Layer):
    """The features of each row by size, next to each feature's middle row."""

    def call(self, x: Any) -> Any:
        middle = ops.median(x, axis=0, keepdims=True)
        return ops.concatenate([ops.sort(x, axis=-1), x - middle], axis=-1)


def test_sorting_a_tail() -> None:
    """The gradient of a sort scatters by unsigned numbers, which XLA's partitioner,
    where the rows divide unevenly, ends the process for; one step at a time, and two.
    """
    x, y = data(22)

    def sorting() -> keras.Model:
        hidden = layers.Dense(5, activation="tanh")
        model = keras.Sequential([keras.Input((4,)), hidden, Sorted(), layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.05), first_column_error)
        return model

    def run(model: keras.Model) -> Any:
        found = fit_evaluate_predict(x, y, batch_size=16)(model)
        model.compile(model.optimizer, model.loss, steps_per_execution=2)
        again = model.fit(x, y, batch_size=5, shuffle=False, verbose=0)
        return {**found, "again": again.history}

    equals_one_device(sorting, run, fit_in_scope=True)


class Table(layers.Layer):
    """Sums the rows of a table that integers of any dtype say."""

    def build(self, shape: Any) -> None:
        self.table = self.add_weight(shape=(20, 4), name="table")

    def call(self, ids: Any) -> Any:
        return ops.sum(ops.take(self.table, ids, axis=0), axis=1)


@pytest.mark.parametrize("dtype", ["int8", "int16"])
def test_small_integers_look_up_rows_of_a_tail(dtype: str) -> None:
    """The table's gradient scatters by them, for which XLA's partitioner, too, ends the
    process where the rows divide unevenly.
    """
    _, y = data(22)
    ids = np.random.default_rng(0).integers(0, 20, (22, 3)).astype(dtype)

    def looking_up() -> keras.Model:
        model = keras.Sequential(
            [keras.Input((3,), dtype=dtype), Table(), layers.Dense(1)]
        )
        model.compile(keras.optimizers.SGD(0.05), first_column_error)
        return model

    run = fit_evaluate_predict(ids, y, batch_size=16)
    equals_one_device(looking_up, run, fit_in_scope=True)


class WithFirst(layers.Layer):
    """The rows, and the first one again behind them, on the way through a layer."""

    def __init__(self, layer: layers.Layer) -> None:
        super().__init__()
        self.layer = layer

    def call(self, rows: Any) -> Any:
        return self.layer(ops.concatenate([rows, rows[:1]], axis=0))[:-1]


def test_small_integers_of_rows_that_become_uneven() -> None:
    """The batch's rows divide, those of the lookup do not, and are too many for each
    replica to gather.
    """
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 20, (8192, 32)).astype("int16")
    y = rng.normal(size=(8192, 1)).astype("float32")

    def mixing() -> keras.Model:
        model = keras.Sequential(
            [keras.Input((32,), dtype="int16"), WithFirst(Table()), layers.Dense(1)]
        )
        model.compile(keras.optimizers.SGD(0.05), "mse")
        return model

    def run(model: keras.Model) -> Any:
        return model.fit(ids, y, batch_size=8192, shuffle=False, verbose=0).history

    equals_one_device(mixing, run, fit_in_scope=True)


@pytest.mark.parametrize("replicas", [3, 8])
def test_generator_whose_batch_sizes_change_every_step(replicas: int) -> None:
    """Sizes 1 to 9 in no order."""
    x, y = data(45)
    edges = np.cumsum([0, 9, 1, 4, 8, 2, 6, 3, 5, 7])

    def batches() -> Iterator[Any]:
        for start, stop in itertools.pairwise(edges):
            yield x[start:stop], y[start:stop]

    def run(model: keras.Model) -> Any:
        history = model.fit(batches(), verbose=0).history
        evaluation = model.evaluate(batches(), return_dict=True, verbose=0)
        return {"history": history, "evaluation": evaluation}

    outcome = equals_one_device(build, run, replicas)
    all_seen_once(outcome.result["history"], 45)
    all_seen_once(outcome.result["evaluation"], 45)


def test_on_batch_methods_of_odd_sizes() -> None:
    """`train_on_batch`, `test_on_batch`, `predict_on_batch` with 1, 5, 8, 30 rows."""
    x, y = data(30)

    def run(model: keras.Model) -> Any:
        results = []
        for rows in (1, 5, 8, 30):
            weight = np.linspace(0.5, 2.0, rows, dtype="float32")
            logs = {
                "train": model.train_on_batch(
                    x[:rows], y[:rows], sample_weight=weight, return_dict=True
                ),
                "test": model.test_on_batch(x[:rows], y[:rows], return_dict=True),
                "predictions": np.asarray(model.predict_on_batch(x[:rows])),
            }
            results.append(logs)
        return results

    outcome = equals_one_device(build, run)
    for rows, logs in zip((1, 5, 8, 30), outcome.result, strict=True):
        all_seen_once(logs["train"], rows)
        all_seen_once(logs["test"], rows)
        assert logs["predictions"].shape == (rows, 1)


def test_validation_data_and_split() -> None:
    """The validation's batches have sizes of their own; all examples are counted."""
    x, y = data(50)

    def run(model: keras.Model) -> Any:
        options = {"batch_size": 16, "epochs": 2, "shuffle": False, "verbose": 0}
        split = model.fit(x, y, validation_split=0.3, **options).history
        given = model.fit(
            x, y, validation_data=(x[:11], y[:11]), validation_batch_size=4, **options
        ).history
        return {"split": split, "given": given}

    outcome = equals_one_device(build, run)
    all_seen_once(outcome.result["split"], 35)
    all_seen_once(outcome.result["split"], 15, "val_")
    all_seen_once(outcome.result["given"], 50)
    all_seen_once(outcome.result["given"], 11, "val_")


def test_steps_per_epoch_and_initial_epoch() -> None:
    """Epochs cut out of an endless data set whose batches are 8, 8, 6."""
    x, y = data(22)

    def run(model: keras.Model) -> Any:
        endless = zoo.feed((x, y), "tf.data", 8).repeat()
        first = model.fit(
            endless, steps_per_epoch=4, epochs=3, initial_epoch=1, verbose=0
        )
        numbers = list(first.epoch)
        evaluation = model.evaluate(endless, steps=4, return_dict=True, verbose=0)
        predictions = model.predict(
            endless.map(lambda rows, targets: rows), steps=4, verbose=0
        )
        return {
            "history": first.history,
            "epochs": numbers,
            "evaluation": evaluation,
            "predictions": predictions,
        }

    outcome = equals_one_device(build, run)
    assert outcome.result["epochs"] == [1, 2]
    assert outcome.result["history"]["rows"] == [30.0, 30.0]
    assert outcome.result["predictions"].shape == (30, 1)


@pytest.mark.parametrize("inputs", ["tf.data", "generator", "pydataset"])
def test_every_kind_of_input_is_read_once(inputs: str) -> None:
    """Batch sizes are global for every kind, and no example is lost or repeated."""
    x, y = data(27)

    def run(model: keras.Model) -> Any:
        steps = {"steps_per_epoch": 4} if inputs == "generator" else {}
        history = model.fit(
            zoo.feed((x, y), inputs, 8), epochs=2, verbose=0, **steps
        ).history
        return {"history": history, "steps": int(model.optimizer.iterations)}

    outcome = equals_one_device(build, run)
    all_seen_once(outcome.result["history"], 27)
    assert outcome.result["steps"] == 8


def test_shuffled_arrays_in_the_order_of_one_device() -> None:
    """The same seed shuffles alike, and every epoch differently."""
    x, y = data(37)
    outcome = equals_one_device(
        build, fit_evaluate_predict(x, y, batch_size=8, shuffle=True, epochs=3)
    )
    all_seen_once(outcome.result["history"], 37)


def big_programs(names: list[str]) -> list[str]:
    """Compilations of a training, test or prediction step, not of single operations."""
    return [
        name
        for name in names
        if any(part in name for part in ("train", "test", "predict", "step"))
    ]


@pytest.mark.parametrize("action", ["fit", "evaluate", "predict"])
def test_one_compilation_per_batch_size(action: str) -> None:
    """Batches of 16 and tails of 10 and 3 are three programs; more epochs and calls
    compile nothing at all.
    """
    x, y = data(42)

    def run(model: keras.Model, samples: int, epochs: int = 1) -> None:
        options: dict[str, Any] = {"batch_size": 16, "verbose": 0}
        if action == "fit":
            model.fit(x[:samples], y[:samples], epochs=epochs, shuffle=False, **options)
        elif action == "evaluate":
            model.evaluate(x[:samples], y[:samples], **options)
        else:
            model.predict(x[:samples], **options)

    counts = []
    for strategy in (None, harness.mirrored(4)):
        model = harness.observe(build, lambda model: None, strategy).model
        with harness.compilations() as names:
            run(model, 42)
            run(model, 35)
        counts.append(len(big_programs(names)))
        with harness.compilations() as names:
            run(model, 42, epochs=3)
            run(model, 35)
        assert names == [], "a second call compiles"
    assert counts == [3, 3]


def test_epochs_validation_and_saving_compile_nothing_again(tmp_path: Any) -> None:
    """A second epoch with validation, then evaluate, predict and save between fits:
    nothing is compiled.
    """
    x, y = data(42)
    with harness.mirrored(4).scope():
        model = build()

    def everything() -> None:
        model.fit(x, y, batch_size=16, epochs=2, validation_data=(x, y), verbose=0)
        model.evaluate(x, y, batch_size=16, verbose=0)
        model.predict(x, batch_size=16, verbose=0)
        model.save_weights(tmp_path / "model.weights.h5")
        model.load_weights(tmp_path / "model.weights.h5")

    everything()
    with harness.compilations() as names:
        everything()
    assert names == []
