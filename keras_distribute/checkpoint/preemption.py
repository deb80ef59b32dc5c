"""Preemption: who gives notice, what is left to do, and how the program ends."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import logging
import os
import signal
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Generator
from typing import Any

from keras_distribute import checks
from keras_distribute.checkpoint import Checkpoint, CheckpointManager
from keras_distribute.cluster import agreement
from keras_distribute.errors import CheckpointError, StructureTypeError

EXIT_CODE = 42
_POLL_SECONDS = 1.0
_MOST_STEPS = 50  # Between two questions to the other processes.
_RUNS = "total_run_calls"
_log = logging.getLogger("keras_distribute")


@dataclasses.dataclass(frozen=True)
class TerminationConfig:
    """How a program learns that it will be ended, and what it does then.

    Source: `tf.distribute.experimental.TerminationConfig`.

    Args:
        termination_watcher_fn: Called once a second, in a thread, until it returns
            `True`; by default `SIGTERM` is the notice.
        exit_fn: Called when the checkpoint is complete; by default the program exits
            with status 42, as TensorFlow's does. If it returns, the program goes on.
        grace_period: Seconds from the notice to the end. By default, and with 0, the
            step under way is completed, a checkpoint is saved, and the program exits.
            With more, a checkpoint is saved at once, and the time is used for training;
            shortly before the end another one is saved.
        save_fn: Called to save, with the arguments of `save_checkpoint_if_preempted`,
            in place of `CheckpointManager.save`.

    Raises:
        StructureTypeError: For anything but functions and a number of seconds.

    Example:
        >>> import sys, keras_distribute as kd
        >>> config = kd.experimental.TerminationConfig(grace_period=60.0)
        >>> config.grace_period
        60.0
    """

    termination_watcher_fn: Callable[[], bool] | None = None
    exit_fn: Callable[[], Any] | None = None
    grace_period: float | None = None
    save_fn: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        for name in ("termination_watcher_fn", "exit_fn", "save_fn"):
            given, fix = getattr(self, name), "exit_fn=lambda: sys.exit(3)"
            if given is not None:
                checks.function(name, given, f"{name} is a function.", fix)
        if self.grace_period is not None:
            checks.number(
                "grace_period",
                self.grace_period,
                zero=True,
                what="grace_period is a number of seconds.",
                fix="grace_period=60.0",
                error=StructureTypeError,
            )


class Reaction(enum.Enum):
    """What is to be done between two steps."""

    NONE = "nothing"
    SAVE = "save, and go on"
    EXIT = "save, and exit"


class Watch:
    """Waits for the notice, and says between steps what to do.

    Several processes ask each other for a notice about once a second, and then do what
    process 0 says.
    """

    def __init__(
        self, config: TerminationConfig | None, num_processes: Callable[[], int]
    ) -> None:
        self.config = config or TerminationConfig()
        self._num_processes = num_processes
        self._calls = self._next_call = 0
        self._all_know = False
        self._received: float | None = None
        self._saved = self._done = self._stopped = self._has_signal = False
        self._leaves = False
        self._previous: Any = None
        self._notice: Any = None
        self._step_seconds = self._save_seconds = 0.0

    def start(self) -> None:
        """Begins to wait; for a signal only in the main thread, as Python wants it."""
        self._stopped = False
        if self.config.termination_watcher_fn is not None:
            threading.Thread(
                target=self._poll, name="keras_distribute preemption", daemon=True
            ).start()
        elif threading.current_thread() is threading.main_thread():
            watch, previous = weakref.ref(self), signal.getsignal(signal.SIGTERM)
            process = os.getpid()

            def notice(*received: Any) -> None:
                own = watch()
                if own is not None and not own._stopped and os.getpid() == process:
                    own.notify()
                # Ended in another thread, below a handler that came later, or forked.
                else:
                    _pass_on(previous, *received)

            signal.signal(signal.SIGTERM, notice)
            self._previous, self._notice = previous, notice
            self._has_signal = True
        else:
            warnings.warn(
                "SIGTERM cannot be waited for outside of the main thread: it will end "
                "the program without a checkpoint. Train in the main thread, or pass "
                "TerminationConfig(termination_watcher_fn=...).",
                stacklevel=3,
            )

    def stop(self) -> None:
        """Ends the wait. A signal that came, but led to no exit, is sent again."""
        self._stopped = True
        if not self._has_signal:
            return
        self._has_signal = False
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGTERM) is self._notice:
            before = signal.SIG_DFL if self._previous is None else self._previous
            # Launchers signal those that are left when the first process has exited,
            # which is not to change with which status.
            signal.signal(signal.SIGTERM, signal.SIG_IGN if self._leaves else before)
        if self._received is not None and not self._done:
            os.kill(os.getpid(), signal.SIGTERM)

    def notify(self) -> None:
        """The notice has come."""
        if self._received is None:
            self._received = time.monotonic()

    def is_notified(self) -> bool:
        """Whether the notice has come, to any process, and none has exited yet."""
        own, count = self._received is not None, self._num_processes()
        return any(agreement.exchange("a notice", own, count)) and not self._done

    def reaction(self) -> Reaction:
        """What is to be done now."""
        count = self._num_processes()
        if count == 1:
            return self._own_reaction()
        if not self._all_know:
            self._calls += 1
            if self._calls < self._next_call:
                return Reaction.NONE
            own = (self._received is not None, self._step_seconds)
            said = agreement.exchange("a notice", own, count)
            slowest = max(seconds for _, seconds in said)
            # Before a step has ended, nobody knows how long one takes.
            steps = round(_POLL_SECONDS / max(0.001, slowest)) if slowest else 1
            self._next_call = self._calls + max(1, min(_MOST_STEPS, steps))
            self._all_know = any(received for received, _ in said)
            if not self._all_know:
                return Reaction.NONE
            self.notify()
        topic = "the reaction to a notice"
        return agreement.from_chief(topic, self._own_reaction, count)

    def _own_reaction(self) -> Reaction:
        if self._received is None or self._done:
            return Reaction.NONE
        grace = self.config.grace_period or 0
        if not grace:
            return Reaction.EXIT
        # Source: TensorFlow leaves six steps; and the save needs its time, too.
        needed = 6 * self._step_seconds + 2 * self._save_seconds
        if self._received + grace - time.monotonic() <= needed:
            return Reaction.EXIT
        return Reaction.NONE if self._saved else Reaction.SAVE

    def step_took(self, seconds: float) -> None:
        """Notes the time of a step; that of the first, which compiles, fades."""
        weight = 0.3 if self._step_seconds else 1.0
        self._step_seconds += weight * (seconds - self._step_seconds)

    def save_and_react(self, reaction: Reaction, save: Callable[[], Any]) -> None:
        """Calls `save`, which waits for its files; then exits if that is wanted."""
        start = time.monotonic()
        try:
            save()
        except BaseException:
            # This error ends the program; the signal, sent again, would hide it.
            self._done = True
            raise
        self._saved, self._save_seconds = True, time.monotonic() - start
        if reaction is Reaction.EXIT:
            self._done = True
            _log.warning(
                "Training was preempted; a checkpoint is saved, and the program exits."
            )
            self._leaves = self.config.exit_fn is None and self._num_processes() > 1
            (self.config.exit_fn or _exit)()

    def _poll(self) -> None:
        watcher = self.config.termination_watcher_fn
        assert watcher is not None
        has_failed = False
        while not self._stopped:
            try:
                if watcher():
                    self.notify()
                    return
            except Exception:  # Of a service that is away for a moment.
                if not has_failed:
                    what = "termination_watcher_fn has failed; it is asked again."
                    _log.warning(what, exc_info=True)
                has_failed = True
            time.sleep(_POLL_SECONDS)


class PreemptionCheckpointHandler:
    """Saves a checkpoint before the program is ended, and restores it at its start.

    Source: `tf.distribute.experimental.PreemptionCheckpointHandler`. For custom loops;
    in `fit` that is what `kd.callbacks.BackupAndRestore` does. When it is created, the
    latest checkpoint is restored, if there is one. After the notice, which is `SIGTERM`
    by default, the next call of `run` saves, and the program exits with status 42.
    Create it in the main thread.

    Differs from TF: works with every strategy. The position in the data is kept if the
    iterator is in the checkpoint: `kd.Checkpoint(model=model, data=iterator)`. The
    checkpoint of an exit has the number after the last one; the next save with that
    number, or a lower one, replaces it.

    Args:
        cluster_resolver: Accepted for compatibility; the processes are those of the
            variables.
        checkpoint_or_checkpoint_manager: What to save. Prefer a `CheckpointManager`
            that also saves from time to time: not every end has a notice.
        checkpoint_dir: The folder, for a `Checkpoint`.
        termination_config: What the notice is, and how to exit.

    Raises:
        CheckpointError: For a `Checkpoint` without a folder, and where the latest
            checkpoint cannot be restored.
        StructureTypeError: For anything but a `Checkpoint` or a `CheckpointManager`.

    Example:
        >>> import tempfile, keras, keras_distribute as kd
        >>> strategy = kd.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> with strategy.scope():
        ...     weight = keras.Variable(0.0)
        >>> progress = {"step": 0}
        >>> checkpoint = kd.Checkpoint(weight=weight, progress=progress)
        >>> handler = kd.experimental.PreemptionCheckpointHandler(
        ...     None, checkpoint, tempfile.mkdtemp())
        >>> def train_step():
        ...     return strategy.run(lambda: weight.assign_add(1.0))
        >>> while progress["step"] < 3:
        ...     _ = handler.run(train_step)
        ...     progress["step"] += 1
        >>> handler.total_run_calls
        3
    """

    def __init__(
        self,
        cluster_resolver: Any,
        checkpoint_or_checkpoint_manager: Checkpoint | CheckpointManager,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        termination_config: TerminationConfig | None = None,
    ) -> None:
        given = checkpoint_or_checkpoint_manager
        checks.instance(
            "checkpoint_or_checkpoint_manager",
            given,
            Checkpoint | CheckpointManager,
            "PreemptionCheckpointHandler takes a Checkpoint or a CheckpointManager.",
            "PreemptionCheckpointHandler(None, kd.Checkpoint(model=model), folder)",
        )
        what = "termination_config says how the program learns of its end."
        fix = "kd.experimental.TerminationConfig(), or None."
        kinds = TerminationConfig | None
        checks.instance("termination_config", termination_config, kinds, what, fix)
        if isinstance(given, Checkpoint):
            if checkpoint_dir is None:
                raise CheckpointError(
                    "A Checkpoint needs a folder to be saved in.",
                    received="checkpoint_dir=None.",
                    fix="PreemptionCheckpointHandler(None, checkpoint, "
                    "checkpoint_dir), or pass a CheckpointManager.",
                )
            given = CheckpointManager(given, checkpoint_dir, max_to_keep=1)
        self._manager = manager = given
        self._called: float | None = None
        runs = 0.0
        if manager._agreed_steps():
            status = manager.restore(fallback=True)
            runs = (status.metrics or {}).get(_RUNS, 0.0)
        # There, and not here: a manager must not keep a handler that was dropped.
        manager._always[_RUNS] = runs
        count = lambda: manager.checkpoint.num_processes  # noqa: E731
        self._watch = Watch(termination_config, count)
        self._watch.start()
        # At the exit of the program there is nothing to restore.
        weakref.finalize(self, self._watch.stop).atexit = False

    @property
    def total_run_calls(self) -> int:
        """How often `run` was called, before the program was started again, too.

        Deprecated in TF: keep a step in the checkpoint.
        """
        return int(self._manager._always[_RUNS])

    def run(
        self, distributed_train_function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Saves and exits if the notice has come; otherwise trains one step.

        Args:
            distributed_train_function: Calls `strategy.run`, for one step.
            *args: The function's arguments.
            **kwargs: The function's keyword arguments.

        Returns:
            The result of the function.
        """
        checks.function(
            "distributed_train_function",
            distributed_train_function,
            "A step is trained by a function.",
            "handler.run(train_step, batch)",
        )
        self._react()
        start = time.monotonic()
        result = distributed_train_function(*args, **kwargs)
        self._watch.step_took(time.monotonic() - start)
        self._manager._always[_RUNS] += 1
        return result

    def save_checkpoint_if_preempted(self, *args: Any, **kwargs: Any) -> None:
        """Saves and exits if the notice has come: for loops that do not use `run`.

        Args:
            *args: Arguments of `CheckpointManager.save`, or of the `save_fn` of the
                `TerminationConfig`.
            **kwargs: Their keyword arguments.
        """
        if self._called is not None:
            self._watch.step_took(time.monotonic() - self._called)
        self._manager._always[_RUNS] += 1  # The step is done, unlike in `run`.
        self._react(*args, **kwargs)
        self._called = time.monotonic()

    @contextlib.contextmanager
    def watch_preemption_scope(self) -> Generator[None]:
        """A `with` block around the loop, which reacts at its end to a late notice."""
        yield
        self._react()

    def _react(self, *args: Any, **kwargs: Any) -> None:
        reaction = self._watch.reaction()
        if reaction is Reaction.NONE:
            return

        def save() -> None:
            if self._watch.config.save_fn is not None:
                self._watch.config.save_fn(*args, **kwargs)
            elif not args and not kwargs:
                self._manager._save_in_between()
            else:
                step = kwargs.get("step", *args[:1])
                # Else the same step was saved a moment ago.
                if step is None or step != self._manager._last_step:
                    self._manager.save(*args, **{"force": True} | kwargs)
            self._manager.wait()

        self._watch.save_and_react(reaction, save)


def _pass_on(handler: Any, number: int, frame: Any) -> None:
    """Does with a signal what the handler of before would."""
    if callable(handler):
        handler(number, frame)
    elif handler != signal.SIG_IGN:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def _exit() -> None:
    sys.exit(EXIT_CODE)
