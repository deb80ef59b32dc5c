"""Every Keras callback that keeps state, with and without interruption: what it does
and writes is equal.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections import deque
from pathlib import Path
from typing import Any

import jax
import keras
import numpy as np
import pytest

import keras_distribute as kd
from keras_distribute.callbacks import states

from .interrupting import (
    CompleteTooSoon,
    Cut,
    Log,
    PowerCut,
    assert_same,
    build,
    fit_arrays,
    interrupted,
    run,
)
from .support import data

pytestmark = [pytest.mark.timeout(120), pytest.mark.sampled(18)]
C = keras.callbacks


def ema() -> Any:
    model = build()
    model.compile(
        keras.optimizers.SGD(0.05, use_ema=True, ema_momentum=0.7),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def rising() -> Any:
    """A model whose loss rises soon, so that callbacks have something to do."""
    model = build()
    model.compile(
        keras.optimizers.SGD(0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


class OfTheUser(C.Callback):
    """State in attributes of many types."""

    def __init__(self, results: list[float], factor: float) -> None:
        super().__init__()
        self.results, self.factor = results, factor
        self.best: Any = math.inf
        self.recent: deque[float] = deque(maxlen=2)
        self.by_epoch: dict[int, Any] = {}
        self.weights: Any = None
        self.flag, self.note, self.pair = False, b"", (0, None)
        self.function = print

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.results.append(logs["loss"])
        self.recent.append(logs["loss"])
        self.best = min(self.best, logs["loss"] * self.factor)
        self.by_epoch[epoch] = np.float32(logs["loss"])
        self.weights = self.model.get_weights()
        self.flag, self.note, self.pair = (
            not self.flag,
            self.note + b"x",
            (epoch, self.pair[0]),
        )


class OwnState(C.Callback):
    """State that no attribute has in a form that can be kept."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.seen.add(epoch)

    def get_state(self) -> dict[str, Any]:
        return {"seen": sorted(self.seen)}

    def set_state(self, state: dict[str, Any]) -> None:
        self.seen = set(state["seen"])


TABLE: dict[str, tuple[Any, Any]] = {
    "EarlyStopping": (
        lambda _: C.EarlyStopping("val_loss", patience=2, restore_best_weights=True),
        rising,
    ),
    "EarlyStopping, at once": (
        lambda _: C.EarlyStopping("loss", mode="max", restore_best_weights=True),
        build,
    ),
    "ReduceLROnPlateau": (
        lambda _: C.ReduceLROnPlateau("val_loss", factor=0.3, patience=1, cooldown=1),
        rising,
    ),
    "LearningRateScheduler": (
        lambda _: C.LearningRateScheduler(lambda epoch, rate: rate * 0.7),
        build,
    ),
    "ModelCheckpoint, best": (
        lambda d: C.ModelCheckpoint(
            d / "best-{epoch}.keras", monitor="val_loss", save_best_only=True
        ),
        rising,
    ),
    "ModelCheckpoint, steps": (
        lambda d: C.ModelCheckpoint(
            d / "{epoch}-{batch}.weights.h5", save_weights_only=True, save_freq=4
        ),
        build,
    ),
    "OrbaxCheckpoint": (
        lambda d: C.OrbaxCheckpoint(str(d / "orbax"), max_to_keep=None),
        build,
    ),
    "OrbaxCheckpoint, steps": (
        lambda d: C.OrbaxCheckpoint(str(d / "orbax"), save_freq=4, max_to_keep=3),
        build,
    ),
    "CSVLogger": (lambda d: C.CSVLogger(str(d / "log.csv")), build),
    "CSVLogger, append": (
        lambda d: C.CSVLogger(str(d / "log.csv"), append=True),
        build,
    ),
    "SwapEMAWeights": (lambda _: C.SwapEMAWeights(), ema),
    "SwapEMAWeights, epochs": (lambda _: C.SwapEMAWeights(swap_on_epoch=True), ema),
    "TerminateOnNaN": (lambda _: C.TerminateOnNaN(), build),
    "TensorBoard": (
        lambda d: C.TensorBoard(str(d / "board"), update_freq=3, write_graph=False),
        build,
    ),
    "LambdaCallback": (
        lambda _: C.LambdaCallback(on_epoch_end=lambda epoch, logs: None),
        build,
    ),
    "RemoteMonitor": (lambda _: Silent(), build),
    "BatchEnd of the user": (lambda _: OfTheUser([], 0.5), build),
    "get_state of the user": (lambda _: OwnState(), build),
}


class Silent(C.RemoteMonitor):
    """`RemoteMonitor` without a server."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[Any] = []

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.sent.append({"epoch": epoch, **(logs or {})})


def left(callback: Any, folder: Path) -> dict[str, Any]:
    """What a callback holds in the end, and what it wrote."""
    skipped = {
        "_model",
        "params",
        "_epoch_start_time",
        "_batch_start_time",
        "_train_accumulated_time",
        "_writers",
    }
    skipped |= (
        {"append", "append_header"} if isinstance(callback, C.CSVLogger) else set()
    )
    plain = (
        int,
        float,
        str,
        bytes,
        tuple,
        list,
        dict,
        set,
        deque,
        np.ndarray,
        np.generic,
        type(None),
    )
    held = {
        name: value
        for name, value in vars(callback).items()
        if name not in skipped
        and isinstance(value, plain)
        and str(folder) not in str(value)
    }
    held = {
        n: v
        for n, v in held.items()
        if not (isinstance(v, list) and any(not isinstance(i, plain) for i in v))
    }
    files: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.suffix == ".csv":
            files[name] = path.read_text()
        elif path.suffix == ".keras":
            files[name] = keras.models.load_model(path).get_weights()
        elif path.parent.name == "orbax" or path.suffix == ".h5":
            files[name] = None
    if isinstance(callback, C.TensorBoard):
        files["events"] = events(folder)
    return {"held": held, "files": files}


def events(folder: Path) -> dict[str, dict[int, float]]:
    """The numbers in the event files, by what they are of and by step."""
    loader = pytest.importorskip(
        "tensorboard.backend.event_processing.event_file_loader"
    )
    found: dict[str, dict[int, float]] = {}
    for path in sorted(folder.rglob("events.out*")):
        for event in loader.EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                if "time" not in value.tag and "steps_per_second" not in value.tag:
                    number = np.frombuffer(value.tensor.tensor_content, np.float32)
                    number = number if number.size else np.array(value.tensor.float_val)
                    found.setdefault(f"{path.parent.name}/{value.tag}", {})[
                        event.step
                    ] = number.tolist()
    return found


def assert_equal(actual: Any, expected: Any, where: str = "") -> None:
    if isinstance(expected, dict):
        assert sorted(map(str, actual)) == sorted(map(str, expected)), where
        for name in expected:
            assert_equal(actual[name], expected[name], f"{where}/{name}")
    elif isinstance(expected, list | tuple | deque):
        assert type(actual) is type(expected) and len(actual) == len(expected), where
        for a, b in zip(actual, expected, strict=True):
            assert_equal(a, b, where)
    else:
        assert type(actual) is type(expected), where
        np.testing.assert_array_equal(actual, expected, err_msg=where)


def test_the_table_has_every_callback_of_keras() -> None:
    """Those that are not in it are in every run (`History`), have a test of their own,
    or are bases of others.
    """
    apart = {"History", "ProgbarLogger", "BackupAndRestore", "Callback", "CallbackList"}
    assert {
        name.split(",")[0] for name in TABLE if "of the user" not in name
    } | apart == {name for name, value in vars(C).items() if isinstance(value, type)}


def test_backup_and_restore_of_keras_beside_ours(tmp_path: Any) -> None:
    """Ours comes last, so what it restores stays."""

    def fit(model: Any, callbacks: Any) -> Any:
        return fit_arrays(model, [C.BackupAndRestore(tmp_path / "keras"), *callbacks])

    cuts = [Cut("on_train_batch_end", 9), Cut("on_train_batch_end", 3)]
    assert_same(interrupted(2, fit, tmp_path / "ours", cuts), run(2, fit_arrays, None))


@pytest.mark.parametrize("name", TABLE)
def test_equal_with_and_without_interruption(name: str, tmp_path: Any) -> None:
    make_callback, make = TABLE[name]
    found: dict[str, Any] = {}

    def fit(folder: Path) -> Any:
        folder.mkdir(exist_ok=True)

        def fit(model: Any, callbacks: Any) -> Any:
            callback = make_callback(folder)
            found[folder.name] = callback
            place = 1 + next(
                i for i, other in enumerate(callbacks) if isinstance(other, Log)
            )
            return fit_arrays(
                model, [*callbacks[:place], callback, *callbacks[place:]], epochs=5
            )

        return fit

    expected = run(2, fit(tmp_path / "whole"), None, make=make)
    cuts = [
        Cut("on_train_batch_end", 9),
        Cut("on_epoch_end", 2),
        Cut("on_train_batch_end", 3),
    ]
    try:
        result = interrupted(
            2, fit(tmp_path / "parts"), tmp_path / "backup", cuts, make=make
        )
    except CompleteTooSoon:
        assert "EarlyStopping" in name
        return
    assert_same(result, expected)
    assert_equal(
        left(found["parts"], tmp_path / "parts"),
        left(found["whole"], tmp_path / "whole"),
        type(found["whole"]).__name__,
    )


def test_stopped_early_and_killed_before_the_end(tmp_path: Any) -> None:
    """Training that had been stopped stays so: nothing is trained after the restart."""

    def fit(model: Any, callbacks: Any) -> Any:
        stopping = C.EarlyStopping(
            "loss", patience=0, mode="max", restore_best_weights=True
        )
        return fit_arrays(model, [stopping, *callbacks], epochs=6)

    expected = run(2, fit, None)
    assert len(expected["epochs"]) < 6
    result = interrupted(
        2, fit, tmp_path / "b", [Cut("on_train_end", 1)], backup={"save_freq": "epoch"}
    )
    assert_same(result, expected)


def test_what_was_given_to_a_callback_is_not_taken_back(tmp_path: Any) -> None:
    """A second run may choose another patience."""
    with pytest.raises(PowerCut):
        run(
            2,
            fit_arrays,
            tmp_path / "b",
            callbacks=[C.EarlyStopping("loss", patience=1)],
            cut=Cut("on_epoch_end", 2),
        )
    later = C.EarlyStopping("loss", patience=7)
    run(2, fit_arrays, tmp_path / "b", callbacks=[later])
    assert later.patience == 7


class Passing(C.EarlyStopping):
    """Passes on what it is given."""

    def __init__(self, *args: Any, note: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.note, self.key = note, jax.random.key(0)


class Quiet(Passing):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__("loss", note="quiet", **kwargs)


class Patient(C.EarlyStopping):
    """Takes no patience: it is its own."""

    def __init__(self) -> None:
        super().__init__("loss", patience=1)


@pytest.mark.parametrize(
    ("make", "patience"),
    [
        (lambda patience: Passing("loss", patience=patience, note=str(patience)), 7),
        (lambda patience: Quiet(patience=patience), 7),
        (lambda patience: Patient(), 3),
    ],
)
def test_what_a_constructor_passes_on_is_an_argument_too(
    make: Any, patience: int
) -> None:
    callback, later = make(3), make(7)
    callback.wait, callback.patience = 2, 3
    states.set_state([later], states.get_state([callback]))
    assert later.wait == 2 and later.patience == patience
    if isinstance(later, Passing):
        assert later.note == ("quiet" if isinstance(later, Quiet) else "7")
        assert "key" in states.get_state([later])[type(later).__name__]["attributes"]


def test_what_contains_itself_is_no_state() -> None:
    one, two = C.Callback(), C.Callback()
    own: list[Any] = [1]
    own.append({"deep": (own,)})
    vars(one).update(own=own, note="a")
    vars(two).update(pair=[own[:1]] * 2)
    found = states.get_state([one, two])
    assert found["Callback"]["attributes"] == {"note": "a"}
    assert found["Callback#2"]["attributes"] == {"pair": [[1], [1]]}


def test_lines_written_after_the_last_save_are_written_once(tmp_path: Any) -> None:
    def fit(model: Any, callbacks: Any) -> Any:
        x, y = data(44)
        return model.fit(
            x,
            y,
            batch_size=8,
            epochs=4,
            verbose=0,
            callbacks=[C.CSVLogger(str(tmp_path / "log.csv")), *callbacks],
        )

    interrupted(
        2,
        fit,
        tmp_path / "b",
        [Cut("on_train_batch_end", 14)],
        backup={"save_freq": 11},
    )
    lines = (tmp_path / "log.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in lines] == ["epoch", "0", "1", "2", "3"]


def test_a_callback_that_is_missing_is_warned_about(tmp_path: Any) -> None:
    class Counting(C.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.count = 0

    with pytest.raises(PowerCut):
        run(
            2,
            fit_arrays,
            tmp_path / "b",
            callbacks=[Counting()],
            cut=Cut("on_train_batch_end", 9),
        )
    with pytest.warns(
        UserWarning, match="interrupted with Counting, Cut among its callbacks"
    ):
        run(2, fit_arrays, tmp_path / "b")


class Counted(C.CSVLogger):
    """Of the user: it counts its lines."""

    lines = 0

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_end(epoch, logs)
        self.lines += 1


@pytest.mark.sampled(1)
def test_where_a_callback_writes_is_its_own(tmp_path: Any) -> None:
    """A script that names the folder by the time goes on in the new one."""
    pytest.importorskip("tensorflow")

    def others(name: str) -> Any:
        board = C.TensorBoard(str(tmp_path / name), write_graph=False)
        return [board, Counted(str(tmp_path / f"{name}.csv"))]

    with pytest.raises(PowerCut):
        run(
            2,
            fit_arrays,
            tmp_path / "b",
            callbacks=others("before"),
            cut=Cut("on_train_batch_end", 9),
        )
    before = sorted((tmp_path / "before").rglob("*tfevents*"))
    board, table = later = others("later")
    run(2, fit_arrays, tmp_path / "b", callbacks=later)
    assert sorted((tmp_path / "before").rglob("*tfevents*")) == before
    written = {path.parent.name for path in (tmp_path / "later").rglob("*tfevents*")}
    assert written == {"train", "validation"}
    assert board._global_train_batch == 18 and table.lines == 3
    lines = (tmp_path / "later.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in lines] == ["epoch", "1", "2"]


@pytest.mark.sampled(1)
def test_step_times_are_of_one_process(tmp_path: Any) -> None:
    """A report that was not complete is begun anew, a complete one is kept."""

    def report(num_steps: int) -> Any:
        return kd.callbacks.StepTimeReport(num_steps, skip=2, verbose=0)

    times = [report(3), report(9), report(9), report(3)]
    for each, cut in zip(times, [8, 8, None, None], strict=True):
        folder = tmp_path / ("first" if each in (times[0], times[3]) else "second")
        place = None if cut is None else Cut("on_train_batch_end", cut)
        with pytest.raises(PowerCut) if cut else contextlib.nullcontext():
            run(
                2,
                functools.partial(fit_arrays, batch_size=2, validation_data=None),
                folder,
                callbacks=[each],
                backup={"save_freq": 1},
                cut=place,
            )
    assert times[0].milliseconds == times[3].milliseconds != {}
    assert times[1].milliseconds == {} and times[1]._done == 8
    assert times[2].milliseconds and times[2]._done > 11
