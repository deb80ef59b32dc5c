"""`BackupAndRestore`: interrupted anywhere and run again, a `fit` ends as if it had
never been interrupted.
"""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

import keras_distribute as kd
from keras_distribute.errors import CheckpointError, InputError

from .interrupting import (
    Cut,
    PowerCut,
    assert_same,
    build,
    fit_arrays,
    interrupted,
    run,
)
from .support import data, scope, strategy_of

pytestmark = [pytest.mark.timeout(240), pytest.mark.sampled(24)]
STEP = "on_train_batch_end"
EPOCH = {"save_freq": "epoch"}


@functools.cache
def uninterrupted(
    place: int, optimizer: str = "adam", group: int = 1
) -> dict[str, Any]:
    """The reference for `fit_arrays`, which knows nothing of backups."""
    return run(place, fit_arrays, None, make=functools.partial(build, optimizer, group))


@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_anywhere(place: int, tmp_path: Any) -> None:
    cuts = [Cut(STEP, 9), Cut(STEP, 5), Cut(STEP, 3)]
    assert_same(
        interrupted(place, fit_arrays, tmp_path / "b", cuts), uninterrupted(place)
    )
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("method", "count"),
    [
        ("on_train_batch_begin", 1),
        (STEP, 1),
        (STEP, 6),
        ("on_test_begin", 2),
        ("on_test_batch_end", 3),
        ("on_epoch_end", 1),
        ("on_epoch_begin", 2),
        ("on_train_end", 1),
    ],
)
@pytest.mark.parametrize("freq", [1, 4, "epoch"])
def test_every_place_of_fit(method: str, count: int, freq: Any, tmp_path: Any) -> None:
    result = interrupted(
        2, fit_arrays, tmp_path / "b", [Cut(method, count)], backup={"save_freq": freq}
    )
    assert_same(result, uninterrupted(2))


@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize("optimizer", ["loss_scale_ema", "accumulating"])
def test_optimizers_and_steps_per_execution(
    optimizer: str, group: int, tmp_path: Any
) -> None:
    cuts = [Cut(STEP, 4 if group > 1 else 11)]
    make = functools.partial(build, optimizer, group)
    result = interrupted(
        2, fit_arrays, tmp_path / "b", cuts, make=make, backup={"save_freq": 3}
    )
    assert_same(result, uninterrupted(2, optimizer, group))


def test_several_steps_at_once_without_a_strategy(tmp_path: Any) -> None:
    make = functools.partial(build, "adam", 4)
    result = interrupted(0, fit_arrays, tmp_path / "b", [Cut(STEP, 3)], make=make)
    assert_same(result, uninterrupted(0, "adam", 4))


# Data.
# ---------------------------------------------------------------------------------------------------------------


class Batches(keras.utils.PyDataset):
    """Six batches, which depend on their index alone."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        x, y = data(44)
        return x[8 * index : 8 * index + 8], y[8 * index : 8 * index + 8]


class Reordering(Batches):
    """Changes between epochs, and says how."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.order = np.arange(6)

    def on_epoch_end(self) -> None:
        self.order = np.roll(self.order, 1)

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(int(self.order[index]))

    def get_state(self) -> dict[str, Any]:
        return {"order": self.order}

    def set_state(self, state: dict[str, Any]) -> None:
        self.order = state["order"]


def tensors() -> Any:
    tf = pytest.importorskip("tensorflow")
    return tf.data.Dataset.from_tensor_slices(data(44))


def grain_map() -> Any:
    grain = pytest.importorskip("grain")
    x, y = data(44)
    return (
        grain.MapDataset.source(range(44))
        .seed(1)
        .shuffle()
        .map(lambda i: (x[i], y[i]))
        .batch(8)
    )


def distributed() -> Any:
    return strategy_of(2).experimental_distribute_dataset(
        kd.ArrayDataset(data(44), 8, shuffle=True, seed=4)
    )


DATA = {
    "arrays in order": (data, {"batch_size": 8, "shuffle": False}),
    "rows shuffled within batches": (data, {"batch_size": 8, "shuffle": "batch"}),
    "arrays, fewer steps than batches": (data, {"batch_size": 8, "steps_per_epoch": 4}),
    "a distributed dataset": (distributed, {}),
    "tf.data, a new order each epoch": (
        lambda: tensors().shuffle(44, seed=5).batch(8),
        {},
    ),
    "tf.data, length unknown": (
        lambda: tensors().filter(lambda x, y: y >= 0).batch(8),
        {},
    ),
    "tf.data without end": (
        lambda: tensors().shuffle(20, seed=5).repeat().batch(8),
        {"steps_per_epoch": 5},
    ),
    "Grain": (grain_map, {}),
    "PyDataset, shuffled": (Batches, {"shuffle": True}),
    "PyDataset with workers": (lambda: Batches(workers=2), {"shuffle": True}),
    "PyDataset that changes": (Reordering, {"shuffle": False}),
}


def fitting(source: Callable[[], Any], options: dict[str, Any]) -> Callable[..., Any]:
    def fit(model: Any, callbacks: Any) -> Any:
        made = source()
        x, y = made if isinstance(made, tuple) else (made, None)
        return model.fit(x, y, epochs=4, verbose=0, callbacks=callbacks, **options)

    return fit


@pytest.mark.parametrize("kind", DATA)
@pytest.mark.parametrize("place", [0, 2])
def test_data(kind: str, place: int, tmp_path: Any) -> None:
    fit = fitting(*DATA[kind])
    if place == 0 and kind == "a distributed dataset":
        pytest.skip("needs a strategy")

    # Plain Keras lets workers shuffle at times of their own.
    expected = run(
        place, fit, tmp_path / "c" if place == 0 and "workers" in kind else None
    )
    assert_same(
        interrupted(place, fit, tmp_path / "a", [Cut(STEP, 9), Cut(STEP, 4)]), expected
    )
    cuts = [Cut("on_epoch_begin", 3)]
    assert_same(
        interrupted(place, fit, tmp_path / "b", cuts, backup={"save_freq": "epoch"}),
        expected,
    )


SHUFFLED = {
    "arrays": (data, {"batch_size": 8}),
    "rows within batches": (data, {"batch_size": 8, "shuffle": "batch"}),
    "a pass over several epochs": (data, {"batch_size": 8, "steps_per_epoch": 4}),
    "PyDataset": (Batches, {"shuffle": True}),
}


@pytest.mark.parametrize("kind", SHUFFLED)
def test_the_order_after_an_interruption_is_that_of_plain_keras(
    kind: str, tmp_path: Any
) -> None:
    """In the middle of an epoch, behind its last step, and between two epochs."""
    fit = fitting(*SHUFFLED[kind])

    def by_place(_: Any, outputs: Any) -> Any:
        places = keras.ops.arange(keras.ops.shape(outputs)[0], dtype="float32")
        return outputs[:, 0] * places

    # One that learns nothing: its losses tell the rows and their order.
    def make() -> Any:
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
        model.compile(keras.optimizers.SGD(0.0), by_place)
        return model

    def losses(result: dict[str, Any]) -> list[float]:
        return [each[1] for each in result["log"]["seen"] if isinstance(each, tuple)]

    expected = losses(run(0, fit, None, make=make))
    for number, (cut, freq) in enumerate(
        [
            (Cut(STEP, 9), 2),
            (Cut("on_epoch_end", 2), 1),
            (Cut("on_epoch_begin", 3), 1),
            (Cut("on_epoch_begin", 3), "epoch"),
        ]
    ):
        result = interrupted(
            2, fit, tmp_path / str(number), [cut], make=make, backup={"save_freq": freq}
        )
        np.testing.assert_allclose(losses(result), expected, rtol=1e-5, atol=1e-6)


def test_a_generator_has_no_position(tmp_path: Any) -> None:
    x, y = data(44)

    def batches() -> Any:
        while True:
            yield x[:8], y[:8]

    def fit(model: Any, callbacks: Any) -> Any:
        return model.fit(
            batches(), epochs=3, steps_per_epoch=3, verbose=0, callbacks=callbacks
        )

    for place in (0, 2):
        with pytest.raises(
            InputError,
            match=r"(?s)could not go on with the next batch.*data_position=False",
        ) as caught:
            run(place, fit, tmp_path / "b")
        assert "cannot be resumed" in str(caught.value)
    expected = run(2, fit, None)
    options = {"save_freq": "epoch", "data_position": False}
    result = interrupted(2, fit, tmp_path / "c", [Cut(STEP, 5)], backup=options)
    assert_same(result, expected)


def test_other_data_than_before(tmp_path: Any) -> None:
    def fit(x: Any, y: Any = None, **options: Any) -> Any:
        return lambda model, callbacks: model.fit(
            x, y, epochs=2, verbose=0, callbacks=callbacks, **options
        )

    with pytest.raises(PowerCut):
        run(2, fit(*data(44), batch_size=8), tmp_path / "b", cut=Cut(STEP, 5))
    with pytest.raises(
        InputError,
        match=r"(?s)other arrays, or other batches.*batch_size=8.*batch_size=4",
    ):
        run(2, fit(*data(44), batch_size=4), tmp_path / "b")
    with pytest.raises(
        InputError, match="(?s)another kind of data.*ArrayDataAdapter.*PyDatasetAdapter"
    ):
        run(2, fit(Batches()), tmp_path / "b")
    with pytest.raises(
        InputError,
        match="(?s)after 4 steps of an epoch, which steps_per_execution does not divide",
    ):
        run(
            2,
            fit(*data(44), batch_size=8),
            tmp_path / "b",
            make=functools.partial(build, "adam", 3),
        )
    with pytest.raises(CheckpointError, match="(?s)is of something else.*SGD here"):
        run(
            2,
            fit(*data(44), batch_size=8),
            tmp_path / "b",
            make=functools.partial(build, "sgd"),
        )


# What else comes back.
# -----------------------------------------------------------------------------------------------


def test_the_progress_bar_begins_where_the_epoch_was(
    tmp_path: Any, capsys: Any
) -> None:
    fit = functools.partial(fit_arrays, verbose=1)
    with pytest.raises(PowerCut):
        run(2, fit, tmp_path / "b", cut=Cut(STEP, 11))
    capsys.readouterr()
    run(2, fit, tmp_path / "b")
    printed = re.sub(r"\x1b\[[0-9;]*m|\x08", "", capsys.readouterr().out)
    assert re.findall(r"Epoch (\d)/3", printed) == ["2", "3"]
    assert re.findall(r"(\d+)/6 ", printed)[0] == "4"


def test_batch_numbers_after_resuming(tmp_path: Any) -> None:
    seen: list[tuple[str, int]] = []

    class Watcher(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            seen.append(("begin", batch))

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            seen.append(("end", batch))

    with pytest.raises(PowerCut):
        run(2, fit_arrays, tmp_path / "b", cut=Cut(STEP, 11), callbacks=[Watcher()])
    del seen[:]
    run(2, fit_arrays, tmp_path / "b", callbacks=[Watcher()])
    assert seen[:4] == [("begin", 4), ("end", 4), ("begin", 5), ("end", 5)]
    assert len(seen) == 2 * 8


def test_a_completed_fit_is_not_repeated(tmp_path: Any) -> None:
    keep = {"delete_checkpoint": False}
    first = run(2, fit_arrays, tmp_path / "b", backup=keep)
    again = run(2, fit_arrays, tmp_path / "b", backup=keep, cut=Cut(STEP, 1))
    assert_same(again, first)
    longer = run(
        2, functools.partial(fit_arrays, epochs=4), tmp_path / "b", backup=keep
    )
    assert_same(longer, run(2, functools.partial(fit_arrays, epochs=4), None))


def test_the_next_fit_begins_at_its_beginning(tmp_path: Any) -> None:
    def twice(model: Any, callbacks: Any) -> Any:
        fit_arrays(model, callbacks)
        return fit_arrays(model, [], epochs=2)

    result = interrupted(2, twice, tmp_path / "b", [Cut(STEP, 11)])
    assert result["epochs"] == [0, 1]
    assert result["history"] == run(2, twice, None)["history"]


def test_by_time(tmp_path: Any) -> None:
    options = {"save_freq": False, "save_seconds": 1e-6, "max_to_keep": 100}
    with pytest.raises(PowerCut):
        run(2, fit_arrays, tmp_path / "b", cut=Cut(STEP, 5), backup=options)
    assert (
        len([path for path in (tmp_path / "b").iterdir() if path.name.isdigit()]) == 4
    )


def test_the_last_save_is_damaged(tmp_path: Any) -> None:
    with pytest.raises(PowerCut):
        run(2, fit_arrays, tmp_path / "b", cut=Cut(STEP, 9))
    latest = max(
        (path for path in (tmp_path / "b").iterdir()), key=lambda path: int(path.name)
    )
    (latest / "manifest" / "manifest.json").write_bytes(b"")
    with pytest.warns(UserWarning, match="later checkpoints are damaged"):
        result = run(2, fit_arrays, tmp_path / "b", seed=5)
    assert_same(result, uninterrupted(2))


def test_objects_of_the_user(tmp_path: Any) -> None:
    counts: list[int] = []

    def fit(model: Any, callbacks: Any) -> Any:
        own = {"steps": 0}

        class Count(keras.callbacks.Callback):
            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                own["steps"] += 1

        backup = kd.callbacks.BackupAndRestore(
            tmp_path / "b", save_freq=2, objects={"own": own}
        )
        history = fit_arrays(model, [*callbacks, Count(), backup])
        counts.append(own["steps"])
        return history

    interrupted(2, fit, None, [Cut(STEP, 9)])
    assert counts == [18]


def test_random_streams_come_back(tmp_path: Any) -> None:
    class Draw(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.drawn: list[float] = []

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            draws = random.random(), np.random.normal(), float(keras.random.normal(()))
            self.drawn.append(sum(draws))

    first, second = Draw(), Draw()
    run(2, fit_arrays, None, callbacks=[first])
    with pytest.raises(PowerCut):
        run(2, fit_arrays, tmp_path / "b", callbacks=[Draw()], cut=Cut(STEP, 9))
    run(2, fit_arrays, tmp_path / "b", callbacks=[second], seed=77)
    assert second.drawn == first.drawn


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"save_freq": "batch"}, 'save_freq is "epoch", a positive number'),
        ({"save_freq": 0}, "Received: save_freq=0."),
        ({"save_freq": True}, "Received: save_freq=True."),
        ({"save_seconds": 0}, "save_seconds is a positive number"),
        ({"backup_dir": ""}, "the path of a folder"),
        ({"save_freq": False, "save_before_preemption": False}, "would never save"),
        ({"save_freq": 5, "data_position": False}, "only at the beginning of an epoch"),
        (
            {"termination_config": kd.experimental.TerminationConfig(save_fn=print)},
            "saves by itself",
        ),
    ],
)
def test_arguments(options: dict[str, Any], error: str) -> None:
    with pytest.raises(CheckpointError, match=f"(?s){re.escape(error)}"):
        kd.callbacks.BackupAndRestore(**{"backup_dir": "b"} | options)


def test_two_of_them(tmp_path: Any) -> None:
    other = kd.callbacks.BackupAndRestore(tmp_path / "c")
    with pytest.raises(CheckpointError, match="A fit has one BackupAndRestore"):
        run(2, fit_arrays, tmp_path / "b", callbacks=[other])


def test_keras_distribution_is_refused(tmp_path: Any) -> None:
    with scope(0):
        model = build()
    with (
        keras.distribution.DataParallel(devices=["cpu:0", "cpu:1"]).scope(),
        pytest.raises(
            CheckpointError, match="(?s)under a Keras distribution.*MirroredStrategy"
        ),
    ):
        fit_arrays(model, [kd.callbacks.BackupAndRestore(tmp_path / "b")])


# Other numbers of replicas.
# ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "target"),
    [(8, 1), (8, 2), (8, 3), (8, 4), (8, 0), (0, 8), (1, 8), (2, 8), (3, 8), (4, 8)],
)
def test_on_another_number_of_replicas(source: int, target: int, tmp_path: Any) -> None:
    """The weights are those that were saved, and the epochs that follow are those of
    one place, to rounding.
    """

    def make() -> Any:
        model = keras.Sequential(
            [keras.Input((6,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(3)]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(
            keras.optimizers.Adam(0.02, epsilon=1e-2), loss, metrics=["accuracy"]
        )
        return model

    weights: dict[str, list[Any]] = {}

    class Weights(keras.callbacks.Callback):
        """Those after step 8, when the last save is made, and before step 9."""

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            self.model.jax_state_sync()
            if self.model.optimizer.iterations == 8:
                weights.setdefault("all", []).append(
                    [w.numpy() for w in self.model.variables]
                )

    with pytest.raises(PowerCut):
        run(
            source,
            fit_arrays,
            tmp_path / "b",
            make=make,
            cut=Cut(STEP, 9),
            callbacks=[Weights()],
        )
    result = run(target, fit_arrays, tmp_path / "b", make=make, callbacks=[Weights()])
    before, after = weights["all"]
    for a, b in zip(before, after, strict=True):
        np.testing.assert_array_equal(a, b)
    expected = run(source, fit_arrays, None, make=make)
    assert result["epochs"] == [0, 1, 2]
    for name, values in expected["history"].items():
        np.testing.assert_allclose(
            result["history"][name], values, rtol=1e-5, atol=1e-5
        )


@pytest.mark.sampled(1)
def test_another_number_of_steps_than_before(tmp_path: Any) -> None:
    """An error in the middle of an epoch; behind one, further epochs have it."""

    def fit(steps: int | None) -> Any:
        return functools.partial(fit_arrays, steps_per_epoch=steps)

    with pytest.raises(PowerCut):
        run(2, fit(6), tmp_path / "b", cut=Cut(STEP, 10))
    for steps in (3, None):
        text = f"steps_per_epoch=6 in the checkpoint, {steps} here"
        with pytest.raises(InputError, match=text):
            run(2, fit(steps), tmp_path / "b")
    with pytest.raises(PowerCut):
        run(2, fit(6), tmp_path / "b", cut=Cut("on_epoch_end", 2), backup=EPOCH)
    with pytest.warns(UserWarning, match="steps_per_epoch=6; its further .*epoch=2"):
        result = run(2, fit(2), tmp_path / "b", backup=EPOCH)
    assert result["epochs"] == [0, 1, 2]
    steps = [entry for entry in result["log"]["seen"] if isinstance(entry, tuple)]
    assert len(steps) == 6 + 6 + 2


class Nested(keras.Model):
    """Returns logs that are nested, which Keras allows."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(3)

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def train_step(self, state: Any, data: Any) -> Any:
        logs, state = super().train_step(state, data)
        return {"loss": logs["loss"], "more": {"twice": 2 * logs["loss"]}}, state


@pytest.mark.sampled(1)
@pytest.mark.parametrize("place", [0, 2])
def test_logs_that_are_nested(place: int, tmp_path: Any) -> None:
    def make() -> Any:
        model = Nested()
        model.build((None, 6))
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(True))
        return model

    cuts = [Cut(STEP, 10)]
    result = interrupted(place, fit_arrays, tmp_path / "b", cuts, make=make)
    assert_same(result, run(place, fit_arrays, None, make=make))
    assert len(result["history"]["twice"]) == 3
