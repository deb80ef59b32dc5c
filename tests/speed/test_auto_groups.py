"""`steps_per_execution="auto"`."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

import keras_distribute as kd
from keras_distribute.training import calls
from keras_distribute.training.steps import group_size
from keras_distribute.training.steps.group_size import GroupSize
from tests.support import mirrored_or_default

RNG = np.random.RandomState(0)
X, Y = RNG.randn(1604, 6).astype("float32"), RNG.randint(0, 3, 1604)


class Clock:
    """Tells how long steps would take: `overhead` a group, and `step` for each step."""

    def __init__(self, overhead: float, step: float) -> None:
        self.now, self._overhead, self._step = 0.0, overhead, step

    def __call__(self) -> float:
        return self.now

    def run(self, sizes: GroupSize, groups: int) -> list[int]:
        seen = []
        for _ in range(groups):
            seen.append(sizes.size)
            sizes.group_begins(sizes.size)
            self.now += self._overhead + self._step * sizes.size
        return seen


@pytest.mark.parametrize(
    ("overhead", "step", "expected"),
    [
        (0.001, 0.0001, 32),  # Tiny steps.
        (0.001, 0.004, 8),  # 32 of them would take longer than 0.1 s.
        (0.001, 0.2, 1),  # One is long.
        (0.00001, 0.004, 1),  # Nothing to gain.
    ],
)
def test_sizes(overhead: float, step: float, expected: int) -> None:
    clock = Clock(overhead, step)
    sizes = GroupSize(clock)
    clock.run(sizes, 100)
    assert sizes.settled and sizes.size == expected


def test_short_groups_and_interruptions_do_not_count() -> None:
    clock = Clock(0.001, 0.0001)
    sizes = GroupSize(clock)
    for _ in range(40):
        clock.run(sizes, 5)
        sizes.group_begins(max(1, sizes.size // 2))
        clock.now += 100.0
        sizes.interrupted()
        clock.now += 1000.0
    assert sizes.settled and sizes.size == 32


def built(replicas: int, size: Any) -> keras.Model:
    keras.utils.set_random_seed(3)
    with mirrored_or_default(replicas).scope():
        model = keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(4, activation="tanh"),
                keras.layers.Dense(3),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, metrics=["accuracy"], steps_per_execution=size)
    return model


def sizes_of(model: keras.Model) -> Any:
    return model._keras_distribute_group_sizes


@pytest.fixture
def eager_to_group(monkeypatch: Any) -> None:
    """Any size is a gain, so that groups are tried whatever this machine does."""
    monkeypatch.setattr(group_size, "GAIN", 1000.0)
    monkeypatch.setattr(group_size, "LIVELY_SECONDS", 1000.0)


def test_the_numbers_of_one_device(eager_to_group: None) -> None:
    options = {
        "batch_size": 8,
        "epochs": 3,
        "verbose": 0,
        "validation_data": (X[:40], Y[:40]),
        "shuffle": False,
    }
    expected, actual = built(0, 1), built(2, "auto")
    histories = [model.fit(X, Y, **options).history for model in (expected, actual)]
    assert sizes_of(actual).size == 32
    for key in histories[0]:
        np.testing.assert_allclose(histories[1][key], histories[0][key], rtol=1e-5)
    assert (
        int(actual.optimizer.iterations)
        == int(expected.optimizer.iterations)
        == 3 * 201
    )


class Log(keras.callbacks.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append(batch)


def test_a_callback_that_sees_steps_sees_all(eager_to_group: None) -> None:
    model, log = built(2, "auto"), Log()
    model.fit(X, Y, batch_size=8, verbose=0, callbacks=[log])
    assert log.seen == list(range(201)) and sizes_of(model).size == 1


@pytest.mark.parametrize(("save_freq", "grouped"), [("epoch", True), (50, False)])
def test_keras_callbacks_that_act_on_epochs(
    save_freq: Any, grouped: bool, tmp_path: Any, eager_to_group: None
) -> None:
    model = built(2, "auto")
    saving = keras.callbacks.ModelCheckpoint(
        tmp_path / "model.keras", save_freq=save_freq
    )
    model.fit(
        X,
        Y,
        batch_size=8,
        verbose=0,
        callbacks=[saving, kd.callbacks.StepTimeReport(verbose=0)],
    )
    assert (sizes_of(model).size > 1) == grouped


def test_the_progress_bar_reaches_the_end(eager_to_group: None, capsys: Any) -> None:
    built(2, "auto").fit(X, Y, batch_size=8, verbose=2)
    assert "201/201" in capsys.readouterr().out


@pytest.mark.sampled(2)
@pytest.mark.parametrize("steps", [70, 201])
def test_steps_per_epoch_and_data_that_knows_its_length(
    steps: int, eager_to_group: None
) -> None:
    def run(model: keras.Model) -> Any:
        return model.fit(
            X,
            Y,
            batch_size=8,
            steps_per_epoch=steps,
            epochs=5,
            shuffle=False,
            verbose=0,
        ).history["loss"]

    np.testing.assert_allclose(run(built(2, "auto")), run(built(0, 1)), rtol=1e-5)


class OneBatch(keras.Sequential):
    """Takes one batch each time that Keras calls it."""

    def make_train_function(self, force: bool = False) -> None:
        super().make_train_function(force)
        own = self.train_function
        self.train_function = lambda state, batches: own(state, iter([next(batches)]))


@pytest.mark.parametrize("kind", ["run_eagerly", "own function"])
def test_steps_that_take_one_batch_are_not_grouped(
    kind: str, monkeypatch: Any, eager_to_group: None
) -> None:
    monkeypatch.setattr(group_size, "_STEPS", 2)
    own = kind == "own function"
    with mirrored_or_default(2).scope():
        model = (OneBatch if own else keras.Sequential)([keras.layers.Dense(3)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("sgd", loss, run_eagerly=not own, steps_per_execution="auto")
    model.fit(X[:80], Y[:80], batch_size=4, verbose=0)
    assert int(model.optimizer.iterations) == 20


def test_a_compile_that_fails_changes_nothing(eager_to_group: None) -> None:
    model = built(2, 1)
    model.fit(X[:80], Y[:80], batch_size=8, verbose=0)
    with pytest.raises(ValueError, match="no such optimizer"):
        model.compile("no such optimizer", steps_per_execution="auto")
    model.fit(X, Y, batch_size=8, verbose=0)
    assert int(model.optimizer.iterations) == 10 + 201


def test_data_of_unknown_length(eager_to_group: None) -> None:
    def generator() -> Any:
        for i in range(0, 1600, 8):
            yield X[i : i + 8], Y[i : i + 8]

    model = built(2, "auto")
    model.fit(generator(), verbose=0)
    assert int(model.optimizer.iterations) == 200


class Watched(keras.utils.PyDataset):
    """Says when its epochs end, which must not be before its last batch was read."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Any] = []

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> Any:
        self.events.append(index)
        return X[:8], Y[:8]

    def on_epoch_end(self) -> None:
        self.events.append("end")


def test_an_epoch_ends_behind_its_last_group(eager_to_group: None) -> None:
    data = Watched()
    built(2, "auto").fit(data, epochs=3, verbose=0, shuffle=False)
    trained = data.events[-303:]
    assert trained == [*range(100), "end"] * 3


def test_a_saved_model_says_one(tmp_path: Any) -> None:
    model = built(2, "auto")
    model.save(tmp_path / "model.keras")
    assert keras.models.load_model(tmp_path / "model.keras").steps_per_execution == 1


def test_compile_takes_its_arguments_by_position() -> None:
    with mirrored_or_default(2).scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", None, ["mae"], None, False, "auto", True)
    assert (model.steps_per_execution, model.jit_compile) == (1, True)
    assert model.loss == "mse"
    assert isinstance(calls.group_sizes_of(model), GroupSize)


def test_backups_are_of_single_steps(tmp_path: Any, eager_to_group: None) -> None:
    model = built(2, "auto")
    backup = kd.callbacks.BackupAndRestore(tmp_path / "backup", save_freq=50)
    model.fit(X, Y, batch_size=8, verbose=0, callbacks=[backup])
    assert int(model.optimizer.iterations) == 201


def test_a_list_of_callbacks_needs_no_model() -> None:
    keras.callbacks.CallbackList([keras.callbacks.History()]).on_train_begin()
