"""Writes the checkpoints of steps in the background, by Orbax, and deletes old ones."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from keras_distribute._compat import checkpoint as compat
from keras_distribute.checkpoint.manifest import Manifest
from keras_distribute.checkpoint.manifest_item import ARRAYS, MANIFEST, ManifestHandler
from keras_distribute.checkpoint.storage import (
    TRASH,
    act_alone,
    array_handler,
    check_free,
    save_args,
    step_folders,
    step_path,
    sync_names,
    writing,
)
from keras_distribute.checkpoint.under_way import unfinished
from keras_distribute.cluster.encoding import Arrays
from keras_distribute.threads import dropped


@dataclasses.dataclass
class _StepsToKeep(ocp.checkpoint_managers.PreservationPolicy):
    """Orbax's question which steps to keep, asked of a function of their numbers.

    Orbax's `LatestN` goes by the order in which they were saved, and would delete 20 of
    20, 30, 10; its `BestN` reads metrics of Orbax's own, not those of the manifest.
    """

    steps_to_keep: Callable[[list[int]], set[int]]
    saved: int | None = None  # Stays, also below later steps: `save` has returned it.
    deleted: frozenset[int] = frozenset()  # By the save that is under way.

    def should_preserve(
        self,
        checkpoints: Sequence[ocp.checkpoint_managers.PolicyCheckpointInfo],
        *,
        context: ocp.checkpoint_managers.PreservationContext,
    ) -> Sequence[bool]:
        steps = [info.step for info in checkpoints]
        kept = self.steps_to_keep(steps)
        keeps = [step in kept or step == self.saved for step in steps]
        self.deleted = frozenset(
            s for s, keep in zip(steps, keeps, strict=True) if not keep
        )
        return keeps


class _StepNames(ocp.path.step.NameFormat[ocp.path.step.Metadata]):
    """Orbax's question which folders are the checkpoints of steps."""

    def build_name(self, step: int) -> str:
        return str(step)

    def find_all(self, base_path: Any) -> Iterator[ocp.path.step.Metadata]:
        for path in step_folders(base_path):
            yield ocp.path.step.Metadata(int(path.name), path)

    def find_step(self, base_path: Any, step: int) -> ocp.path.step.Metadata:
        for found in self.find_all(base_path):
            if found.step == step:
                return found
        raise ValueError(f"There is no step {step} in {base_path}.")


class Writer:
    """Writes the checkpoints of a folder, one subfolder a step, and deletes old ones
    once a new one is complete.
    """

    def __init__(
        self,
        directory: str,
        steps_to_keep: Callable[[list[int]], set[int]],
        *,
        asynchronous: bool,
    ) -> None:
        self._directory = directory
        self._policy = _StepsToKeep(steps_to_keep)
        options = ocp.CheckpointManagerOptions(
            preservation_policy=self._policy,
            step_name_format=_StepNames(),
            enable_async_checkpointing=asynchronous,
            # Made in the background, a folder that cannot be made leaves threads that
            # wait for it for five minutes.
            async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
            cleanup_tmp_directories=True,
            todelete_subdir=TRASH,
            save_root_metadata=False,
            lightweight_initialize=True,
            # Orbax makes no folder for one of several processes.
            **act_alone(create=False),
        )
        self._saving = directory
        self._unfinished = False
        self._failure: Exception | None = None
        self._lock = threading.RLock()  # Another thread may read what is being written.
        self._manifests = ManifestHandler(self._empty_trash)
        handlers: Any = {ARRAYS: array_handler(), MANIFEST: self._manifests}
        with writing(directory):
            if jax.process_count() > 1:
                epath.Path(directory).mkdir(parents=True, exist_ok=True)
            self._empty_trash()
            self._manager = ocp.CheckpointManager(
                directory, options=options, item_handlers=handlers
            )
        unfinished.writers.add(self)

    @property
    def is_saving(self) -> bool:
        """Whether a save is under way in the background."""
        return self._unfinished and self._manager.is_saving_in_progress()

    def save(self, step: int, manifest: Manifest, arrays: Arrays) -> frozenset[int]:
        """Starts to write; the arrays must stay as they are until it has finished.

        Returns:
            The steps that will be deleted then.
        """
        with self._lock:
            self.wait()
            self._saving = step_path(self._directory, step)
            check_free(self._saving)
            if step in self._manager.all_steps():
                self._recount()  # Another manager has deleted it.
            self._policy.saved = step
            self._unfinished = True  # Also if Ctrl-C comes in the middle.
            try:
                with writing(self._saving):
                    args = save_args(manifest, arrays)
                    self._manager.save(step, args=args, force=True)
            except Exception:
                self._unfinished = False
                self._recount()
                raise
            if self._manifests.failure is not None:
                self.wait()
            return self._policy.deleted

    def finish(self) -> Exception | None:
        """Returns when the last save has finished: its error, if not raised yet."""
        with self._lock:
            if self._unfinished:
                try:
                    with writing(self._saving):
                        self._manager.wait_until_finished()
                        sync_names(self._saving)
                except Exception as error:
                    self._failure = error
                    self._recount()
                self._unfinished = False
            return self._failure

    def wait(self) -> None:
        """Returns when the save is complete; raises `CheckpointError`, once."""
        with self._lock:
            failure, self._failure = self.finish(), None
            self._forget_errors()
        if failure is not None:
            raise failure

    def delete(self, step: int) -> None:
        """Deletes a step."""
        with writing(step_path(self._directory, step)):
            if step not in self._manager.all_steps():
                self._recount()  # Another manager has written it.
            self._manager.delete(step)
            self._empty_trash()

    def close(self) -> None:
        """Waits, and gives threads back; also called when the program ends."""
        if self not in unfinished.writers:
            return
        unfinished.writers.discard(self)
        with writing(self._saving):
            try:
                self.wait()
            finally:
                self._manager.close()
            self._empty_trash()

    def _recount(self) -> None:
        """Lists the folder: Orbax's own list has a failed step, and lacks what that one
        was to delete.
        """
        with contextlib.suppress(Exception):  # It also reads files: damaged ones, too.
            self._manager.reload()

    def _forget_errors(self) -> None:
        """Lets Orbax raise here what another thread has raised, and not later."""
        with contextlib.suppress(Exception):
            self._manager.wait_until_finished()

    def _empty_trash(self) -> None:
        trash = epath.Path(self._directory) / TRASH
        if trash.exists():
            trash.rmtree(missing_ok=True)


def _close_all() -> None:
    dropped.settle()
    with contextlib.ExitStack() as stack:  # An error in one keeps none from closing.
        for writer in list(unfinished.writers):
            stack.callback(writer.close)


compat.before_exit(_close_all)
