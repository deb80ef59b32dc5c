"""Writes the checkpoints of steps in the background, by Orbax, and deletes old ones."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

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
from keras_distribute.checkpoint.under_way import Save, unfinished
from keras_distribute.cluster.encoding import Arrays
from keras_distribute.errors import CheckpointError
from keras_distribute.threads.uninterrupted import Calls


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

    Orbax is called in a thread that no signal reaches: an interruption in the middle of
    it would leave its threads behind at work, and nobody who knows of them.
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
        self._asynchronous = asynchronous
        self._manager: Any = None  # Orbax's; opened when it is first needed.
        self._saving = directory
        self._unfinished = False
        self._failure: Exception | None = None
        self._lock = threading.RLock()  # Another thread may read what is being written.
        self._calls = Calls("keras_distribute checkpoints")
        self._manifests = ManifestHandler(self._empty_trash)

    @property
    def is_saving(self) -> bool:
        """Whether a save is under way in the background."""
        manager = self._manager
        return self._unfinished and (
            self._calls.is_busy or manager.is_saving_in_progress()
        )

    def save(
        self, save: Save, manifest: Manifest, arrays: Arrays, replaced: Collection[int]
    ) -> None:
        """Starts to write; the arrays must stay as they are until it has finished.

        Args:
            save: Is told the steps that will be deleted then.
            replaced: Steps to delete first.
        """
        with self._lock:
            self.wait()

            def call() -> None:
                try:
                    self._save(save, manifest, arrays, replaced)
                except Exception as error:
                    self._failure = error

            self._call(call)
            if self._failure is not None or self._manifests.failure is not None:
                self.wait()

    def finish(self) -> Exception | None:
        """Returns when the last save has finished: its error, if not raised yet."""
        with self._lock:
            self._calls.settle()
            if self._unfinished:
                self._call(self._finish)
            return self._failure

    def wait(self) -> None:
        """Returns when the save is complete; raises `CheckpointError`, once."""
        with self._lock:
            failure, self._failure = self.finish(), None
        if failure is not None:
            raise failure

    def delete(self, step: int) -> None:
        """Deletes a step."""
        with self._lock:
            self._call(lambda: self._delete(step))

    def close(self) -> None:
        """Waits, and gives threads back; also called when the program ends. Another
        save opens it again.
        """
        with self._lock:
            if self not in unfinished.writers:
                return
            try:
                self.wait()
            except CheckpointError:
                self._end()
                raise
            self._end()

    def _end(self) -> None:
        self._call(self._close)
        unfinished.writers.discard(self)
        self._calls.end()

    def _call(self, function: Callable[[], None]) -> None:
        """Calls one of the methods below, which are for the thread alone."""
        unfinished.writers.add(self)
        self._calls.run(function)

    def _opened(self) -> Any:
        if self._manager is None:
            options = ocp.CheckpointManagerOptions(
                preservation_policy=self._policy,
                step_name_format=_StepNames(),
                enable_async_checkpointing=self._asynchronous,
                # Made in the background, a folder that cannot be made leaves threads
                # that wait for it for five minutes.
                async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
                cleanup_tmp_directories=True,
                todelete_subdir=TRASH,
                save_root_metadata=False,
                lightweight_initialize=True,
                # Orbax makes no folder for one of several processes.
                **act_alone(create=False),
            )
            handlers: Any = {ARRAYS: array_handler(), MANIFEST: self._manifests}
            with writing(self._directory):
                if jax.process_count() > 1:
                    epath.Path(self._directory).mkdir(parents=True, exist_ok=True)
                self._empty_trash()
                self._manager = ocp.CheckpointManager(
                    self._directory, options=options, item_handlers=handlers
                )
        return self._manager

    def _save(
        self, save: Save, manifest: Manifest, arrays: Arrays, replaced: Collection[int]
    ) -> None:
        manager = self._opened()
        for step in replaced:
            self._delete(step)
        self._saving = save.path
        check_free(save.path)
        if save.step in manager.all_steps():
            self._recount()  # Another manager has deleted it.
        self._policy.saved = save.step
        self._unfinished = True  # Also for whoever asks before Orbax has returned.
        try:
            with writing(save.path):
                args = save_args(manifest, arrays)
                manager.save(save.step, args=args, force=True)
        except Exception:
            self._unfinished = False
            self._recount()
            raise
        save.replaces = self._policy.deleted

    def _finish(self) -> None:
        try:
            with writing(self._saving):
                self._manager.wait_until_finished()
                sync_names(self._saving)
        except Exception as error:
            self._failure = error
            self._recount()
        self._unfinished = False

    def _delete(self, step: int) -> None:
        manager = self._opened()
        with writing(step_path(self._directory, step)):
            if step not in manager.all_steps():
                self._recount()  # Another manager has written it.
            manager.delete(step)
            self._empty_trash()

    def _close(self) -> None:
        manager, self._manager = self._manager, None
        with writing(self._saving):
            if manager is not None:
                manager.close()
            self._empty_trash()

    def _recount(self) -> None:
        """Lists the folder: Orbax's own list has a failed step, and lacks what that one
        was to delete.
        """
        with contextlib.suppress(Exception):  # It also reads files: damaged ones, too.
            self._manager.reload()

    def _empty_trash(self) -> None:
        trash = epath.Path(self._directory) / TRASH
        if trash.exists():
            trash.rmtree(missing_ok=True)
