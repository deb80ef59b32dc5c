"""`CheckpointManager`: the checkpoints of one run, written while training goes on."""

from __future__ import annotations

import os
import threading
import warnings
from typing import Any

import numpy as np

from keras_distribute import checks
from keras_distribute.checkpoint.checkpoint import Checkpoint, load_storage
from keras_distribute.checkpoint.matching import RestoreStatus
from keras_distribute.checkpoint.step_folder import StepFolder
from keras_distribute.errors import CheckpointError

Metrics = dict[str, float] | None


class CheckpointManager:
    """Keeps the checkpoints of a run in one folder, a subfolder for each step, and
    deletes old ones.

    Source: `tf.train.CheckpointManager`. `save` copies the state to host memory and
    returns; the files are written in the background and appear under the step's name
    when they are complete. The step counts from the moment when `save` returns:
    `latest_checkpoint` names it, those that it replaces are left out, and whatever
    reads it, also another `Checkpoint` or manager of this program, waits for it. Other
    programs see it when it is complete, after `wait`.

    A save that fails, or is killed, leaves the earlier ones as they were, and they
    count again; its error is raised by what reads that step, and by the next `save`,
    `restore`, `wait` or `close`.

    Ctrl-C does not break off a save that has begun: it is completed in the background.
    What several threads ask for is done one after the other.

    Differs from TF: checkpoints are known by step, and there is no `checkpoint` file
    that could disagree with the folder; asynchronous by default; `keep_best`;
    `restore`.

    Args:
        checkpoint: What to save.
        directory: The folder; it is made on the first save.
        max_to_keep: How many of the latest steps to keep; `None` for all. What was
            saved last stays until the next save, also with a lower step.
        keep_best: A metric's name and `"min"` or `"max"`: the best step by it is kept
            as well. Each `save` then needs that metric. A NaN is never the best.
        save_interval_steps: Steps closer than this to the last saved one are passed
            over by `save`.
        asynchronous: Whether `save` returns before the files are written.

    Raises:
        CheckpointError: For a number that makes no sense.
        StructureTypeError: For something else than a `Checkpoint`.

    Example:
        >>> import tempfile, keras, keras_distribute as kd
        >>> strategy = kd.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> with strategy.scope():
        ...     weight = keras.Variable(1.0)
        >>> checkpoint = kd.Checkpoint(weight=weight)
        >>> manager = kd.CheckpointManager(
        ...     checkpoint, tempfile.mkdtemp(), max_to_keep=2, keep_best=("loss", "min")
        ... )
        >>> with manager:
        ...     for step, loss in enumerate([0.2, 0.5, 0.4, 0.3]):
        ...         _ = weight.assign(float(step))
        ...         _ = manager.save(step, metrics={"loss": loss})
        >>> manager.all_steps(), manager.best_step
        ([0, 2, 3], 0)
        >>> manager.restore().step, float(weight.numpy())
        (3, 3.0)
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        directory: str | os.PathLike[str],
        max_to_keep: int | None = 5,
        *,
        keep_best: tuple[str, str] | None = None,
        save_interval_steps: int | None = None,
        asynchronous: bool = True,
    ) -> None:
        checks.instance(
            "checkpoint",
            checkpoint,
            Checkpoint,
            "CheckpointManager takes a Checkpoint.",
            "CheckpointManager(Checkpoint(model=model), directory)",
        )
        error = CheckpointError
        checks.path("directory", directory, error=error)
        checks.flag("asynchronous", asynchronous, error)
        for name, number in (
            ("max_to_keep", max_to_keep),
            ("save_interval_steps", save_interval_steps),
        ):
            if number is not None:
                what, fix = f"{name} is a positive number.", f"{name}=None"
                checks.count(name, number, 1, what=what, fix=fix, error=error)
        if keep_best is not None and not _is_metric(keep_best):
            raise CheckpointError(
                'keep_best is the name of a metric and "min" or "max".',
                received=f"{checks.shown(keep_best)}.",
                fix='keep_best=("val_loss", "min")',
            )
        self._folder = StepFolder(
            checkpoint, directory, max_to_keep, keep_best, asynchronous=asynchronous
        )
        self._keep_best, self._interval = keep_best, save_interval_steps
        self._always: dict[str, float] = {}  # Metrics to keep with each save.
        self._in_turn = threading.RLock()

    @property
    def checkpoint(self) -> Checkpoint:
        """What is saved."""
        return self._folder.checkpoint

    @property
    def directory(self) -> str:
        """The folder."""
        return self._folder.directory

    @property
    def latest_step(self) -> int | None:
        """The latest of `all_steps()`; `None` without one."""
        return max(self.all_steps(), default=None)

    @property
    def latest_checkpoint(self) -> str | None:
        """The folder of `latest_step`. Source: TF's `latest_checkpoint`."""
        step = self.latest_step
        return None if step is None else self._folder.path(step)

    @property
    def checkpoints(self) -> list[str]:
        """The folders of all steps, from the oldest to the latest. Source: TF's
        `checkpoints`.
        """
        return [self._folder.path(step) for step in self.all_steps()]

    @property
    def best_step(self) -> int | None:
        """The step with the best metric by `keep_best`, the latest of equals; `None`
        without one.
        """
        return self._folder.best_step(self.all_steps())

    def all_steps(self) -> list[int]:
        """The steps that were saved, ascending, with the one that is being written, and
        without those that it replaces.

        Looks at the folder, so that another program may write it. A folder is a step if
        its name is the number as Python writes it: `30`, not `030`.
        """
        return self._folder.steps()

    def save(
        self,
        step: int | None = None,
        metrics: dict[str, Any] | None = None,
        *,
        force: bool = False,
    ) -> str | None:
        """Saves the state as it is now. The next step may run as soon as this returns.

        Waits for the save before it, if that is still being written. Call it across
        replicas.

        Args:
            step: The step's number, from 0; by default one more than the latest.
            metrics: Numbers to keep along with it, by name.
            force: Save even if `save_interval_steps` have not passed.

        Returns:
            The checkpoint's folder, which appears when it is complete; `None` if the
            step was passed over.

        Raises:
            CheckpointError: If the step exists or is no whole number from 0,
                `keep_best`'s metric is missing, or this save, or the one before it,
                could not be written.
        """
        if step is not None:
            step = _checked_step(step)
        checks.flag("force", force)
        numbers = _as_numbers(metrics)
        folder = self._folder
        with self._in_turn:
            folder.raise_if_failed()
            step = folder.next_step() if step is None else step
            if self._interval is not None and not force:
                last = folder.last_or_latest()
                if last is not None and 0 <= step - last < self._interval:
                    return None
            folder.save(step, self._metrics_to_keep(numbers))
        return folder.path(step)

    def _metrics_to_keep(self, metrics: Metrics) -> Metrics:
        if self._always:
            metrics = self._always | (metrics or {})
        if self._keep_best is not None and self._keep_best[0] not in (metrics or {}):
            name = self._keep_best[0]
            raise CheckpointError(
                f"keep_best={self._keep_best!r} needs the metric {name!r} at each "
                "save.",
                received=f"metrics={metrics!r}.",
                fix=f"manager.save(step, metrics={{{name!r}: ...}})",
            )
        return metrics

    def restore(
        self, step: int | None = None, *, partial: bool = False, fallback: bool = False
    ) -> RestoreStatus:
        """Restores a step, the latest by default; waits for a save that is being
        written.

        Args:
            step: One of `all_steps()`.
            partial: See `Checkpoint.restore`.
            fallback: If the checkpoint is damaged, restore the one before it, and so
                on. Which were passed over is warned about, and stands in the status; a
                later `save` of the same step replaces them.

        Returns:
            What was restored.

        Raises:
            CheckpointError: If there is no checkpoint of the step, or it is of
                something else.
            DamagedCheckpointError: If it is damaged; with `fallback`, if all are.
        """
        checks.flag("partial", partial)
        checks.flag("fallback", fallback)
        if step is not None:
            checks.count("step", step, error=CheckpointError)
        with self._in_turn:
            reading = self._folder.read(step, partial=partial, fallback=fallback)
            reading.assign()
        return reading.status

    def restore_or_initialize(self) -> str | None:
        """Restores the latest checkpoint and returns its folder; `None` if there is
        none. Source: TF's.

        Warns of a folder that has none but TensorFlow's, which are not read.
        """
        with self._in_turn:
            self._folder.wait()
            if self._folder.agreed_steps():
                return self.restore().path
        storage = load_storage()
        if found := storage.of_tensorflow(self.directory):
            warnings.warn(
                f"Nothing was restored: {self.directory!r} holds checkpoints of "
                f"TensorFlow alone ({', '.join(found)}). Fix: "
                f"{storage.FROM_TENSORFLOW}",
                stacklevel=2,
            )
        return None

    def delete(self, step: int) -> None:
        """Deletes a step's checkpoint."""
        checks.count("step", step, error=CheckpointError)
        with self._in_turn:
            self._folder.delete(step)

    def wait(self) -> None:
        """Returns when the save in the background is complete.

        Raises:
            CheckpointError: If it failed; once.
        """
        with self._in_turn:
            self._folder.wait()

    def close(self) -> None:
        """Waits, as `wait`, and ends the background threads. Another `save` starts them
        again.

        Of several processes the one that writes waits for itself: the others may have
        failed.
        """
        with self._in_turn:
            self._folder.close()

    # What a handler of preemption needs beside the public methods.

    @property
    def _last_step(self) -> int | None:
        self._folder.agreed_steps()
        return self._folder.last_step

    def _agreed_steps(self) -> list[int]:
        return self._folder.agreed_steps()

    def _save_in_between(self) -> None:
        with self._in_turn:
            step = self._folder.next_step()
            self._folder.save(step, dict(self._always), in_between=True)

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        try:
            self.close()
        except CheckpointError as failed:
            if error is None:
                raise
            if str(failed) != str(error):  # Else it was told by what has read it.
                error.add_note(str(failed))


def _checked_step(step: Any) -> int:
    """`step`, also from a variable or an array that holds a whole number."""
    if getattr(step, "shape", None) == ():
        number = np.asarray(step)
        is_number = number.dtype.kind in "iuf" and bool(np.isfinite(number))
        step = int(number) if is_number and number == np.floor(number) else step
    what = "A step is a whole number from 0."
    fix = "manager.save(step), with the count of the steps; or manager.save()."
    return checks.count("step", step, what=what, fix=fix, error=CheckpointError)


def _is_metric(keep_best: Any) -> bool:
    """Whether it is the name of a metric and `"min"` or `"max"`."""
    if not isinstance(keep_best, tuple | list) or len(keep_best) != 2:
        return False
    name, best = keep_best
    return isinstance(name, str) and isinstance(best, str) and best in ("min", "max")


def _as_numbers(metrics: Any) -> Metrics:
    """The metrics as floats; raises `CheckpointError` where they are none."""
    what, fix = "The metrics are numbers by name.", 'metrics={"loss": 0.5}'
    checks.instance("metrics", metrics, dict | None, what, fix, CheckpointError)
    numbers: dict[str, float] = {}
    for name, value in (metrics or {}).items():
        checks.instance("metrics", name, str, what, fix, CheckpointError)
        try:
            numbers[name] = float(value)
        except (TypeError, ValueError, OverflowError) as error:
            received = f"metrics[{name!r}]={checks.shown(value)}."
            raise CheckpointError(what, received=received, fix=fix) from error
    return None if metrics is None else numbers
