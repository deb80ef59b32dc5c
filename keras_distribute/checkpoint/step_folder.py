"""A folder with a checkpoint for each step of a run, which all processes of the run use
together. `CheckpointManager` and `BackupAndRestore` save through it.
"""

from __future__ import annotations

import dataclasses
import math
import os
import warnings
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from keras_distribute.checkpoint import under_way
from keras_distribute.checkpoint.checkpoint import Checkpoint, load_storage
from keras_distribute.checkpoint.manifest import Manifest
from keras_distribute.checkpoint.reading import Reading
from keras_distribute.cluster import agreement
from keras_distribute.cluster.encoding import Arrays
from keras_distribute.errors import CheckpointError, DamagedCheckpointError
from keras_distribute.threads import dropped

if TYPE_CHECKING:  # It needs Orbax.
    from keras_distribute.checkpoint.writer import Writer

_T = TypeVar("_T")


class StepFolder:
    """Saves, reads and deletes the checkpoints of steps.

    Process 0 lists the folder, writes and deletes; what it finds, and its errors, go to
    all processes.

    Args:
        checkpoint: What to save.
        directory: The folder; it is made on the first save.
        max_to_keep: How many of the latest steps to keep; `None` for all.
        keep_best: A metric's name and `"min"` or `"max"`: the best step by it stays.
        asynchronous: Whether `save` returns before the files are written.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        directory: str | os.PathLike[str],
        max_to_keep: int | None,
        keep_best: tuple[str, str] | None = None,
        *,
        asynchronous: bool = True,
    ) -> None:
        self._storage: Any = load_storage()
        self.checkpoint = checkpoint
        self.directory: str = self._storage.absolute(directory)
        self._storage.check_name(self.directory)
        self.last_step: int | None = None  # That was saved or restored.
        self._max_to_keep, self._keep_best = max_to_keep, keep_best
        self._asynchronous = asynchronous
        self._writer: Writer | None = None
        self._under_way: under_way.Save | None = None
        # By step, with the version of its files, which are not there yet at first.
        self._metrics: dict[int, tuple[Any, dict[str, float] | None]] = {}
        self._damaged: set[int] = set()

    def path(self, step: int) -> str:
        """The folder of a step."""
        return self._storage.step_path(self.directory, step)

    def steps(self) -> list[int]:
        """The steps, ascending, as this process sees the folder: with the one that is
        being written, and without those that it replaces.
        """
        return under_way.steps(
            self.directory, lambda: self._storage.steps_in(self.directory)
        )

    def agreed_steps(self) -> list[int]:
        """The steps as process 0 sees them, in all processes."""
        return self._agreed("the steps in", self.steps)

    def last_or_latest(self) -> int | None:
        """The step that was saved or restored last; before that, the latest."""
        if self.last_step is not None:
            return self.last_step
        return max(self.agreed_steps(), default=None)

    def next_step(self) -> int:
        """The number of a save that has none: one more than the latest step.

        Steps that were found damaged do not count, once an earlier one was restored in
        their place: the saves that follow replace them.
        """
        steps = self.agreed_steps()
        if self.last_step is not None:
            steps = [self.last_step, *(s for s in steps if s not in self._damaged)]
        return max(steps, default=-1) + 1

    def best_step(self, steps: list[int]) -> int | None:
        """The best of `steps` by `keep_best`, the latest of equals; NaN is never it."""
        if self._keep_best is None:
            return None
        name, mode = self._keep_best
        values = {s: (self._metrics_of(s) or {}).get(name, math.nan) for s in steps}
        scores = [
            (value if mode == "max" else -value, step)
            for step, value in values.items()
            if not math.isnan(value)
        ]
        return max(scores, default=(None, None))[1]

    def snapshot(self, **about: Any) -> tuple[Manifest, Arrays]:
        """Copies of the state in host memory: see `Checkpoint`'s own."""
        return self.checkpoint._snapshot(**about)

    def save(
        self,
        step: int,
        metrics: dict[str, float] | None = None,
        *,
        in_between: bool = False,
    ) -> None:
        """Saves the state as it is now.

        Args:
            metrics: Numbers to keep along with it.
            in_between: Whether the moment has no number of its own, so that the next
                save with this number takes its place: a program that is preempted in
                epoch 4 saves what would be 4, and, started again, 4 when that is
                complete.
        """
        about: Any = {"step": step, "metrics": metrics, "in_between": in_between}
        self.write(step, lambda: self.snapshot(**about))

    def write(
        self, step: int, take_snapshot: Callable[[], tuple[Manifest, Arrays]]
    ) -> None:
        """Starts to write a snapshot, taken when the save before is complete."""
        self._wait_for_all()
        steps = self.agreed_steps()
        replaced: set[int] = set()
        for other in [other for other in steps if other >= step]:
            is_in_between = self._on_chief(
                f"what step {other} is in",
                lambda other=other: self._is_in_between(other),
            )
            if is_in_between or (other == step and other in self._damaged):
                replaced.add(other)
            elif other == step:
                raise CheckpointError(
                    f"There is a checkpoint of step {step} in {self.directory!r} "
                    "already.",
                    received=f"save({step}), after the steps {steps}.",
                    fix=f"manager.delete({step}) first, or save to another folder.",
                )
        manifest, arrays = take_snapshot()
        self._metrics[step] = (None, manifest.metrics)
        # Known before it begins: interrupted, it is completed nevertheless.
        save = under_way.Save(self.path(step), step, manifest.metrics)
        self._under_way = save

        def begin() -> frozenset[int]:
            writer = save.writer = self._open_writer()
            under_way.begin(save)
            writer.save(save, manifest, arrays, replaced)
            return save.replaces

        try:
            save.replaces = self._on_chief(f"saving step {step} in", begin)
        except Exception:
            under_way.forget(save)
            raise
        if save.writer is None:  # Another process writes it.
            under_way.begin(save)
        self._damaged -= replaced
        self.last_step = step

    def read(
        self, step: int | None = None, *, partial: bool = False, fallback: bool = False
    ) -> Reading:
        """Reads a step, the latest by default; nothing is assigned yet.

        Raises:
            CheckpointError: If there is none.
            DamagedCheckpointError: If it is damaged; with `fallback`, if all are.
        """
        self.wait()
        steps = self.agreed_steps()
        if not steps or (step is not None and step not in steps):
            raise _no_checkpoint(self.directory, step, steps)
        candidates = [s for s in reversed(steps) if step is None or s <= step]
        damaged: dict[str, str] = {}
        for candidate in candidates if fallback else candidates[:1]:
            path = self.path(candidate)
            try:
                reading = self.checkpoint._read(path, partial=partial)
            except DamagedCheckpointError as error:
                if not fallback:
                    raise
                damaged[path] = str(error)
                self._damaged.add(candidate)
                continue
            if damaged:
                errors = "\n".join(damaged.values())
                message = f"Restored {path!r}, since later checkpoints are damaged:\n"
                warnings.warn(message + errors, stacklevel=3)
            self.last_step = candidate
            status = dataclasses.replace(reading.status, damaged=damaged)
            return dataclasses.replace(reading, status=status)
        raise DamagedCheckpointError(
            f"All {len(damaged)} checkpoints in {self.directory!r} are damaged.\n"
            + "\n".join(damaged.values()),
            fix="start anew in another folder.",
        )

    def delete(self, step: int) -> None:
        """Deletes a step's checkpoint."""
        self._wait_for_all()
        steps = self.agreed_steps()
        if step not in steps:
            raise CheckpointError(
                f"There is no checkpoint of step {step} in {self.directory!r}.",
                received=f"the steps {steps}.",
            )
        self._delete(step)
        self.last_step = None

    def wait(self) -> None:
        """Waits for the save in the background; raises its error, once."""
        self._raise_in_all("the save in", self._wait)
        under_way.forget(self._under_way)

    def raise_if_failed(self) -> None:
        """Raises the error of a save that has failed by now, once."""

        def check() -> None:
            if self._writer is not None and not self._writer.is_saving:
                self._writer.wait()

        self._raise_in_all("a save before in", check)

    def close(self) -> None:
        """Waits, and ends the background threads; another `save` starts them again.

        Of several processes only the one that writes waits: the others may have failed.
        """
        if self._writer is not None:
            try:
                self._wait()
            except Exception:
                self.last_step = None
                self._end()
                raise
            self._end()

    def remove(self) -> None:
        """Deletes the folder."""
        self.close()
        under_way.forget(self._under_way)
        self._on_chief("removing", lambda: self._storage.remove(self.directory))

    def _on_chief(self, what: str, function: Callable[[], _T]) -> _T:
        """Calls `function` in the first of the processes that share the variables;
        its result or error, in all of them.
        """
        return agreement.from_chief(
            f"{what} {self.directory}", function, self.checkpoint.num_processes
        )

    def _agreed(self, what: str, function: Callable[[], _T]) -> _T:
        """As `_on_chief`; all have its last step then: that a save has failed may be
        known there alone, after `close`.
        """
        found, self.last_step = self._on_chief(
            what, lambda: (function(), self.last_step)
        )
        return found

    def _raise_in_all(self, what: str, check: Callable[[], None]) -> None:
        """Raises the error of a save, after which the steps are what they were."""
        try:
            self._agreed(what, check)
        except Exception:
            self.last_step = None
            under_way.forget(self._under_way)
            raise

    def _wait(self) -> None:
        if self._writer is not None:
            self._writer.wait()

    def _end(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        under_way.forget(self._under_way)

    def _wait_for_all(self) -> None:
        """Waits, also for another manager's save here, which raises its own errors."""
        self.wait()
        num_processes = self.checkpoint.num_processes
        under_way.forget(under_way.finish(self.directory, num_processes)[0])

    def _delete(self, step: int) -> None:
        self._on_chief(
            f"deleting step {step} of", lambda: self._open_writer().delete(step)
        )

    def _open_writer(self) -> Writer:
        if self._writer is None:
            from keras_distribute.checkpoint.writer import Writer

            # The writer must not keep this object alive: one that is dropped without
            # being closed is to end it. Its last save then completes, and deletes none.
            weak = weakref.ref(self)

            def steps_to_keep(steps: list[int]) -> set[int]:
                folder = weak()
                return set(steps) if folder is None else folder._steps_to_keep(steps)

            writer = Writer(
                self.directory, steps_to_keep, asynchronous=self._asynchronous
            )
            dropped.when_dropped(self, writer.close)
            self._writer = writer
        return self._writer

    def _steps_to_keep(self, steps: list[int]) -> set[int]:
        latest = sorted(steps)[-(self._max_to_keep or len(steps)) :]
        return {*latest, *[s for s in [self.best_step(steps)] if s is not None]}

    def _is_in_between(self, step: int) -> bool:
        try:
            return self._storage.read_manifest(self.path(step))[0].in_between
        except CheckpointError:
            return False

    def _metrics_of(self, step: int) -> dict[str, float] | None:
        save = under_way.in_folder(self.directory)
        if save is not None and save.step == step:
            return save.metrics
        path = self.path(step)
        version = self._storage.version_of(path)
        if step not in self._metrics or self._metrics[step][0] != version:
            try:
                manifest, _ = self._storage.read_manifest(path)
            except CheckpointError:  # It cannot be the best of anything.
                return None
            self._metrics[step] = (version, manifest.metrics)
        return self._metrics[step][1]


def _no_checkpoint(directory: str, step: int | None, steps: list[int]) -> Exception:
    number = "" if step is None else f" of step {step}"
    received = "a folder without complete checkpoints."
    fix = "manager.restore_or_initialize(), which starts a new run without one."
    if steps:
        received = f"the steps {steps}."
        fix = f"one of the steps above, or manager.restore() for step {steps[-1]}."
    message = f"There is no checkpoint{number} in {directory!r}."
    return CheckpointError(message, received=received, fix=fix)
