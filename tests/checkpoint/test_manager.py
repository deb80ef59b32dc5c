"""Which checkpoints are kept, saving while training goes on, and where errors of a save in the background appear."""

from __future__ import annotations

import os
import pathlib
from typing import Any

import keras
import numpy as np
import pytest

from keras_distribute.checkpoint import Checkpoint, CheckpointManager
from keras_distribute.errors import CheckpointError, StructureTypeError

from .support import Loop, assert_same_bits, bits, scope


class Value:
    """One variable, its checkpoint, and what is on disk."""

    def __init__(self, directory: Any) -> None:
        with scope(2):
            self.variable = keras.Variable(0.0)
        self.directory = pathlib.Path(directory)
        self.checkpoint = Checkpoint(v=self.variable)

    def manager(self, **options: Any) -> CheckpointManager:
        return CheckpointManager(self.checkpoint, self.directory, **options)

    def save(self, manager: CheckpointManager, step: int, **options: Any) -> str | None:
        self.variable.assign(float(step))
        return manager.save(step, **options)

    @property
    def files(self) -> list[str]:
        return sorted(name for name in os.listdir(self.directory) if name != "being_deleted")


@pytest.fixture
def value(tmp_path: Any) -> Value:
    return Value(tmp_path / "run")


def test_keeps_the_latest(value: Value) -> None:
    with value.manager(max_to_keep=2) as manager:
        assert manager.latest_step is None and manager.latest_checkpoint is None and manager.best_step is None
        for step in (10, 20, 30):
            path = value.save(manager, step)
            assert path == str(value.directory / str(step))
        manager.wait()
        assert manager.all_steps() == [20, 30]
        assert manager.latest_checkpoint == str(value.directory / "30")
        assert manager.checkpoints == [str(value.directory / "20"), str(value.directory / "30")]
        value.variable.assign(-1.0)
        assert manager.restore().step == 30 and float(value.variable.value) == 30
        assert manager.restore(20).step == 20 and float(value.variable.value) == 20
        assert manager.restore_or_initialize() == str(value.directory / "30")
        assert manager.save() == str(value.directory / "31")
    assert value.files == ["30", "31"]


@pytest.mark.parametrize(("mode", "best"), [("max", 2), ("min", 1)])
def test_keeps_the_best(value: Value, mode: str, best: int) -> None:
    """Beside the latest, also after a restart, which reads the metrics again; a NaN is never the best."""
    scores = [0.5, 0.1, 0.9, float("nan"), 0.4]
    with value.manager(max_to_keep=1, keep_best=("score", mode)) as manager:
        for step in range(4):
            value.save(manager, step, metrics={"score": np.float32(scores[step]), "other": 1})
        manager.wait()
        assert manager.all_steps() == [best, 3]
    with value.manager(max_to_keep=1, keep_best=("score", mode)) as manager:
        assert manager.best_step == best
        value.save(manager, 4, metrics={"score": scores[4]})
        with pytest.raises(CheckpointError, match="needs the metric 'score'"):
            manager.save(5)
    assert value.files == [str(best), "4"]
    assert manager.restore(best).metrics == {"score": pytest.approx(scores[best]), "other": 1.0}


def test_interval(value: Value) -> None:
    with value.manager(save_interval_steps=10, max_to_keep=None) as manager:
        saved = [step for step in range(3, 40, 3) if value.save(manager, step)]
        assert saved == [3, 15, 27, 39]
        assert value.save(manager, 40, force=True)
    assert manager.all_steps() == [3, 15, 27, 39, 40]
    with value.manager(save_interval_steps=10) as manager:
        assert value.save(manager, 45) is None


def test_an_existing_step_is_not_overwritten(value: Value) -> None:
    with value.manager() as manager:
        value.save(manager, 1)
        with pytest.raises(CheckpointError, match=r"There is a checkpoint of step 1 .*\n.*\n.*manager.delete\(1\)"):
            value.save(manager, 1)
        manager.delete(1)
        assert manager.all_steps() == []
        value.save(manager, 1)
    assert value.files == ["1"]


def test_arguments(value: Value, tmp_path: Any) -> None:
    with pytest.raises(StructureTypeError, match=r"CheckpointManager\(Checkpoint\(model=model\), directory\)"):
        CheckpointManager(keras.Sequential(), tmp_path)  # pyright: ignore
    for options in (
        {"max_to_keep": 0},
        {"save_interval_steps": 0},
        {"keep_best": "loss"},
        {"keep_best": ("loss", "up")},
    ):
        with pytest.raises(CheckpointError, match=next(iter(options))):
            value.manager(**options)
    manager = value.manager()
    assert manager.restore_or_initialize() is None
    with pytest.raises(CheckpointError, match="There is no checkpoint in"):
        manager.restore()
    value.save(manager, 5)
    with pytest.raises(CheckpointError, match=r"(?s)no checkpoint of step 6 .*the steps \[5\]"):
        manager.restore(6)
    with pytest.raises(CheckpointError, match="no checkpoint of step 6"):
        manager.delete(6)
    manager.close()
    manager.close()
    value.save(manager, 6)
    manager.close()
    assert not value.directory.joinpath("nothing").exists() and value.files == ["5", "6"]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_what_was_saved_is_the_moment_of_the_save(asynchronous: bool, tmp_path: Any) -> None:
    """Training goes on while files are written; the steps are given the variables' memory to write into."""
    loop = Loop(4)
    loop.run(1)
    moments = {}
    with CheckpointManager(Checkpoint(**loop.objects), tmp_path, asynchronous=asynchronous) as manager:
        for step in range(4):
            manager.save(step)
            moments[step] = bits(**loop.objects)
            loop.run(3)
        for step in (2, 0, 3):
            manager.restore(step)
            assert_same_bits(bits(**loop.objects), moments[step])


class Refusing:
    """Makes writing a manifest fail while it is entered."""

    def __init__(self, monkeypatch: Any, error: Exception) -> None:
        self.patch, self.error = monkeypatch, error

    def __enter__(self) -> None:
        from keras_distribute.checkpoint import manifest

        def fail(*args: Any) -> bytes:
            raise self.error

        self.original = manifest.to_bytes
        self.patch.setattr(manifest, "to_bytes", fail)

    def __exit__(self, *exc_info: object) -> None:
        from keras_distribute.checkpoint import manifest

        self.patch.setattr(manifest, "to_bytes", self.original)


NO_SPACE = OSError(28, "No space left on device")


def test_an_error_in_the_background_appears_at_the_next_call(value: Value, monkeypatch: Any) -> None:
    """Once, and the manager goes on; nothing is deleted for a checkpoint that was not written."""
    manager = value.manager(max_to_keep=1)
    value.save(manager, 0)
    manager.wait()
    for call in (manager.wait, manager.restore, lambda: value.save(manager, 2), manager.close):
        with Refusing(monkeypatch, NO_SPACE):
            value.save(manager, 1)
            with pytest.raises(
                CheckpointError, match=r"(?s)/1' could not be written.*No space left on device.*Fix: "
            ) as e:
                call()
        assert isinstance(e.value.__cause__, OSError)
        assert value.files == ["0"] and manager.all_steps() == [0]
        assert manager.restore().step == 0
    value.save(manager, 2)
    manager.close()
    assert value.files == ["2"]


def test_an_error_of_a_synchronous_save_appears_at_once(value: Value, monkeypatch: Any) -> None:
    manager = value.manager(asynchronous=False, max_to_keep=1)
    value.save(manager, 0)
    with Refusing(monkeypatch, NO_SPACE), pytest.raises(CheckpointError, match="No space left"):
        value.save(manager, 1)
    assert value.files == ["0"]
    value.save(manager, 1)
    assert value.files == ["1"]


def test_an_error_does_not_hide_the_one_of_the_with_block(value: Value, monkeypatch: Any) -> None:
    with pytest.raises(KeyError) as error, Refusing(monkeypatch, NO_SPACE), value.manager() as manager:
        value.save(manager, 0)
        raise KeyError("training failed")
    assert "could not be written" in error.value.__notes__[0]


def test_another_process_reads_while_this_one_writes(value: Value) -> None:
    """A second manager sees each step when it is complete, and never deletes what the first is writing."""
    reader = value.manager()
    with value.manager() as writer:
        for step in range(3):
            value.save(writer, step)
            reader.all_steps()
            writer.wait()
            assert reader.latest_step == step
            assert reader.restore().step == step
    assert value.files == ["0", "1", "2"]
