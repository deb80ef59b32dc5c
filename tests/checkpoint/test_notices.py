"""What a notice of the end leads to, in one process: in `fit`, and in a loop of one's
own.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import threading
import time
import weakref
from typing import Any

import keras
import pytest

import keras_distribute as kd
from keras_distribute.checkpoint import preemption
from keras_distribute.checkpoint.step_folder import StepFolder
from keras_distribute.errors import CheckpointError, StructureTypeError

from .interrupting import Cut, assert_same, fit_arrays, run
from .support import made, scope

pytestmark = pytest.mark.timeout(120)
Config = kd.experimental.TerminationConfig


class Ended(Exception):
    """How the program ends here."""


def end() -> None:
    raise Ended


class At(keras.callbacks.Callback):
    """Sends `SIGTERM` at the `count`th call of a method; it has no state, so that a
    second run gets none either.
    """

    def __init__(self, method: str, count: int) -> None:
        super().__init__()
        self._left = count
        setattr(self, method, self.strike)

    def get_state(self) -> dict[str, Any]:
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        """It has none."""

    def strike(self, *_: Any, **__: Any) -> None:
        self._left -= 1
        if not self._left:
            signal.raise_signal(signal.SIGTERM)


@functools.cache
def uninterrupted() -> dict[str, Any]:
    return run(2, fit_arrays, None)


@pytest.mark.parametrize(
    "method",
    [
        "on_train_batch_begin",
        "on_train_batch_end",
        "on_test_batch_begin",
        "on_epoch_end",
    ],
)
@pytest.mark.sampled(6)
@pytest.mark.parametrize("freq", [1, "epoch", False])
def test_in_fit(method: str, freq: Any, tmp_path: Any) -> None:
    """Saves, whatever `save_freq` is, and exits; the second run does the rest."""
    backup = {"save_freq": freq, "termination_config": Config(exit_fn=end)}
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Ended):
        run(2, fit_arrays, tmp_path / "b", backup=backup, callbacks=[At(method, 2)])
    assert signal.getsignal(signal.SIGTERM) == before
    assert_same(
        run(
            2,
            fit_arrays,
            tmp_path / "b",
            backup=backup,
            callbacks=[At(method, 1000)],
            seed=9,
        ),
        uninterrupted(),
    )


def test_a_save_that_fails_before_the_exit_is_what_is_seen(tmp_path: Any) -> None:
    """Not the signal, sent again, which would end the program without a word."""

    class Blocking(At):
        def strike(self, *_: Any, **__: Any) -> None:
            self._left -= 1
            if not self._left:
                (tmp_path / "b").write_text("a file where the folder has to be")
                signal.raise_signal(signal.SIGTERM)

    with pytest.raises(CheckpointError, match="could not be written"):
        run(
            2,
            fit_arrays,
            tmp_path / "b",
            backup={"save_freq": False},
            callbacks=[Blocking("on_train_batch_end", 2)],
        )


@pytest.mark.parametrize("processes", [1, 2])
def test_a_second_signal_does_not_change_how_a_process_exits(processes: int) -> None:
    """Slurm and `mpirun` end those that are left when the first one has exited."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        watch = preemption.Watch(None, lambda: processes)
        watch.start()
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(SystemExit, match="42"):
            watch.save_and_react(preemption.Reaction.EXIT, lambda: None)
        watch.stop()
        ignored = signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ignored == (processes > 1)


def test_a_notice_that_comes_with_the_end_of_fit(tmp_path: Any) -> None:
    """The training is complete, and saved; the next start trains nothing."""
    backup = {"termination_config": Config(exit_fn=end)}
    with pytest.raises(Ended):
        run(
            2,
            fit_arrays,
            tmp_path / "b",
            backup=backup,
            callbacks=[At("on_train_end", 1)],
        )
    assert_same(
        run(
            2,
            fit_arrays,
            tmp_path / "b",
            backup=backup,
            callbacks=[At("on_train_batch_end", 1)],
        ),
        uninterrupted(),
    )


def test_ctrl_c_while_the_last_save_is_waited_for(
    monkeypatch: Any, tmp_path: Any
) -> None:
    """The signal is given back, and the copy of before the validation is freed."""

    def interrupted(self: StepFolder) -> None:
        raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(StepFolder, "close", interrupted)
    backup = kd.callbacks.BackupAndRestore(tmp_path / "b")
    cut = Cut("on_test_batch_end", 1)
    with pytest.raises(KeyboardInterrupt):
        fit_arrays(made(2), [backup, cut])
    assert signal.getsignal(signal.SIGTERM) == before
    assert backup._run is not None and backup._run._held is None


def test_a_signal_that_is_not_waited_for_stays_with_its_handler(tmp_path: Any) -> None:
    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    try:
        run(
            2,
            fit_arrays,
            tmp_path / "b",
            backup={"save_before_preemption": False},
            callbacks=[At("on_epoch_end", 1)],
        )
        assert received == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_another_notice_than_a_signal(tmp_path: Any) -> None:
    """Asked for in a thread; an exit function that returns lets the training go on, and
    is called once.
    """
    calls: list[str] = []

    def told() -> bool:
        calls.append("asked")
        return True

    config = Config(termination_watcher_fn=told, exit_fn=lambda: calls.append("exit"))

    class Slow(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            while "asked" not in calls:
                time.sleep(0.01)

    result = run(
        2,
        fit_arrays,
        tmp_path / "b",
        backup={"termination_config": config},
        callbacks=[Slow()],
    )
    assert_same(result, uninterrupted())
    assert calls == ["asked", "exit"]


def test_a_watcher_that_fails_is_asked_again(tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(preemption, "_POLL_SECONDS", 0.01)
    answers: list[Any] = [OSError("no service"), OSError("no service"), True]

    def told() -> bool:
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    watch = preemption.Watch(Config(termination_watcher_fn=told), lambda: 1)
    watch.start()
    end = time.monotonic() + 20
    while not watch.is_notified() and time.monotonic() < end:
        time.sleep(0.01)
    assert watch.is_notified() and not answers
    watch.stop()


def test_outside_of_the_main_thread_is_warned_about(tmp_path: Any) -> None:
    def train() -> None:
        with pytest.warns(
            UserWarning, match="SIGTERM cannot be waited for outside of the main thread"
        ):
            results.append(run(2, fit_arrays, tmp_path / "b"))

    results: list[Any] = []
    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert_same(results[0], uninterrupted())


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"exit_fn": 42}, r"exit_fn is a function.\n  Received: exit_fn=42"),
        ({"termination_watcher_fn": "SIGTERM"}, "termination_watcher_fn is a function"),
        ({"save_fn": 1}, "save_fn is a function"),
        (
            {"grace_period": -1},
            r"grace_period is a number of seconds.\n  Received: grace_period=-1",
        ),
        ({"grace_period": "60"}, "grace_period is a number of seconds"),
    ],
)
def test_configurations(options: dict[str, Any], error: str) -> None:
    with pytest.raises(StructureTypeError, match=error):
        Config(**options)


# Loops of one's own.
# -------------------------------------------------------------------------------------------------


class Counting:
    """A loop that counts, a checkpoint of it, and a handler; made again, it is the
    program after a restart.
    """

    def __init__(self, directory: Any, save_fn: Any = None, **options: Any) -> None:
        with scope(2):
            self.count = keras.Variable(0.0)
        checkpoint = kd.Checkpoint(count=self.count)
        self.manager = kd.CheckpointManager(checkpoint, directory, **options)
        config = Config(exit_fn=end, save_fn=save_fn)
        self.handler = kd.experimental.PreemptionCheckpointHandler(
            None, self.manager, termination_config=config
        )

    def step(self, preempted: bool = False) -> None:
        self.handler.run(lambda: self.count.assign_add(1.0))
        if preempted:
            signal.raise_signal(signal.SIGTERM)


@pytest.fixture(autouse=True)
def handler_of_before() -> Any:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def test_a_step_keeps_its_number(tmp_path: Any) -> None:
    """Preempted twice between saves, the exits' checkpoints give way to the step's."""
    loop = Counting(tmp_path)
    loop.step()
    loop.manager.save(1)
    for _ in range(2):
        loop.step(preempted=True)
        with pytest.raises(Ended):
            loop.step()
        loop.manager.close()
        loop = Counting(tmp_path)
    assert float(loop.count.numpy()) == loop.handler.total_run_calls == 3
    assert loop.manager.all_steps() == [1, 2, 3]
    loop.manager.save(2)
    loop.manager.wait()
    assert loop.manager.all_steps() == [1, 2]
    loop.count.assign(-1.0)
    assert loop.manager.restore().step == 2 and float(loop.count.numpy()) == 3
    with pytest.raises(CheckpointError, match="There is a checkpoint of step 2"):
        loop.manager.save(2)
    loop.manager.close()


def test_a_number_of_the_user(tmp_path: Any) -> None:
    """For loops without `run`; a step that was saved a moment ago is not saved again."""
    for saved_before in (False, True):
        loop = Counting(tmp_path / str(saved_before), keep_best=("loss", "min"))
        loop.count.assign_add(1.0)
        if saved_before:
            loop.manager.save(1, metrics={"loss": 1.0})
        loop.handler.save_checkpoint_if_preempted(1, {"loss": 2.0})
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Ended):
            loop.handler.save_checkpoint_if_preempted(1, {"loss": 2.0})
        assert loop.manager.all_steps() == [1]
        loop.manager.close()


@pytest.mark.parametrize("metrics", [{"loss": 2.0}, None])
def test_metrics_without_a_number(metrics: Any, tmp_path: Any) -> None:
    """Saves although nothing was saved before."""
    loop = Counting(tmp_path)
    signal.raise_signal(signal.SIGTERM)
    with pytest.raises(Ended):
        loop.handler.save_checkpoint_if_preempted(metrics=metrics)
    assert loop.manager.all_steps() == [0]
    status = loop.manager.restore()
    assert status.metrics == {"total_run_calls": 1} | (metrics or {})
    loop.manager.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="This system has no fork.")
@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_forked_process_can_be_terminated(tmp_path: Any) -> None:
    loop = Counting(tmp_path)
    fork = multiprocessing.get_context("fork")
    heard, says = fork.Pipe()
    process = fork.Process(target=lambda: (says.send(None), time.sleep(30)))
    process.start()
    heard.recv()
    process.terminate()
    process.join()
    assert process.exitcode == -signal.SIGTERM
    loop.step()
    loop.step()
    assert loop.manager.all_steps() == []


def test_a_dropped_handler_gives_the_signal_back(tmp_path: Any) -> None:
    """At once, though its manager lives on; in another thread, where it cannot, it
    passes the signal on; a handler that was made meanwhile stays.
    """
    received: list[int] = []
    signal.signal(signal.SIGTERM, before := lambda number, _: received.append(number))
    loop = Counting(tmp_path / "a")
    handler = weakref.ref(loop.handler)
    del loop.handler
    assert handler() is None and signal.getsignal(signal.SIGTERM) is before

    loop = Counting(tmp_path / "b")
    thread = threading.Thread(target=lambda: delattr(loop, "handler"))
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is not before
    signal.raise_signal(signal.SIGTERM)
    assert received == [signal.SIGTERM]

    loop = Counting(tmp_path / "c")
    loop = Counting(tmp_path / "d")
    loop.step(preempted=True)
    with pytest.raises(Ended):
        loop.step()
    assert len(received) == 1
    del loop.handler
    signal.raise_signal(signal.SIGTERM)
    assert len(received) == 2


@pytest.mark.parametrize(
    ("seconds", "asked"), [(10.0, [1, 2, 3, 4, 5, 6]), (0.5, [1, 2, 4, 6])]
)
def test_processes_ask_each_other_once_a_second(
    seconds: float, asked: list[int], monkeypatch: Any, tmp_path: Any
) -> None:
    """In loops without `run`, too, whose steps are the time between two calls; a save
    is none of it.
    """
    calls: list[int] = []
    now = 0.0

    def exchange(topic: str, said: Any, count: int) -> list[Any]:
        calls.append(loop.handler.total_run_calls)
        return [said] * count

    monkeypatch.setattr(preemption.agreement, "exchange", exchange)
    monkeypatch.setattr(preemption.time, "monotonic", lambda: now)
    loop = Counting(tmp_path)
    loop.handler._watch._num_processes = lambda: 2
    for _ in range(6):
        loop.handler.save_checkpoint_if_preempted()
        now += seconds
    assert calls == asked


def test_without_the_metric_of_the_best(tmp_path: Any) -> None:
    """An exit has no loss to offer."""
    loop = Counting(tmp_path, keep_best=("loss", "min"))
    with pytest.raises(Ended), loop.handler.watch_preemption_scope():
        loop.step(preempted=True)
    assert loop.manager.all_steps() == [0] and loop.manager.best_step is None
    loop.manager.close()


def test_a_function_that_saves(tmp_path: Any) -> None:
    saved: list[Any] = []
    loop = Counting(
        tmp_path, save_fn=lambda *args, **options: saved.append((args, options))
    )
    signal.raise_signal(signal.SIGTERM)
    with pytest.raises(Ended):
        loop.handler.save_checkpoint_if_preempted(3, note="x")
    assert saved == [((3,), {"note": "x"})] and loop.manager.all_steps() == []


def test_what_a_handler_takes(tmp_path: Any) -> None:
    make = kd.experimental.PreemptionCheckpointHandler
    with pytest.raises(
        StructureTypeError, match="takes a Checkpoint or a CheckpointManager"
    ):
        make(None, keras.Variable(1.0), tmp_path)  # pyright: ignore
    with pytest.raises(CheckpointError, match="A Checkpoint needs a folder"):
        make(None, kd.Checkpoint(v=keras.Variable(1.0)))
