"""`CheckpointManager`: the checkpoints of one run, written while training goes on."""

from __future__ import annotations

import dataclasses
import math
import os
import warnings
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from keras_distribute import checks, dropped
from keras_distribute.checkpoint import under_way
from keras_distribute.checkpoint.checkpoint import Checkpoint, Reading, load_storage
from keras_distribute.checkpoint.manifest import Manifest
from keras_distribute.checkpoint.matching import RestoreStatus
from keras_distribute.cluster import agreement
from keras_distribute.encoding import Arrays
from keras_distribute.errors import CheckpointError, DamagedCheckpointError

_T = TypeVar("_T")
_ORDERS = ("min", "max")


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
        >>> manager = kd.CheckpointManager(checkpoint, tempfile.mkdtemp(), max_to_keep=2, keep_best=("loss", "min"))
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
        self._storage: Any = load_storage()
        self._checkpoint = checkpoint
        self._directory: str = self._storage.absolute(directory)
        self._max_to_keep, self._keep_best = max_to_keep, keep_best
        self._interval, self._asynchronous = save_interval_steps, asynchronous
        self._writer: Any = None
        self._last_step: int | None = None
        self._under_way: under_way.Save | None = None
        self._metrics: dict[int, dict[str, float] | None] = {}
        self._damaged: set[int] = set()
        self._always: dict[
            str, Callable[[], float]
        ] = {}  # Numbers to keep with each save, asked for when it is made.

    @property
    def checkpoint(self) -> Checkpoint:
        """What is saved."""
        return self._checkpoint

    @property
    def directory(self) -> str:
        """The folder."""
        return self._directory

    @property
    def latest_step(self) -> int | None:
        """The latest of `all_steps()`; `None` without one."""
        return max(self.all_steps(), default=None)

    @property
    def latest_checkpoint(self) -> str | None:
        """The folder of `latest_step`. Source: TF's `latest_checkpoint`."""
        step = self.latest_step
        return None if step is None else self._path(step)

    @property
    def checkpoints(self) -> list[str]:
        """The folders of all steps, from the oldest to the latest. Source: TF's
        `checkpoints`.
        """
        return [self._path(step) for step in self.all_steps()]

    @property
    def best_step(self) -> int | None:
        """The step with the best metric by `keep_best`, the latest of equals; `None`
        without one.
        """
        return self._best(self.all_steps())

    def all_steps(self) -> list[int]:
        """The steps that were saved, ascending, with the one that is being written, and
        without those that it replaces.

        Looks at the folder, so that another program may write it. A folder is a step if
        its name is the number as Python writes it: `30`, not `030`.
        """
        complete = lambda: self._storage.steps_in(self._directory)  # noqa: E731
        return under_way.steps(self._directory, complete)

    def _together(self, what: str, function: Callable[[], _T]) -> _T:
        """What `function` does or says in the first of the processes that share the
        variables, in all of them.
        """
        return agreement.from_chief(
            f"{what} {self._directory}", function, self._checkpoint.num_processes
        )

    def _agreed_steps(self) -> list[int]:
        return self._together("the steps in", self.all_steps)

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
            step: The step's number, from 0; by default one more than the last.
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
        _check_metrics(metrics)
        self._told("a save before in", self._raise_if_failed)
        last = self._last()
        step = self._next_step() if step is None else step
        if (
            not force
            and self._interval is not None
            and last is not None
            and 0 <= step - last < self._interval
        ):
            return None
        numbers = self._checked(
            self._always_kept() | (metrics or {}) if self._always else metrics
        )
        self._write(
            step, lambda: self._checkpoint._snapshot(step=step, metrics=numbers)
        )
        return self._path(step)

    def _save_in_between(self) -> None:
        """Saves at a moment that has no number of its own: the next save with a number
        takes its place.

        A program that is preempted in epoch 4 saves what would be 4, and, started
        again, 4 when that is complete.
        """
        step, numbers = self._next_step(), self._always_kept()
        self._write(
            step,
            lambda: self._checkpoint._snapshot(
                step=step, metrics=numbers, in_between=True
            ),
        )

    def _raise_if_failed(self) -> None:
        if self._writer is not None and not self._writer.is_saving:
            self._wait()

    def _write(self, step: int, take: Callable[[], tuple[Manifest, Arrays]]) -> None:
        """Starts to write what `take` returns; it is called when the save before is
        complete.
        """
        self._wait_for_all()
        steps = self._agreed_steps()
        for other in [other for other in steps if other >= step]:
            replaced = self._together(
                f"what step {other} is in",
                lambda other=other: self._is_in_between(other),
            )
            if (other == step and other in self._damaged) or replaced:
                self._together(
                    f"deleting step {other} of",
                    lambda other=other: self._open().delete(other),
                )
                self._damaged.discard(other)
            elif other == step:
                raise CheckpointError(
                    f"There is a checkpoint of step {step} in {self._directory!r} "
                    "already.",
                    received=f"save({step}), after the steps {steps}.",
                    fix=f"manager.delete({step}) first, or save to another folder.",
                )
        manifest, arrays = take()
        self._metrics[step] = manifest.metrics
        going = self._together(
            f"saving step {step} in",
            lambda: self._open().save(step, manifest, arrays),
        )
        self._under_way = under_way.Save(
            self._path(step), step, manifest.metrics, going, self._writer
        )
        under_way.begin(self._under_way)
        self._last_step = step

    def _last(self) -> int | None:
        """The last step that was saved, complete or not."""
        return (
            self._last_step
            if self._last_step is not None
            else max(self._agreed_steps(), default=None)
        )

    def _next_step(self) -> int:
        last = self._last()
        return 0 if last is None else last + 1

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
        reading = self._read(step, partial=partial, fallback=fallback)
        reading.assign()
        return reading.status

    def _read(
        self, step: int | None = None, *, partial: bool = False, fallback: bool = False
    ) -> Reading:
        """Reads a step for `restore`."""
        self.wait()
        steps = self._agreed_steps()
        if not steps or (step is not None and step not in steps):
            raise CheckpointError(
                f"There is no checkpoint{'' if step is None else f' of step {step}'} "
                f"in {self._directory!r}.",
                received=f"the steps {steps}."
                if steps
                else "a folder without complete checkpoints.",
                fix="manager.restore_or_initialize(), which starts a new run without "
                "one."
                if not steps
                else f"one of the steps above, or manager.restore() for step {steps[-1]}.",
            )
        candidates = [
            other for other in reversed(steps) if step is None or other <= step
        ]
        damaged: dict[str, str] = {}
        for candidate in candidates if fallback else candidates[:1]:
            path = self._path(candidate)
            try:
                reading = self._checkpoint._read(path, partial=partial)
            except DamagedCheckpointError as error:
                if not fallback:
                    raise
                damaged[path] = str(error)
                self._damaged.add(candidate)
                continue
            if damaged:
                passed = "\n".join(damaged.values())
                warnings.warn(
                    f"Restored {path!r}, since later checkpoints are damaged:\n{passed}",
                    stacklevel=3,
                )
            self._last_step = candidate
            return dataclasses.replace(
                reading, status=dataclasses.replace(reading.status, damaged=damaged)
            )
        raise DamagedCheckpointError(
            f"All {len(damaged)} checkpoints in {self._directory!r} are damaged.\n"
            + "\n".join(damaged.values()),
            fix="start anew in another folder.",
        )

    def restore_or_initialize(self) -> str | None:
        """Restores the latest checkpoint and returns its folder; `None` if there is
        none. Source: TF's.
        """
        self.wait()
        return self.restore().path if self._agreed_steps() else None

    def delete(self, step: int) -> None:
        """Deletes a step's checkpoint."""
        checks.count("step", step, error=CheckpointError)
        self._wait_for_all()
        steps = self._agreed_steps()
        if step not in steps:
            raise CheckpointError(
                f"There is no checkpoint of step {step} in {self._directory!r}.",
                received=f"the steps {steps}.",
            )
        self._together(f"deleting step {step} of", lambda: self._open().delete(step))
        self._last_step = None

    def wait(self) -> None:
        """Returns when the save in the background is complete.

        Raises:
            CheckpointError: If it failed; once.
        """
        self._told("the save in", self._wait)
        under_way.forget(self._under_way)

    def _told(self, what: str, check: Callable[[], None]) -> None:
        """Lets `check` raise the error of a save, after which the steps are what they
        were.
        """
        try:
            self._together(what, check)
        except Exception:
            self._last_step = None
            under_way.forget(self._under_way)
            raise

    def _wait_for_all(self) -> None:
        """Waits, as `wait`; also for what another manager writes here, which is told of
        its errors itself.
        """
        self.wait()
        processes = self._checkpoint.num_processes
        under_way.forget(under_way.finish(self._directory, processes)[0])

    def _wait(self) -> None:
        if self._writer is not None:
            self._writer.wait()

    def close(self) -> None:
        """Waits, as `wait`, and ends the background threads. Another `save` starts them
        again.

        Of several processes the one that writes waits for itself: the others may have
        failed.
        """
        if self._writer is not None:
            try:
                self._wait()
            finally:
                under_way.forget(self._under_way)
                writer, self._writer = self._writer, None
                writer.close()

    def _remove(self) -> None:
        """Deletes the folder."""
        self.close()
        under_way.forget(self._under_way)
        self._together("removing", lambda: self._storage.remove(self._directory))

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

    def _open(self) -> Any:
        if self._writer is None:
            manager = weakref.ref(
                self
            )  # Nobody may have closed it; its writer then waits for the save to complete.

            def kept(steps: list[int]) -> set[int]:
                keeper = manager()
                return set(steps) if keeper is None else keeper._kept(steps)

            self._writer = self._storage.Writer(
                self._directory, kept, asynchronous=self._asynchronous
            )
            dropped.when_dropped(self, self._writer.close)
        return self._writer

    def _path(self, step: int) -> str:
        return self._storage.step_path(self._directory, step)

    def _checked(self, metrics: dict[str, Any] | None) -> dict[str, float] | None:
        numbers = (
            None
            if metrics is None
            else {name: float(value) for name, value in metrics.items()}
        )
        if self._keep_best is not None and self._keep_best[0] not in (numbers or {}):
            raise CheckpointError(
                f"keep_best={self._keep_best!r} needs the metric "
                f"{self._keep_best[0]!r} at each save.",
                received=f"metrics={metrics!r}.",
                fix=f"manager.save(step, metrics={{{self._keep_best[0]!r}: ...}})",
            )
        return numbers

    def _always_kept(self) -> dict[str, float]:
        return {name: value() for name, value in self._always.items()}

    def _is_in_between(self, step: int) -> bool:
        try:
            return self._storage.read_manifest(self._path(step))[0].in_between
        except CheckpointError:
            return False

    def _kept(self, steps: list[int]) -> set[int]:
        """The steps that stay, now that the last one has been written."""
        kept = (
            set(steps)
            if self._max_to_keep is None
            else set(sorted(steps)[-self._max_to_keep :])
        )
        best = self._best(steps)
        return kept if best is None else kept | {best}

    def _best(self, steps: list[int]) -> int | None:
        if self._keep_best is None:
            return None
        name, mode = self._keep_best
        scores = {
            step: (self._metrics_of(step) or {}).get(name, math.nan) for step in steps
        }
        scores = {
            step: value if mode == "max" else -value
            for step, value in scores.items()
            if not math.isnan(value)
        }
        return max(scores, key=lambda step: (scores[step], step), default=None)

    def _metrics_of(self, step: int) -> dict[str, float] | None:
        save = under_way.in_folder(self._directory)
        if save is not None and save.step == step:
            return save.metrics
        if step not in self._metrics:
            try:
                self._metrics[step] = self._storage.read_manifest(self._path(step))[
                    0
                ].metrics
            except CheckpointError:  # It cannot be the best of anything.
                return None
        return self._metrics[step]


def _checked_step(step: Any) -> int:
    """`step`, also from a variable or an array that holds a whole number."""
    if getattr(step, "shape", None) == () and np.asarray(step) == int(step):
        step = int(step)
    what = "A step is a whole number from 0."
    fix = "manager.save(step), with the count of the steps; or manager.save()."
    return checks.count("step", step, what=what, fix=fix, error=CheckpointError)


def _is_metric(keep_best: Any) -> bool:
    """Whether it is the name of a metric, and which is the best of it."""
    if not isinstance(keep_best, tuple | list) or len(keep_best) != 2:
        return False
    return all(isinstance(part, str) for part in keep_best) and keep_best[1] in _ORDERS


def _check_metrics(metrics: Any) -> None:
    """Raises `CheckpointError` for what are no numbers by name."""
    what, fix = "The metrics are numbers by name.", 'metrics={"loss": 0.5}'
    checks.instance("metrics", metrics, dict | None, what, fix, CheckpointError)
    for name, value in (metrics or {}).items():
        checks.instance("metrics", name, str, what, fix, CheckpointError)
        try:
            float(value)
        except (TypeError, ValueError, OverflowError) as error:
            received = f"metrics[{name!r}]={checks.shown(value)}."
            raise CheckpointError(what, received=received, fix=fix) from error
