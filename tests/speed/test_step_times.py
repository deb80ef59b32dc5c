"""The report of where the time of a step goes."""

from __future__ import annotations

import sys
import time
from typing import Any

import jax.numpy as jnp
import keras
import numpy as np
import pytest

import keras_distribute as kd
from keras_distribute import config, errors
from keras_distribute._compat import libtpu
from keras_distribute.callbacks import step_times
from keras_distribute.devices.launches import launches
from tests.support import mirrored

X, Y = np.ones((160, 4), np.float32), np.ones((160, 1), np.float32)


def built(replicas: int = 2, **compiled: Any) -> keras.Model:
    with mirrored(replicas).scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", **compiled)
    return model


class Slow(keras.utils.PyDataset):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.05)
        return X[:8], Y[:8]


class Sleepy(keras.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        time.sleep(0.05)


def measured(x: Any, *others: Any, **options: Any) -> dict[str, float]:
    report = kd.callbacks.StepTimeReport(num_steps=8, skip=4, verbose=0)
    built(**options).fit(
        x,
        Y if x is X else None,
        batch_size=8 if x is X else None,
        verbose=0,
        callbacks=[*others, report],
    )
    return report.milliseconds


def test_a_slow_input_is_seen() -> None:
    found = measured(Slow())
    assert found["reading"] > 30
    assert found["input"] > found["step"] / 2
    assert found["room"] < found["step"] / 4
    assert found["step"] == pytest.approx(
        sum(found[part] for part in ("input", "dispatch", "devices", "callbacks"))
    )


def test_a_reader_that_waits_is_seen() -> None:
    class Quick(Slow):
        def __getitem__(self, index: int) -> Any:
            return X[:8], Y[:8]

    found = measured(Quick(), Sleepy())
    assert found["room"] > 30 and found["input"] < found["step"] / 4
    busy = found["reading"] + found["placing"] + found["room"]
    assert busy < 1.2 * found["step"]


@pytest.mark.parametrize("ahead", [0, 2])
def test_the_summary_says_who_reads(ahead: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(config._chosen, "prefetch_steps", ahead)
    report = kd.callbacks.StepTimeReport(num_steps=8, skip=4, verbose=0)
    built().fit(Slow(), verbose=0, callbacks=[report])
    found, summary = report.milliseconds, report.summary()
    assert ("in the thread that reads ahead" in summary) == (ahead > 0)
    assert ("waiting until a step takes one" in summary) == (ahead > 0)
    assert ("Nothing is read ahead" in summary) == (ahead == 0)
    assert "reading a batch" in summary and "putting it on the devices" in summary
    if not ahead:
        assert found["room"] == 0
        assert found["reading"] + found["placing"] <= found["input"]


def test_a_slow_callback_is_seen() -> None:
    found = measured(X, Sleepy())
    assert found["callbacks"] > 45 and found["callbacks"] > found["step"] / 2
    assert found["input"] < 25


@pytest.mark.parametrize("replicas", [1, 4])
def test_the_reduction_is_measured_where_there_is_one(replicas: int) -> None:
    assert ("reduction" in measured(X, replicas=replicas)) == (replicas > 1)


def test_a_validation_is_no_part_of_a_step() -> None:
    """And few steps are measured where the epoch ends first."""

    class SlowValidation(keras.callbacks.Callback):
        def on_test_begin(self, logs: Any = None) -> None:
            time.sleep(1)

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            time.sleep(1)

    report = kd.callbacks.StepTimeReport(num_steps=50, skip=4, verbose=0)
    others = [SlowValidation(), report]
    for data in (None, (X, Y)):
        built().fit(X, Y, 32, verbose=0, callbacks=others, validation_data=data)
        assert 0 < report.milliseconds["step"] < 400


def test_a_fit_that_is_broken_off_is_measured_no_more(tmp_path: Any) -> None:
    class Broken(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 2:
                raise OSError("broken off")

    model, folder = built(), str(tmp_path)
    report = kd.callbacks.StepTimeReport(2, 1, folder, verbose=0)
    with pytest.raises(OSError, match="broken off"):
        model.fit(X, Y, 32, verbose=0, callbacks=[report, Broken()])
    assert launches.times is None
    model.fit(X, Y, 32, verbose=0, callbacks=[report])
    assert report.milliseconds and list(tmp_path.rglob("*.xplane.pb"))


def test_of_many_gradients_a_piece_is_summed(monkeypatch: Any) -> None:
    """A model of divided weights leaves no memory for all."""
    monkeypatch.setattr(step_times, "_PIECE", 2)
    made: list[Any] = []
    ones = jnp.ones
    monkeypatch.setattr(jnp, "ones", lambda *a: made.append(a[0]) or ones(*a))
    found = step_times._reduction_of(built())
    assert made == [(2, 2)] and found["reduction"] > 0


def test_a_group_counts_as_its_steps() -> None:
    found = measured(X, Sleepy(), steps_per_execution=4)
    assert 45 / 4 < found["callbacks"] < 45


def test_it_prints_and_draws(capsys: Any, tmp_path: Any) -> None:
    report = kd.callbacks.StepTimeReport(num_steps=3, skip=1)
    with pytest.raises(errors.ValueStructureError, match="no step was measured"):
        report.plot(str(tmp_path / "step.png"))
    assert report.summary() == ""
    built().fit(X, Y, batch_size=8, verbose=0, callbacks=[report])
    printed = capsys.readouterr().out
    for words in (
        "A step takes",
        "waiting for input",
        "handing the step",
        "waiting for the devices",
        "callbacks",
    ):
        assert words in printed
    pytest.importorskip("matplotlib")
    report.plot(str(tmp_path / "step.png"))
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib(monkeypatch: Any) -> None:
    report = kd.callbacks.StepTimeReport(num_steps=3, skip=1, verbose=0)
    built().fit(X, Y, batch_size=8, verbose=0, callbacks=[report])
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(errors.BackendError, match="pip install matplotlib"):
        report.plot("step.png")


def test_a_profile(tmp_path: Any) -> None:
    report = kd.callbacks.StepTimeReport(
        num_steps=3, skip=1, trace_dir=str(tmp_path), verbose=0
    )
    built().fit(X, Y, batch_size=8, verbose=0, callbacks=[report])
    assert list(tmp_path.rglob("*.xplane.pb"))


def test_a_profile_that_would_end_the_process_is_refused(monkeypatch: Any) -> None:
    monkeypatch.setattr(libtpu, "profiling_ends_the_process", lambda: True)
    report = kd.callbacks.StepTimeReport(
        num_steps=3, skip=1, trace_dir="profile", verbose=0
    )
    with pytest.raises(
        errors.DeviceError,
        match="(?s)would end this process.*trace_dir='profile'.*JAX_PLATFORMS=cpu",
    ):
        built().fit(X, Y, batch_size=8, verbose=0, callbacks=[report])


def test_refusals() -> None:
    with pytest.raises(errors.ValueStructureError, match="At least one step"):
        kd.callbacks.StepTimeReport(num_steps=0)
    plain = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    plain.compile("sgd", "mse")
    with pytest.raises(
        errors.ValueStructureError,
        match=r"models under a strategy(.|\n)*OneDeviceStrategy",
    ):
        plain.fit(X, Y, verbose=0, callbacks=[kd.callbacks.StepTimeReport()])


def test_nothing_is_measured_afterwards() -> None:
    measured(X)
    assert launches.times is None
