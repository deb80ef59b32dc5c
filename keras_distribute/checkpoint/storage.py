"""Checkpoints on disk, by Orbax. Knows arrays and manifests, no variables. Imported
when a checkpoint is first used.

    <path>/
        _CHECKPOINT_METADATA     Orbax's
        arrays/                  the arrays by name, an Orbax PyTree: any Orbax reads it
        manifest/manifest.json   shapes, types, checksums, and the state that is no array

Both items are one Orbax checkpoint: written into a folder with another name, which is
renamed when all is there, and on the disk: a checkpoint that was reported complete
survives a power cut.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import threading
import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from keras_distribute import dropped
from keras_distribute._compat import checkpoint as compat
from keras_distribute.checkpoint import manifest as manifests
from keras_distribute.checkpoint import under_way
from keras_distribute.checkpoint.manifest import ArrayRecord, FileRecord, Manifest
from keras_distribute.checkpoint.manifest_item import (
    ARRAYS,
    FILE,
    MANIFEST,
    ManifestHandler,
    ManifestSave,
    sync,
)
from keras_distribute.encoding import Arrays
from keras_distribute.errors import CheckpointError, DamagedCheckpointError

# Deleting a folder takes many steps: killed among them, a damaged checkpoint would
# stand there under its name. Renamed first, it is gone at once; the next save empties
# this, in the background.
_TRASH = "being_deleted"
_FALLBACK = "restore another checkpoint; CheckpointManager.restore(fallback=True) finds the last good one."
# Python and Orbax also take "030" or "３１" for a number: such a folder is nobody's step.
_STEP = re.compile("0|[1-9][0-9]*")


@dataclasses.dataclass
class _PreserveSome(ocp.checkpoint_managers.PreservationPolicy):
    """Orbax's question which steps to keep, asked of a function of their numbers."""

    kept: Callable[[list[int]], set[int]]
    saved: int | None = None  # Stays, also below later steps: `save` has returned it.
    going: frozenset[int] = frozenset()

    def should_preserve(
        self,
        checkpoints: Sequence[ocp.checkpoint_managers.PolicyCheckpointInfo],
        *,
        context: ocp.checkpoint_managers.PreservationContext,
    ) -> Sequence[bool]:
        steps = [info.step for info in checkpoints]
        kept = self.kept(steps) | {step for step in steps if step == self.saved}
        self.going = frozenset(steps) - kept
        return [step in kept for step in steps]


class _StepFolders(ocp.path.step.NameFormat[ocp.path.step.Metadata]):
    """Orbax's question which folders are the checkpoints of steps."""

    def build_name(self, step: int) -> str:
        return str(step)

    def find_all(self, base_path: Any) -> Iterator[ocp.path.step.Metadata]:
        for path in ocp.utils.checkpoint_steps_paths(base_path):
            if _STEP.fullmatch(path.name):
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
        kept: Callable[[list[int]], set[int]],
        *,
        asynchronous: bool,
    ) -> None:
        self._directory = directory
        self._policy = _PreserveSome(kept)
        options = ocp.CheckpointManagerOptions(
            preservation_policy=self._policy,
            step_name_format=_StepFolders(),
            enable_async_checkpointing=asynchronous,
            # In the background, a folder that cannot be made leaves threads that wait
            # for it for five minutes.
            async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
            cleanup_tmp_directories=True,
            todelete_subdir=_TRASH,
            save_root_metadata=False,
            lightweight_initialize=True,
            **_alone(
                create=False
            ),  # Orbax makes no folder for one of several processes.
        )
        self._saving = directory
        self._unfinished = False
        self._failure: Exception | None = None
        self._lock = threading.RLock()  # Another thread may read what is being written.
        handlers: Any = {
            ARRAYS: _array_handler(),
            MANIFEST: ManifestHandler(self._empty_trash),
        }
        with _writing(directory):
            if jax.process_count() > 1:
                epath.Path(directory).mkdir(parents=True, exist_ok=True)
            self._empty_trash()
            self._manager = ocp.CheckpointManager(
                directory, options=options, item_handlers=handlers
            )
        _open_writers.add(self)

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
            _check_free(self._saving)
            if step in self._manager.all_steps():
                self._recount()  # Another manager has deleted it.
            self._policy.saved = step
            self._unfinished = True  # Also if Ctrl-C comes in the middle.
            try:
                with _writing(self._saving):
                    args = _save_args(manifest, arrays)
                    self._manager.save(step, args=args, force=True)
            except Exception:
                self._unfinished = False
                self._recount()
                raise
            return self._policy.going

    def finish(self) -> Exception | None:
        """Returns when the last save has finished: with its error, until `wait` has
        raised it.
        """
        with self._lock:
            if self._unfinished:
                try:
                    with _writing(self._saving):
                        self._manager.wait_until_finished()
                        _sync_names(self._saving)
                except Exception as error:
                    self._failure = error
                    self._recount()
                self._unfinished = False
            return self._failure

    def wait(self) -> None:
        """Returns when the save is complete; raises `CheckpointError` if it failed,
        once.
        """
        with self._lock:
            failure, self._failure = self.finish(), None
            self._forget_errors()
        if failure is not None:
            raise failure

    def delete(self, step: int) -> None:
        """Deletes a step."""
        with _writing(step_path(self._directory, step)):
            if step not in self._manager.all_steps():
                self._recount()  # Another manager has written it.
            self._manager.delete(step)
            self._empty_trash()

    def close(self) -> None:
        """Waits, and gives threads back; also called when the program ends."""
        if self not in _open_writers:
            return
        _open_writers.discard(self)
        with _writing(self._saving):
            try:
                self.wait()
            finally:
                self._manager.close()
            self._empty_trash()

    def _recount(self) -> None:
        """Looks which steps there are: Orbax counts, also a failed step in, and what it
        was to delete out.
        """
        with contextlib.suppress(
            Exception
        ):  # It also reads files, which may be damaged.
            self._manager.reload()

    def _forget_errors(self) -> None:
        """Lets Orbax raise here what it has raised in another thread, and would again."""
        with contextlib.suppress(Exception):
            self._manager.wait_until_finished()

    def _empty_trash(self) -> None:
        trash = epath.Path(self._directory) / _TRASH
        if trash.exists():
            trash.rmtree(missing_ok=True)


_open_writers: set[Writer] = set()


def _close_all() -> None:
    dropped.settle()
    with (
        contextlib.ExitStack() as all_of_them
    ):  # An error in one keeps none from closing.
        for writer in list(_open_writers):
            all_of_them.callback(writer.close)


compat.before_exit(_close_all)


def write(path: str, manifest: Manifest, arrays: Arrays) -> None:
    """Writes one checkpoint to `path`, which must not exist, and returns when it is
    complete.

    Raises:
        CheckpointError: If it cannot be written; nothing is left at `path` then.
    """
    with _writing(path):
        if epath.Path(path).exists():
            raise CheckpointError(
                f"There is something at {path!r} already.",
                fix="checkpoint.save(prefix), which numbers its checkpoints, or a "
                "CheckpointManager, which also "
                "deletes old ones.",
            )
        composite: dict[str, Any] = {
            "arrays": _array_handler(),
            "manifest": ManifestHandler(),
        }
        if jax.process_count() > 1:
            composite["composite_options"] = ocp.CompositeOptions(**_alone())
        handler = ocp.CompositeCheckpointHandler(**composite)
        with contextlib.closing(_checkpointer(handler)) as checkpointer:
            checkpointer.save(path, args=_save_args(manifest, arrays))
        _sync_names(path)


def _sync_names(path: str) -> None:
    """The names of a checkpoint's parts, its own, and that of the folder with all
    checkpoints, which may be new.
    """
    folder = epath.Path(path)
    for each in (folder, folder.parent, folder.parent.parent):
        sync(each)


def read_manifest(path: str) -> tuple[Manifest, dict[str, ArrayRecord]]:
    """The manifest of the checkpoint at `path`, verified, and with it all files but the
    large ones.

    Orbax and Python's parser must not see a damaged file: what they do then is not
    always an exception.

    Raises:
        CheckpointError: If there is none.
        DamagedCheckpointError: If it is incomplete or damaged.
    """
    folder = epath.Path(path)
    with _reading(path):
        file = folder / MANIFEST / FILE
        if not folder.exists():
            beside = (
                sorted(other.name for other in folder.parent.iterdir())
                if folder.parent.is_dir()
                else []
            )
            raise CheckpointError(
                f"There is no checkpoint at {path!r}.",
                received=f"{str(folder.parent)!r} holds {', '.join(beside)}."
                if beside
                else None,
                fix="manager.wait() in every process first: process 0 is writing it."
                if under_way.is_elsewhere(path)
                else "the path that checkpoint.save or manager.save returned; manager.all_steps() lists the steps.",
            )
        if not file.exists():
            raise DamagedCheckpointError(
                f"{path!r} is no complete checkpoint: it has no {MANIFEST}/{FILE}.",
                received=f"a folder with {', '.join(sorted(p.name for p in folder.iterdir())) or 'nothing in it'}."
                if folder.is_dir()
                else "a file.",
                fix=_FALLBACK,
            )
        manifest, arrays, files = manifests.from_bytes(file.read_bytes(), str(file))
        _check_name(folder, manifest)
        _check_files(folder / ARRAYS, files)
        return manifest, arrays


def _check_free(path: str) -> None:
    """Refuses the name of a file, or of a link to nothing, which Orbax would replace."""
    if os.path.lexists(path) and not epath.Path(path).is_dir():
        raise CheckpointError(
            f"There is something at {path!r} already, and it is no checkpoint.",
            received="a link to nothing." if os.path.islink(path) else "a file.",
            fix="move it away, or save another step.",
        )


def _check_name(folder: epath.Path, manifest: Manifest) -> None:
    """Refuses a folder that was copied or moved to another step's name."""
    step, name = manifest.step, folder.name
    if step is not None and _STEP.fullmatch(name) and int(name) != step:
        raise DamagedCheckpointError(
            f"{str(folder)!r} is not the checkpoint of step {name}.",
            received=f"the checkpoint of step {step}, copied or moved to that name.",
            fix=f"give the folder its name {step} again, or one that is no number; or "
            + _FALLBACK,
        )


def _check_files(folder: epath.Path, records: dict[str, FileRecord]) -> None:
    damaged: list[str] = []
    for name, record in records.items():
        path = folder / name
        if not path.exists():
            damaged.append(f"{path} (missing)")
        elif path.stat().length != record.size:
            damaged.append(
                f"{path} ({path.stat().length} bytes instead of {record.size})"
            )
        elif (
            record.checksum is not None
            and zlib.crc32(path.read_bytes()) != record.checksum
        ):
            damaged.append(f"{path} (wrong checksum)")
    if damaged:
        raise DamagedCheckpointError(
            f"The checkpoint {str(folder.parent)!r} is damaged, {len(damaged)} "
            "file(s):\n    " + "\n    ".join(damaged),
            fix=_FALLBACK,
        )


def read_arrays(path: str, records: dict[str, ArrayRecord]) -> Arrays:
    """The arrays of the checkpoint at `path`, verified.

    Args:
        path: The checkpoint's folder.
        records: What its manifest says of them.

    Raises:
        DamagedCheckpointError: If an array is not, bit for bit, what was saved; names
            each.
    """
    arrays: Arrays = {
        name: np.zeros(record.shape, np.dtype(record.dtype))
        for name, record in records.items()
        if 0 in record.shape
    }
    names = [name for name in records if name not in arrays]
    folder = epath.Path(path) / ARRAYS
    stored: dict[str, Any] = {}
    if names:
        with (
            _reading(str(folder)),
            contextlib.closing(_checkpointer(_array_handler())) as checkpointer,
        ):
            wanted = ocp.RestoreArgs(restore_type=np.ndarray)
            stored = checkpointer.restore(
                folder,
                args=ocp.args.PyTreeRestore(
                    item=dict.fromkeys(names, 0),
                    restore_args=dict.fromkeys(names, wanted),
                ),
            )
    damaged = []
    for name in names:
        try:
            arrays[name] = manifests.as_recorded(
                np.asarray(stored[name]), records[name]
            )
            intact = ArrayRecord.of(arrays[name]) == records[name]
        except (KeyError, ValueError, TypeError):
            intact = False
        damaged += [] if intact else [name]
    if damaged:
        raise DamagedCheckpointError(
            f"The files in {str(folder)!r} are damaged: {len(damaged)} array(s) are "
            "not what was saved: "
            f"{', '.join(damaged)}.",
            fix=_FALLBACK,
        )
    return arrays


def steps_in(directory: str) -> list[int]:
    """The steps whose checkpoints are complete, ascending; also those of a manager that
    was dropped while it saved.
    """
    dropped.settle()
    with _reading(directory):
        found = (
            _StepFolders().find_all(directory) if epath.Path(directory).is_dir() else ()
        )
        return sorted(step.step for step in found)


def remove(directory: str) -> None:
    """Deletes the folder of all steps: renamed first, so that it is gone at once."""
    folder = epath.Path(directory)
    trash = folder.with_name(f"{folder.name}.{_TRASH}")
    with _writing(directory):
        if trash.exists():
            trash.rmtree()
        if folder.exists():
            folder.rename(trash)
            trash.rmtree()


def step_path(directory: str, step: int) -> str:
    """The folder of a step."""
    return str(epath.Path(directory) / str(step))


def absolute(path: Any) -> str:
    """The path as Orbax takes it."""
    return str(epath.Path(path).expanduser().absolute())


def _save_args(manifest: Manifest, arrays: Arrays) -> Any:
    # The store takes no array without elements: the manifest alone says that it is
    # there.
    stored = {
        name: manifests.storable(array) for name, array in arrays.items() if array.size
    }
    return ocp.args.Composite(
        **{
            ARRAYS: ocp.args.PyTreeSave(stored or {"": np.zeros(1)}),
            MANIFEST: ManifestSave(manifest, arrays),
        }
    )


def _array_handler() -> ocp.PyTreeCheckpointHandler:
    """Arrays as they are: weights hardly compress (by 7 %), and take four times as long
    to write when they do.
    """
    types = ocp.type_handlers
    # The arrays are copies already.
    own = types.create_type_handler_registry(
        (np.ndarray, types.NumpyHandler(deepcopy_host_arrays=False)),
        (jax.Array, types.ArrayHandler()),
    )
    return ocp.PyTreeCheckpointHandler(
        use_compression=False, type_handler_registry=own, **_alone()
    )


def _checkpointer(handler: Any) -> ocp.Checkpointer:
    return ocp.Checkpointer(handler, **_alone())


def _alone(**more: Any) -> dict[str, Any]:
    """Orbax's options for one of several processes, which acts by itself: which of them
    writes is decided before.
    """
    if jax.process_count() == 1:
        return {}
    own = jax.process_index()
    options = ocp.options.MultiprocessingOptions(
        primary_host=own,
        active_processes={own},
        barrier_sync_key_prefix=f"process_{own}",
    )
    return {"multiprocessing_options": options, **more}


@contextlib.contextmanager
def _writing(path: str) -> Generator[None]:
    """Makes one kind of error of all that can go wrong, and leaves no unfinished files
    behind.
    """
    try:
        yield
    except (CheckpointError, MemoryError):
        raise
    except Exception as error:
        with contextlib.suppress(Exception):
            target = epath.Path(path)
            for unfinished in target.parent.glob(
                f"{target.name}.orbax-checkpoint-tmp*"
            ):
                unfinished.rmtree()
        raise CheckpointError(
            f"The checkpoint {path!r} could not be written; earlier ones are as they "
            "were.",
            received=_first_line(error),
            fix="make room (CheckpointManager(max_to_keep=...) deletes old "
            "checkpoints), or choose a folder that can "
            "be written to, and save again.",
        ) from error


@contextlib.contextmanager
def _reading(path: str) -> Generator[None]:
    try:
        yield
    except (CheckpointError, MemoryError):
        raise
    except Exception as error:
        raise DamagedCheckpointError(
            f"{path!r} cannot be read.", received=_first_line(error), fix=_FALLBACK
        ) from error


def _first_line(error: Exception) -> str:
    # The array store tells where it was from the outside in, then the cause, then its
    # own settings.
    text = str(error).strip().split("\n")[0].split(" [tensorstore_spec=")[0]
    if len(text) > 800:
        text = f"{text[:300]} ... {text[-500:]}"
    return f"{type(error).__name__}: {text}"
