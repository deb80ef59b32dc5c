"""Ctrl-C while a checkpoint is saved: every later save works, nothing complete is lost,
and what was being written is written.
"""

from __future__ import annotations

import errno
import os
import pathlib
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import orbax.checkpoint as ocp
import pytest

import keras_distribute as kd
from keras_distribute.checkpoint.manifest_item import ManifestHandler
from keras_distribute.errors import CheckpointError
from tests.interruptions import Interrupter

from .support import assert_same_bits, bits, scope

pytestmark = pytest.mark.timeout(60)


def interrupt() -> None:
    main = threading.main_thread().ident
    assert main is not None
    signal.pthread_kill(main, signal.SIGINT)


class CtrlC:
    """Sends the main thread a signal when a method is called, or has returned."""

    def __init__(
        self, monkeypatch: Any, owner: Any, name: str, *, after: bool = False
    ) -> None:
        original = getattr(owner, name)
        self.is_due = self.has_struck = False

        def called(*args: Any, **kwargs: Any) -> Any:
            if not after:
                self._strike()
            result = original(*args, **kwargs)
            if after:
                self._strike()
            return result

        monkeypatch.setattr(owner, name, called)

    def __call__(self, function: Callable[[], Any]) -> None:
        self.is_due = True
        with pytest.raises(KeyboardInterrupt):
            function()
        assert not self.is_due

    def _strike(self) -> None:
        if self.is_due:
            self.is_due, self.has_struck = False, True
            interrupt()


class Saved:
    """One variable, and what is known of its checkpoints."""

    def __init__(self, folder: pathlib.Path) -> None:
        with scope(2):
            self.variable = keras.Variable(0.0)
        self.folder = folder
        self.checkpoint = kd.Checkpoint(v=self.variable)

    def manager(self, **options: Any) -> kd.CheckpointManager:
        return kd.CheckpointManager(self.checkpoint, self.folder, 2, **options)

    def save(self, manager: kd.CheckpointManager) -> None:
        self.variable.assign_add(1.0)
        manager.save()

    def check(self, manager: kd.CheckpointManager) -> None:
        """All that is listed is there and complete, and nothing else is."""
        manager.wait()
        names = {n for n in os.listdir(self.folder) if n != "being_deleted"}
        assert names == {str(step) for step in manager.all_steps()}
        for path in manager.checkpoints:
            kd.Checkpoint(v=keras.Variable(0.0)).restore(path)


@pytest.fixture(autouse=True)
def ctrl_c_interrupts() -> Iterator[None]:
    """Also where whoever has started the tests ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def saved(tmp_path: pathlib.Path) -> Saved:
    return Saved(tmp_path / "run")


PLACES: list[tuple[Any, str, bool]] = [
    (ocp.CheckpointManager, "wait_until_finished", False),
    (ocp.CheckpointManager, "save", False),
    (ocp.CheckpointManager, "save", True),
    (ocp.CheckpointManager, "_get_old_steps_to_remove", False),
]


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("owner, name, after", PLACES)
def test_a_manager_goes_on(
    owner: Any,
    name: str,
    after: bool,
    asynchronous: bool,
    saved: Saved,
    monkeypatch: Any,
) -> None:
    with saved.manager(asynchronous=asynchronous) as manager:
        saved.save(manager)
        saved.save(manager)
        CtrlC(monkeypatch, owner, name, after=after)(lambda: saved.save(manager))
        assert (manager.latest_step or 0) >= 1
        for _ in range(2):
            saved.save(manager)
        saved.check(manager)
        saved.variable.assign(0.0)
        manager.restore()
        assert float(saved.variable.value) == 5.0
        assert len(manager.all_steps()) == 2
    saved.check(manager)


def test_a_manager_goes_on_from_each_place_of_a_save(saved: Saved) -> None:
    """Also from those before Orbax is called, and after."""
    inside = "keras_distribute/"
    with saved.manager() as manager:
        saved.save(manager)
        counter = Interrupter(None, inside=inside)
        counter(lambda: saved.save(manager))
        for place in range(7, counter.count, counter.count // 8):
            before = manager.all_steps()
            interrupter = Interrupter(place, inside=inside)
            assert interrupter(lambda: saved.save(manager)), place
            assert manager.all_steps()[-1] >= before[-1], interrupter.where
            saved.save(manager)
            manager.wait()
            assert manager.all_steps()[-1] > before[-1], interrupter.where
        saved.check(manager)


def test_waiting_is_interrupted(saved: Saved, monkeypatch: Any) -> None:
    go_on, finalize = threading.Event(), ManifestHandler.finalize

    def slow(*args: Any) -> None:
        go_on.wait(30)
        finalize(*args)

    monkeypatch.setattr(ManifestHandler, "finalize", slow)
    with saved.manager() as manager:
        saved.save(manager)
        threading.Timer(0.2, interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            manager.wait()
        assert manager.all_steps() == [0]
        assert os.listdir(saved.folder) != ["0"]
        go_on.set()
        saved.check(manager)
        saved.save(manager)
        saved.check(manager)


def test_another_manager_waits_for_an_interrupted_save(
    saved: Saved, monkeypatch: Any
) -> None:
    """As a `fit` that is started again after Ctrl-C does."""
    manager = saved.manager(asynchronous=False)
    saved.save(manager)
    place = (ocp.CheckpointManager, "save")
    CtrlC(monkeypatch, *place)(lambda: saved.save(manager))
    other = saved.manager()
    assert other.restore_or_initialize() == str(saved.folder / "1")
    saved.save(other)
    saved.check(other)
    assert manager.all_steps() == other.all_steps() == [1, 2]


def test_closing_is_interrupted(saved: Saved, monkeypatch: Any) -> None:
    manager = saved.manager()
    saved.save(manager)
    CtrlC(monkeypatch, ocp.CheckpointManager, "close")(manager.close)
    saved.save(manager)
    saved.check(manager)
    manager.close()
    assert manager.all_steps() == [0, 1]


def test_what_was_saved_in_between_is_not_lost(saved: Saved, monkeypatch: Any) -> None:
    """A save that takes its place is interrupted before it has begun."""
    manager = saved.manager()
    saved.save(manager)
    manager._save_in_between()
    manager.wait()
    snapshot = CtrlC(monkeypatch, kd.Checkpoint, "_snapshot")
    snapshot(lambda: manager.save(1))
    assert manager.all_steps() == [0, 1]
    manager.save(1)
    saved.check(manager)
    assert manager.all_steps() == [0, 1]


def test_a_checkpoint_is_completed(saved: Saved, monkeypatch: Any) -> None:
    prefix = saved.folder / "c"
    ctrl_c = CtrlC(monkeypatch, ocp.Checkpointer, "save")
    ctrl_c(lambda: saved.checkpoint.save(prefix))
    assert saved.checkpoint.save(prefix) == f"{prefix}-2"
    assert sorted(os.listdir(saved.folder)) == ["c-1", "c-2"]
    saved.checkpoint.restore(f"{prefix}-1")
    assert saved.checkpoint.save_counter == 1


def test_a_backup_goes_on(tmp_path: pathlib.Path, monkeypatch: Any) -> None:
    x, y = np.eye(8, dtype="float32"), np.arange(8.0)

    def fit(**options: Any) -> Any:
        keras.utils.set_random_seed(1)
        with scope(1):
            model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        model.fit(x, y, batch_size=2, verbose=0, **options)
        return bits(model=model)

    def fit_and_save() -> Any:
        backup = kd.callbacks.BackupAndRestore(
            tmp_path / "b", save_freq=1, delete_checkpoint=False
        )
        return fit(callbacks=[backup])

    CtrlC(monkeypatch, ocp.CheckpointManager, "save")(fit_and_save)
    assert os.path.exists(tmp_path / "b" / "0" / "manifest")
    assert_same_bits(fit_and_save(), fit())


def failing_once(monkeypatch: Any, owner: Any) -> CtrlC:
    """Interrupts the caller of Orbax's `save`, which then finds no room."""
    original, failures = owner.save, [OSError(errno.ENOSPC, "No space left")]

    def save(*args: Any, **kwargs: Any) -> Any:
        if ctrl_c.has_struck and failures:
            raise failures.pop()
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, "save", save)
    ctrl_c = CtrlC(monkeypatch, owner, "save")
    return ctrl_c


@pytest.mark.parametrize("call", ["save", "restore", "wait", "close"])
def test_an_interrupted_save_that_fails_is_told(
    call: str, saved: Saved, monkeypatch: Any
) -> None:
    manager = saved.manager()
    saved.save(manager)
    failing_once(monkeypatch, ocp.CheckpointManager)(lambda: saved.save(manager))
    with pytest.raises(CheckpointError, match=r"'.*/1' could not .*(\n.*)*No space"):
        getattr(manager, call)()
    assert manager.all_steps() == [0]
    saved.save(manager)
    saved.check(manager)
    manager.close()
    assert manager.all_steps() == [0, 1]


def test_an_interrupted_checkpoint_that_fails_is_told(
    saved: Saved, monkeypatch: Any
) -> None:
    prefix = saved.folder / "c"
    first = saved.checkpoint.save(prefix)
    ctrl_c = failing_once(monkeypatch, ocp.Checkpointer)
    ctrl_c(lambda: saved.checkpoint.save(prefix))
    saved.checkpoint.read(first)
    with pytest.raises(CheckpointError, match=r"c-2' could not .*(\n.*)*No space"):
        saved.checkpoint.restore(f"{prefix}-2")
    assert saved.checkpoint.save(prefix) == f"{prefix}-3"

    failing_once(monkeypatch, ocp.Checkpointer)(lambda: saved.checkpoint.save(prefix))
    with pytest.raises(CheckpointError, match=r"c-4' could not .*(\n.*)*No space"):
        saved.checkpoint.save(saved.folder / "other")
    assert saved.checkpoint.save(prefix) == f"{prefix}-5"


def test_reading_is_interrupted(saved: Saved) -> None:
    """No Ctrl-C is taken for damage, nor waits for threads that it has broken."""
    manager = saved.manager()
    saved.save(manager)
    saved.save(manager)
    manager.wait()
    calls = (manager.all_steps, lambda: manager.restore(fallback=True))
    for call in calls:
        call()
        counter = Interrupter(None)
        counter(call)
        for place in range(3, counter.count, counter.count // 40):
            interrupter = Interrupter(place)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                interrupter(call)
    assert manager.restore(fallback=True).step == 1
