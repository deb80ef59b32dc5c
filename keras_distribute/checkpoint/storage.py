"""One checkpoint on disk, by Orbax. Knows arrays and manifests, no variables. Imported
when a checkpoint is first used.

    <path>/
        _CHECKPOINT_METADATA     Orbax's
        arrays/                  the arrays by name, an Orbax PyTree: any Orbax reads it
        tables/0.npy             tables that this process cannot hold, if there are any
        manifest/manifest.json   shapes, types, checksums, and state that is no array

Both items are one Orbax checkpoint: written into a folder with another name, which is
renamed when all is there, and on the disk: a checkpoint that was reported complete
survives a power cut.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import stat
import zlib
from collections.abc import Callable, Generator
from typing import Any, ParamSpec, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from keras_distribute import checks
from keras_distribute._compat import checkpoint as compat
from keras_distribute.checkpoint import manifest as manifests
from keras_distribute.checkpoint import tables, under_way
from keras_distribute.checkpoint.manifest import ArrayRecord, FileRecord, Manifest
from keras_distribute.checkpoint.manifest_item import (
    ARRAYS,
    FILE,
    MANIFEST,
    ManifestHandler,
    ManifestSave,
    sync,
)
from keras_distribute.cluster.encoding import Arrays
from keras_distribute.errors import (
    CheckpointError,
    DamagedCheckpointError,
    UnavailableError,
)
from keras_distribute.threads import dropped

_P = ParamSpec("_P")
_T = TypeVar("_T")
# Deleting a folder takes many steps: killed among them, a damaged checkpoint would
# stand there under its name. Renamed first, it is gone at once; the next save empties
# this, in the background.
TRASH = "being_deleted"
FROM_TENSORFLOW = (
    "files of tf.train.Checkpoint are not read: restore them in TensorFlow with Keras "
    '3, save model.save_weights("model.weights.h5") there, and load that here.'
)
# Python and Orbax also take "030" or "３１" for a number: such a folder is no step.
_STEP = re.compile("0|[1-9][0-9]*")


def write(path: str, manifest: Manifest, arrays: Arrays) -> None:
    """Writes one checkpoint to `path`, which must not exist, and returns when it is
    complete. Interrupted meanwhile, it is completed.

    Raises:
        CheckpointError: If it cannot be written; nothing is left at `path` then.
    """
    under_way.unfinished.write(path, lambda: _write(path, manifest, arrays))


def _write(path: str, manifest: Manifest, arrays: Arrays) -> None:
    check_name(path)
    with writing(path):
        if epath.Path(path).exists():
            raise CheckpointError(
                f"There is something at {path!r} already.",
                fix="checkpoint.save(prefix), which numbers its checkpoints, or a "
                "CheckpointManager, which also deletes old ones.",
            )
        options = ocp.CompositeOptions(**act_alone())
        items: Any = {"arrays": array_handler(), "manifest": ManifestHandler()}
        handler = ocp.CompositeCheckpointHandler(composite_options=options, **items)
        with contextlib.closing(_checkpointer(handler)) as checkpointer:
            checkpointer.save(path, args=save_args(manifest, arrays))
        sync_names(path)


def sync_names(path: str) -> None:
    """Puts on the disk the names in a checkpoint's folder and in the two above it."""
    folder = epath.Path(path)
    for each in (folder, folder.parent, folder.parent.parent):
        sync(each)


def _uninterrupted(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Calls a function that reads where Ctrl-C cannot break off what Orbax does in
    threads: it would wait for ever, or its error would pass for one of the files.
    """

    @functools.wraps(function)
    def called(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        return under_way.unfinished.read(lambda: function(*args, **kwargs))

    return called


@_uninterrupted
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
            raise _no_checkpoint(folder, path)
        if not file.exists():
            received = "a file."
            if folder.is_dir():
                names = sorted(other.name for other in folder.iterdir())
                received = f"a folder with {', '.join(names) or 'nothing in it'}."
            raise DamagedCheckpointError(
                f"{path!r} is no complete checkpoint: it has no {MANIFEST}/{FILE}.",
                received=received,
                fix=manifests.FALLBACK,
            )
        manifest, arrays, files = manifests.from_bytes(file.read_bytes(), str(file))
        _check_name(folder, manifest)
        _check_files(folder / ARRAYS, files)
        return manifest, arrays


def version_of(path: str) -> float | None:
    """A number that is another one when a checkpoint was deleted and saved anew; `None`
    without a checkpoint.
    """
    file = epath.Path(path) / MANIFEST / FILE
    if not file.exists():
        return None
    # Whole seconds, as `epath` has them, would be too few.
    return file.stat().mtime if "://" in path else os.stat(file).st_mtime_ns


def of_tensorflow(directory: str) -> list[str]:
    """The names of the checkpoints that `tf.train.Checkpoint` has written there."""
    folder = epath.Path(directory)
    names = [file.name for file in folder.iterdir()] if folder.is_dir() else []
    return sorted(
        name.removesuffix(".index") for name in names if name.endswith(".index")
    )


def _no_checkpoint(folder: epath.Path, path: str) -> CheckpointError:
    parent = folder.parent
    names = sorted(other.name for other in parent.iterdir()) if parent.is_dir() else []
    fix = "the path that checkpoint.save or manager.save returned; "
    fix += "manager.all_steps() lists the steps."
    if under_way.is_elsewhere(path):
        fix = "manager.wait() in every process first: process 0 is writing it."
    if folder.name in of_tensorflow(str(parent)):
        fix = FROM_TENSORFLOW
    return CheckpointError(
        f"There is no checkpoint at {path!r}.",
        received=f"{str(parent)!r} holds {', '.join(names)}." if names else None,
        fix=fix,
    )


def check_name(path: str) -> None:
    """Refuses a folder in which a checkpoint would be written but not found again:
    Orbax looks for its own files by a pattern that begins with the path, and its store
    takes a backslash for a slash.
    """
    found = [sign for sign in "*?[\\" if sign in path]
    if found:
        raise CheckpointError(
            f"A checkpoint in {path!r} could not be read again: its path has "
            f"{' and '.join(map(repr, found))}.",
            fix="a path without * ? [ and \\, such as lr=0.1 in place of lr=[0.1].",
        )


def check_free(path: str) -> None:
    """Refuses a file or a broken link, which Orbax would replace."""
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
            + manifests.FALLBACK,
        )


def _check_files(folder: epath.Path, records: dict[str, FileRecord]) -> None:
    damaged: list[str] = []
    for name, record in records.items():
        path = folder / name
        if not path.exists():
            damaged.append(f"{path} (missing)")
            continue
        size, checksum = path.stat().length, record.checksum
        if size != record.size:
            damaged.append(f"{path} ({size} bytes instead of {record.size})")
        elif checksum is not None and zlib.crc32(path.read_bytes()) != checksum:
            damaged.append(f"{path} (wrong checksum)")
    if damaged:
        raise DamagedCheckpointError(
            f"The checkpoint {str(folder.parent)!r} is damaged, {len(damaged)} "
            "file(s):\n    " + "\n    ".join(damaged),
            fix=manifests.FALLBACK,
        )


@_uninterrupted
def read_arrays(path: str, records: dict[str, ArrayRecord]) -> dict[str, Any]:
    """The arrays of the checkpoint at `path`, verified; of tables in files of their own
    `Blocks`.

    Args:
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
    in_blocks, damaged_tables = tables.opened(epath.Path(path) / tables.FOLDER, records)
    names = [n for n in records if n not in arrays and records[n].file is None]
    folder = epath.Path(path) / ARRAYS
    stored: dict[str, Any] = {}
    if names:
        wanted = ocp.RestoreArgs(restore_type=np.ndarray)
        args = ocp.args.PyTreeRestore(
            item=dict.fromkeys(names, 0), restore_args=dict.fromkeys(names, wanted)
        )
        with (
            _reading(str(folder)),
            contextlib.closing(_checkpointer(array_handler())) as checkpointer,
        ):
            stored = checkpointer.restore(folder, args=args)
    damaged = damaged_tables
    for name in names:
        try:
            array = manifests.as_recorded(np.asarray(stored[name]), records[name])
            intact = ArrayRecord.of(array) == records[name]
            arrays[name] = array
        except (KeyError, ValueError, TypeError):
            intact = False
        damaged += [] if intact else [name]
    if damaged:
        raise DamagedCheckpointError(
            f"The files in {str(folder)!r} are damaged: {len(damaged)} array(s) are "
            f"not what was saved: {', '.join(damaged)}.",
            fix=manifests.FALLBACK,
        )
    return {**arrays, **in_blocks}


def steps_in(directory: str) -> list[int]:
    """The steps whose checkpoints are complete, ascending; also those of a manager that
    was dropped while it saved.
    """
    dropped.settle()
    return _steps_in(directory)


@_uninterrupted
def _steps_in(directory: str) -> list[int]:
    with _reading(directory):
        return sorted(int(path.name) for path in step_folders(directory))


def step_folders(directory: Any) -> list[epath.Path]:
    """The folders of complete checkpoints of steps."""
    if not _is_there(directory):
        return []
    paths = ocp.utils.checkpoint_steps_paths(directory)
    return [path for path in paths if _STEP.fullmatch(path.name)]


def _is_there(directory: Any) -> bool:
    """Whether there is such a folder. That is unknown, and an error, where a disk or a
    store does not answer: `is_dir` says no there, and a run would begin anew.
    """
    if "://" in str(directory):
        return epath.Path(directory).exists()
    try:
        return stat.S_ISDIR(os.stat(directory).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def remove(directory: str) -> None:
    """Deletes the folder of all steps: renamed first, so that it is gone at once.
    Interrupted meanwhile, it is completed.
    """
    under_way.unfinished.write(directory, lambda: _remove(directory))


def _remove(directory: str) -> None:
    folder = epath.Path(directory)
    trash = folder.with_name(f"{folder.name}.{TRASH}")
    with writing(directory):
        if trash.exists():
            trash.rmtree()
        if folder.exists():
            # A store would copy each file to rename it.
            (folder if "://" in directory else folder.rename(trash)).rmtree()


def step_path(directory: str, step: int) -> str:
    """The folder of a step."""
    return str(epath.Path(directory) / str(step))


def absolute(path: Any) -> str:
    """The path as Orbax takes it.

    Raises:
        BackendError: For a bucket, without the package that deletes in it.
        CheckpointError: For an address of a kind that Orbax does not know.
    """
    try:
        own = epath.Path(path).expanduser()
    except KeyError as kind:
        raise CheckpointError(
            f"Checkpoints cannot be at addresses that begin with {kind.args[0]}.",
            received=f"{os.fspath(path)!r}.",
            fix="gs://bucket/folder, or a path of this machine.",
        ) from kind
    if str(own).startswith("gs://"):
        what = "Checkpoints in gs:// need the client of Google Cloud Storage."
        checks.imported("google.cloud.storage", what, "pip install gcsfs")
    # Of an object store, `absolute` makes a path below the working directory.
    return str(own if "://" in str(own) else own.absolute())


def save_args(manifest: Manifest, arrays: Arrays) -> Any:
    # Orbax's store takes no array without elements: the manifest alone names it.
    stored = {
        name: manifests.storable(array)
        for name, array in arrays.items()
        if isinstance(array, np.ndarray) and array.size
    }
    items = {
        ARRAYS: ocp.args.PyTreeSave(stored or {"": np.zeros(1)}),
        MANIFEST: ManifestSave(manifest, arrays),
    }
    return ocp.args.Composite(**items)


def array_handler() -> ocp.PyTreeCheckpointHandler:
    """Uncompressed: weights shrink by 7 %, and take four times as long to write."""
    types = ocp.type_handlers
    registry = types.create_type_handler_registry(
        # The arrays are copies already.
        (np.ndarray, types.NumpyHandler(deepcopy_host_arrays=False)),
        (jax.Array, types.ArrayHandler()),
    )
    return ocp.PyTreeCheckpointHandler(
        use_compression=False, type_handler_registry=registry, **act_alone()
    )


def _checkpointer(handler: Any) -> ocp.Checkpointer:
    return ocp.Checkpointer(handler, **act_alone())


def act_alone(**more: Any) -> dict[str, Any]:
    """Orbax's options for one of several processes that acts without the others: which
    of them writes is decided here, not by Orbax.
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
def writing(path: str) -> Generator[None]:
    """Makes one kind of error of all, and leaves no unfinished files behind."""
    try:
        yield
    except (CheckpointError, MemoryError):
        raise
    except Exception as error:
        with contextlib.suppress(Exception):
            target = epath.Path(path)
            pattern = f"{target.name}.orbax-checkpoint-tmp*"
            for unfinished in target.parent.glob(pattern):
                unfinished.rmtree()
        if isinstance(error, UnavailableError):  # Of a server with a table.
            raise
        raise CheckpointError(
            f"The checkpoint {path!r} could not be written; earlier ones are as they "
            "were.",
            received=_first_line(error),
            fix="make room (CheckpointManager(max_to_keep=...) deletes old "
            "checkpoints), or choose a folder that can be written to, and save again.",
        ) from error


@contextlib.contextmanager
def _reading(path: str) -> Generator[None]:
    try:
        yield
    except (CheckpointError, MemoryError):
        raise
    except Exception as error:
        raise DamagedCheckpointError(
            f"{path!r} cannot be read.",
            received=_first_line(error),
            fix=manifests.FALLBACK,
        ) from error


def _first_line(error: Exception) -> str:
    # Orbax's store says where it was from the outside in, then the cause, then its own
    # settings.
    text = str(error).strip().split("\n")[0].split(" [tensorstore_spec=")[0]
    if len(text) > 800:
        text = f"{text[:300]} ... {text[-500:]}"
    return f"{type(error).__name__}: {text}"


def _close_all() -> None:
    dropped.settle()
    with contextlib.ExitStack() as stack:  # An error in one keeps none from closing.
        stack.callback(under_way.unfinished.settle)
        for writer in list(under_way.unfinished.writers):
            stack.callback(writer.close)


compat.before_exit(_close_all)
