"""Which checkpoints are kept, saving while training goes on, and where errors of a save
in the background appear.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import pathlib
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import keras
import numpy as np
import pytest

import keras_distribute as kd
from keras_distribute.checkpoint import Checkpoint, CheckpointManager, under_way
from keras_distribute.checkpoint import checkpoint as checkpoints
from keras_distribute.checkpoint.manifest_item import ManifestHandler
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
        return sorted(
            name for name in os.listdir(self.directory) if name != "being_deleted"
        )


@pytest.fixture
def value(tmp_path: Any) -> Value:
    return Value(tmp_path / "run")


def test_keeps_the_latest(value: Value) -> None:
    with value.manager(max_to_keep=2) as manager:
        assert (
            manager.latest_step is None
            and manager.latest_checkpoint is None
            and manager.best_step is None
        )
        for step in (10, 20, 30):
            path = value.save(manager, step)
            assert path == str(value.directory / str(step))
        manager.wait()
        assert manager.all_steps() == [20, 30]
        assert manager.latest_checkpoint == str(value.directory / "30")
        assert manager.checkpoints == [
            str(value.directory / "20"),
            str(value.directory / "30"),
        ]
        value.variable.assign(-1.0)
        assert manager.restore().step == 30 and float(value.variable.value) == 30
        assert manager.restore(20).step == 20 and float(value.variable.value) == 20
        assert manager.restore_or_initialize() == str(value.directory / "30")
        assert manager.save() == str(value.directory / "31")
    assert value.files == ["30", "31"]


@pytest.mark.parametrize(("mode", "best"), [("max", 2), ("min", 1)])
def test_keeps_the_best(value: Value, mode: str, best: int) -> None:
    """Beside the latest, also after a restart, which reads the metrics again; a NaN is
    never the best.
    """
    scores = [0.5, 0.1, 0.9, float("nan"), 0.4]
    with value.manager(max_to_keep=1, keep_best=("score", mode)) as manager:
        for step in range(4):
            value.save(
                manager, step, metrics={"score": np.float32(scores[step]), "other": 1}
            )
        manager.wait()
        assert manager.all_steps() == [best, 3]
    with value.manager(max_to_keep=1, keep_best=("score", mode)) as manager:
        assert manager.best_step == best
        value.save(manager, 4, metrics={"score": scores[4]})
        with pytest.raises(CheckpointError, match="needs the metric 'score'"):
            manager.save(5)
    assert value.files == [str(best), "4"]
    assert manager.restore(best).metrics == {
        "score": pytest.approx(scores[best]),
        "other": 1.0,
    }


def test_what_was_saved_last_stays_below_later_steps(value: Value) -> None:
    """As after going back to an earlier step; not deleted as soon as written."""
    with value.manager(max_to_keep=2) as manager:
        for step in (20, 30, 10):
            path = value.save(manager, step)
        assert manager.all_steps() == [10, 20, 30]
        assert Checkpoint(v=value.variable).restore(path).step == 10
        value.save(manager, 11)
    assert value.files == ["11", "20", "30"]


def test_a_save_without_a_number_follows_the_latest_step(value: Value) -> None:
    """Also after an earlier step was restored: the number after that one may be taken,
    and the user has not asked for it.
    """
    with value.manager() as manager:
        for step in (0, 2, 3):
            value.save(manager, step)
        manager.restore(2)
        assert manager.save() == str(value.directory / "4")
        manager.restore(0)
        assert manager.save() == str(value.directory / "5")
    assert manager.all_steps() == [0, 2, 3, 4, 5]


def test_threads_save_one_after_the_other(value: Value) -> None:
    with value.manager(max_to_keep=None) as manager:
        with ThreadPoolExecutor(4) as pool:
            paths = list(pool.map(lambda _: manager.save(), range(4)))
        steps = sorted(os.path.basename(path or "") for path in paths)
        assert steps == ["0", "1", "2", "3"]
    assert value.files == steps


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
        with pytest.raises(
            CheckpointError,
            match=r"There is a checkpoint of step 1 .*\n.*\n.*manager.delete\(1\)",
        ):
            value.save(manager, 1)
        manager.delete(1)
        assert manager.all_steps() == []
        value.save(manager, 1)
    assert value.files == ["1"]


def test_arguments(value: Value, tmp_path: Any) -> None:
    with pytest.raises(
        StructureTypeError,
        match=r"CheckpointManager\(Checkpoint\(model=model\), directory\)",
    ):
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
    with pytest.raises(
        CheckpointError, match=r"(?s)no checkpoint of step 6 .*the steps \[5\]"
    ):
        manager.restore(6)
    with pytest.raises(CheckpointError, match="no checkpoint of step 6"):
        manager.delete(6)
    manager.close()
    manager.close()
    value.save(manager, 6)
    manager.close()
    assert not value.directory.joinpath("nothing").exists() and value.files == [
        "5",
        "6",
    ]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("asynchronous", [True, False])
def test_what_was_saved_is_the_moment_of_the_save(
    asynchronous: bool, tmp_path: Any
) -> None:
    """Training goes on while files are written; the steps are given the variables'
    memory to write into.
    """
    loop = Loop(4)
    loop.run(1)
    moments = {}
    with CheckpointManager(
        Checkpoint(**loop.objects), tmp_path, asynchronous=asynchronous
    ) as manager:
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


def test_an_error_in_the_background_appears_at_the_next_call(
    value: Value, monkeypatch: Any
) -> None:
    """Once, and the manager goes on; a save that failed deletes nothing."""
    manager = value.manager(max_to_keep=1)
    value.save(manager, 0)
    manager.wait()
    for call in (
        manager.wait,
        manager.restore,
        lambda: value.save(manager, 2),
        manager.close,
    ):
        with Refusing(monkeypatch, NO_SPACE):
            value.save(manager, 1)
            with pytest.raises(
                CheckpointError,
                match=r"(?s)/1' could not be written.*No space left on device.*Fix: ",
            ) as e:
                call()
        assert isinstance(e.value.__cause__, OSError)
        assert value.files == ["0"] and manager.all_steps() == [0]
        assert manager.restore().step == 0
    value.save(manager, 2)
    manager.close()
    assert value.files == ["2"]


def test_after_an_error_at_the_end_the_step_is_not_too_soon(
    value: Value, monkeypatch: Any
) -> None:
    manager = value.manager(save_interval_steps=10)
    value.save(manager, 0)
    manager.wait()
    with Refusing(monkeypatch, NO_SPACE):
        value.save(manager, 10)
        with pytest.raises(CheckpointError, match="No space left"):
            manager.close()
    assert value.save(manager, 9) is None
    assert value.save(manager, 10) == str(value.directory / "10")
    manager.close()
    assert value.files == ["0", "10"]


def test_an_error_of_a_synchronous_save_appears_at_once(
    value: Value, monkeypatch: Any
) -> None:
    manager = value.manager(asynchronous=False, max_to_keep=1)
    value.save(manager, 0)
    with (
        Refusing(monkeypatch, NO_SPACE),
        pytest.raises(CheckpointError, match="No space left"),
    ):
        value.save(manager, 1)
    assert value.files == ["0"]
    value.save(manager, 1)
    assert value.files == ["1"]


def test_an_error_does_not_hide_the_one_of_the_with_block(
    value: Value, monkeypatch: Any
) -> None:
    with (
        pytest.raises(KeyError) as error,
        Refusing(monkeypatch, NO_SPACE),
        value.manager() as manager,
    ):
        value.save(manager, 0)
        raise KeyError("training failed")
    assert "could not be written" in error.value.__notes__[0]


def test_another_process_reads_while_this_one_writes(value: Value) -> None:
    """A second manager sees each step when it is complete, and never deletes what the
    first is writing.
    """
    reader = value.manager()
    with value.manager() as writer:
        for step in range(3):
            value.save(writer, step)
            reader.all_steps()
            writer.wait()
            assert reader.latest_step == step
            assert reader.restore().step == step
    assert value.files == ["0", "1", "2"]


@contextlib.contextmanager
def slow_writes(monkeypatch: Any, error: Exception | None = None) -> Iterator[Any]:
    """Files are not complete before the program has gone on for a while."""
    from keras_distribute.checkpoint import manifest

    original, gate = manifest.to_bytes, threading.Event()

    def write(*args: Any) -> bytes:
        gate.wait(60)
        if error is not None:
            raise error
        return original(*args)

    monkeypatch.setattr(manifest, "to_bytes", write)
    try:
        yield lambda: threading.Timer(0.3, gate.set).start()
    finally:
        gate.set()
        for thread in threading.enumerate():
            if thread.name == "save_finalize":
                thread.join()
        monkeypatch.setattr(manifest, "to_bytes", original)


def read_by_restore(value: Value, path: str) -> None:
    Checkpoint(v=value.variable).restore(path)


def read_by_read(value: Value, path: str) -> None:
    Checkpoint(v=value.variable).read(path)


def read_by_another_spelling(value: Value, path: str) -> None:
    os.symlink(path, value.directory / "newest")
    Checkpoint(v=value.variable).restore(value.directory / ".." / "run" / "newest")


def read_by_another_manager(value: Value, path: str) -> None:
    assert value.manager().restore().path == path


def read_by_the_start_of_a_run(value: Value, path: str) -> None:
    assert value.manager().restore_or_initialize() == path


def read_by_a_handler_of_preemption(value: Value, path: str) -> None:
    config = kd.experimental.TerminationConfig(termination_watcher_fn=lambda: True)
    kd.experimental.PreemptionCheckpointHandler(
        None, value.checkpoint, value.directory, config
    )


@pytest.mark.parametrize(
    "read",
    [
        read_by_restore,
        read_by_read,
        read_by_another_spelling,
        read_by_another_manager,
        read_by_the_start_of_a_run,
        read_by_a_handler_of_preemption,
    ],
)
def test_what_was_saved_is_known_at_once_and_waited_for(
    read: Any, value: Value, monkeypatch: Any
) -> None:
    with value.manager(max_to_keep=2) as manager, slow_writes(monkeypatch) as go_on:
        path = value.save(manager, 1)
        assert not os.path.exists(path or "")
        assert manager.latest_checkpoint == path
        assert manager.checkpoints == [path]
        assert manager.latest_step == value.manager().latest_step == 1
        value.variable.assign(9.0)
        go_on()
        read(value, path)
        assert float(value.variable.value) == 1.0


def test_a_save_under_way_replaces_what_it_will_delete(
    value: Value, monkeypatch: Any
) -> None:
    """Those are there until it is complete, but a reader would lose them meanwhile."""
    options: Any = {"max_to_keep": 1, "keep_best": ("loss", "min")}
    with value.manager(**options) as manager:
        for step, loss in enumerate((1.0, 3.0, 2.0)):
            value.save(manager, step, metrics={"loss": loss})
        manager.wait()
        with slow_writes(monkeypatch) as go_on:
            value.save(manager, 3, metrics={"loss": 0.5})
            other = value.manager(**options)
            for each in (manager, other):
                assert (each.all_steps(), each.best_step) == ([3], 3)
            assert value.files[:2] == ["0", "2"]
            go_on()
            with pytest.raises(CheckpointError, match="There is no checkpoint at"):
                Checkpoint(v=value.variable).restore(value.directory / "2")
            assert other.restore().step == 3
    assert value.files == ["3"]


def test_a_save_that_fails_later_counts_until_its_error_is_told(
    value: Value, monkeypatch: Any
) -> None:
    """By what reads it, and by its manager; then the last complete one is the latest."""
    manager = value.manager(max_to_keep=1)
    value.save(manager, 0)
    manager.wait()
    for read in (
        lambda: Checkpoint(v=value.variable).restore(manager.latest_checkpoint),
        lambda: value.manager().restore(),
        lambda: value.manager().restore_or_initialize(),
    ):
        with slow_writes(monkeypatch, NO_SPACE) as go_on:
            value.save(manager, 1)
            assert manager.all_steps() == [1]
            go_on()
            with pytest.raises(
                CheckpointError, match="(?s)/1' could not be written.*No space left"
            ):
                read()
            assert manager.all_steps() == value.manager().all_steps() == [0]
            with pytest.raises(CheckpointError, match="/1' could not be written"):
                manager.save()
        assert float(value.variable.value) == 1.0
        assert manager.restore().step == 0
    value.save(manager, 1)
    manager.close()
    assert value.files == ["1"]


def test_a_failure_that_another_thread_has_read_is_told_once_in_this_one(
    value: Value, monkeypatch: Any
) -> None:
    told: list[str] = []

    def read(path: Any) -> None:
        try:
            Checkpoint(v=value.variable).restore(path)
        except CheckpointError as error:
            told.append(str(error).split("\n")[0])

    with slow_writes(monkeypatch, NO_SPACE) as go_on:
        manager = value.manager()
        path = value.save(manager, 0)
        thread = threading.Thread(target=read, args=[path])
        thread.start()
        go_on()
        thread.join()
        assert told == [
            f"The checkpoint {path!r} could not be written; earlier ones are as they were."
        ]
        with pytest.raises(CheckpointError, match="could not be written"):
            manager.wait()
    value.save(manager, 0)
    manager.close()
    assert value.files == ["0"]


def test_the_with_block_does_not_repeat_what_was_read_in_it(
    value: Value, monkeypatch: Any
) -> None:
    with (
        pytest.raises(CheckpointError, match="could not be written") as error,
        Refusing(monkeypatch, NO_SPACE),
        value.manager() as manager,
    ):
        Checkpoint(v=value.variable).restore(value.save(manager, 0))
    assert not hasattr(error.value, "__notes__")


def test_two_managers_of_one_folder_do_not_disturb_each_other(
    value: Value, monkeypatch: Any
) -> None:
    """Numbers go on after what the other is writing; what it writes is waited for."""
    first, second = value.manager(), value.manager()
    with slow_writes(monkeypatch) as go_on:
        value.variable.assign(5.0)
        first.save()
        go_on()
        value.variable.assign(6.0)
        assert second.save() == str(value.directory / "1")
    second.close()
    assert first.restore(0).step == 0 and float(value.variable.value) == 5.0
    second.delete(0)
    value.variable.assign(7.0)
    first.save(0)
    second.delete(0)
    assert first.all_steps() == second.all_steps() == [1]
    first.close()


def test_the_best_step_of_a_reader_is_that_of_the_folder(value: Value) -> None:
    """Also when another manager has saved a step anew."""
    best: Any = {"keep_best": ("loss", "min"), "max_to_keep": None}
    writer, reader = value.manager(**best), value.manager(**best)
    value.save(writer, 1, metrics={"loss": 0.1})
    value.save(writer, 2, metrics={"loss": 0.5})
    writer.wait()
    assert writer.best_step == reader.best_step == 1
    writer.delete(1)
    value.save(writer, 1, metrics={"loss": 0.9})
    writer.wait()
    assert writer.best_step == reader.best_step == 2
    writer.close()


def test_the_save_of_a_dropped_manager_is_known_and_waited_for(
    value: Value, monkeypatch: Any
) -> None:
    with slow_writes(monkeypatch) as go_on:
        path = value.save(value.manager(), 3)
        gc.collect()
        go_on()
        value.variable.assign(0.0)
        Checkpoint(v=value.variable).restore(path)
    assert float(value.variable.value) == 3.0


def test_nothing_is_kept_of_saves_that_are_over(value: Value) -> None:
    with value.manager() as manager:
        value.save(manager, 1)
    assert under_way.in_folder(manager.directory) is None
    synchronous = value.manager(asynchronous=False)
    value.save(synchronous, 2)
    assert synchronous.all_steps() == [1, 2]
    assert under_way.in_folder(manager.directory) is None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="This system has no fork.")
@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_forked_process_that_ends_leaves_the_save_of_its_parent_alone(
    value: Value, monkeypatch: Any
) -> None:
    """As the workers of a `DataLoader` of torch do."""
    finalize, go_on = ManifestHandler.finalize, threading.Event()

    def slow(*args: Any) -> None:
        go_on.wait(30)
        finalize(*args)

    monkeypatch.setattr(ManifestHandler, "finalize", slow)

    def fork() -> int | None:
        process = multiprocessing.get_context("fork").Process(target=int)
        process.start()
        process.join(30)
        return process.exitcode

    with value.manager() as manager:
        value.save(manager, 1)
        assert fork() == 0
        go_on.set()
        manager.wait()
        assert manager.all_steps() == [1]
        assert fork() == 0
        value.save(manager, 2)
        assert manager.restore().step == 2


def test_restoring_none_says_once_that_nothing_was_restored(value: Value) -> None:
    checkpoints._warn_of_nothing.cache_clear()
    manager = value.manager()
    with pytest.warns(
        UserWarning, match="the path was None.*restore_or_initialize"
    ) as w:
        assert value.checkpoint.restore(manager.latest_checkpoint).restored == ()
    assert w[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert value.checkpoint.restore(None).path is None
        assert value.checkpoint.read(None).path is None


def test_checkpoints_of_tensorflow_are_named(value: Value) -> None:
    """They are not read; a run that was moved would begin anew in silence."""
    manager = value.manager()
    assert manager.restore_or_initialize() is None
    value.directory.mkdir(exist_ok=True)
    for name in ("checkpoint", "ckpt-7.index", "ckpt-7.data-00000-of-00001"):
        (value.directory / name).touch()
    with pytest.warns(
        UserWarning, match=r"of TensorFlow alone \(ckpt-7\).*Fix: .*Keras"
    ):
        assert manager.restore_or_initialize() is None
    with pytest.raises(
        CheckpointError, match=r"(?s)holds.*Fix: files of tf.train.Check"
    ):
        value.checkpoint.restore(str(value.directory / "ckpt-7"))
    with pytest.raises(CheckpointError, match=r"Fix: the path that checkpoint.save"):
        value.checkpoint.restore(str(value.directory / "ckpt-8"))
    value.save(manager, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert manager.restore_or_initialize() == manager.latest_checkpoint


@pytest.mark.parametrize("step", [-1, 2.5, "3", float("nan"), float("inf"), [1]])
def test_a_step_is_a_whole_number(step: Any, value: Value) -> None:
    with pytest.raises(
        CheckpointError, match=r"(?s)whole number from 0.*Received: step=.*Fix: "
    ):
        value.manager().save(step)
    assert not value.directory.exists()
