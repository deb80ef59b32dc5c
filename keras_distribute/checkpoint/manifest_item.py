"""The manifest as an item of an Orbax checkpoint, and what is done when all items are
there: all goes to the disk.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import future as futures

from keras_distribute.checkpoint import manifest as manifests
from keras_distribute.checkpoint import tables
from keras_distribute.checkpoint.manifest import ArrayRecord, FileRecord, Manifest
from keras_distribute.cluster.encoding import Arrays

# Orbax waits for items by name, and stops at the first error: the large one, which
# takes longest, comes first.
ARRAYS, MANIFEST, FILE = "arrays", "manifest", "manifest.json"
_INDEX = "manifest.ocdbt"  # Of the arrays, which come first.
_SMALL = 2**20


class ManifestHandler(ocp.AsyncCheckpointHandler):
    """Writes the manifest among Orbax's items, in the background, once the arrays are
    written.

    Args:
        before: Called in the background first.

    Attributes:
        failure: Why the tables of the last save could not be written.
    """

    def __init__(self, before: Callable[[], None] = lambda: None) -> None:
        self._before = before
        self.failure: Exception | None = None
        self._manifest: Manifest | None = None
        self._records: dict[str, ArrayRecord] = {}

    async def async_save(
        self, directory: epath.Path, *args: Any, **kwargs: Any
    ) -> list[ocp.Future]:
        save: ManifestSave = kwargs["args"]
        self._manifest = save.manifest
        self.failure, in_blocks = None, dict[str, ArrayRecord]()
        try:  # Not in the background, where the next step would change them.
            in_blocks = tables.write(directory.parent / tables.FOLDER, save.arrays)
        except Exception as error:  # For Orbax, once it has written the arrays.
            self.failure = error

        async def compute() -> None:
            if self.failure is not None:
                raise self.failure
            self._before()
            self._records = {
                name: in_blocks.get(name) or ArrayRecord.of(array)
                for name, array in save.arrays.items()
            }

        future = futures.CommitFutureAwaitingContractedSignals
        return [future(compute(), name="checksums")]

    def finalize(self, directory: epath.Path) -> None:
        """Called by one process, when the items before this one are complete."""
        assert self._manifest is not None
        files = _file_records(directory.parent / ARRAYS)
        if _INDEX not in files:  # Orbax says nothing where it finds nothing to merge.
            raise FileNotFoundError(f"There is no {_INDEX} in {directory.parent}.")
        content = manifests.to_bytes(self._manifest, self._records, files)
        (directory / FILE).write_bytes(content)
        for name in (ARRAYS, tables.FOLDER):
            folder = directory.parent / name
            for path in _all_in(folder) if folder.exists() else ():
                sync(path)
        for path in (directory / FILE, directory):
            sync(path)
        self._manifest = None

    def save(self, directory: epath.Path, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    def restore(self, directory: epath.Path, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


def _all_in(folder: epath.Path) -> Iterator[epath.Path]:
    """All files and folders in `folder`, and then itself."""
    for path in folder.iterdir():
        yield from _all_in(path) if path.is_dir() else (path,)
    yield folder


def sync(path: epath.Path) -> None:
    """Returns when a file, or what a folder lists, is on the disk, where the file
    system is one of this machine.
    """
    if "://" in str(path):  # An object store: what it has confirmed is there.
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot do that with folders.
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(descriptor)


def _file_records(folder: epath.Path) -> dict[str, FileRecord]:
    """The files in `folder`, with checksums for those that say what is where.

    The large ones hold the arrays, which have checksums of their own: they need not be
    read again.
    """
    records: dict[str, FileRecord] = {}
    for path in sorted(path for path in _all_in(folder) if not path.is_dir()):
        size = path.stat().length
        holds_arrays = size > _SMALL and path.parent.name == "d"
        checksum = None if holds_arrays else zlib.crc32(path.read_bytes())
        records[str(path.relative_to(folder))] = FileRecord(size, checksum)
    return records


@ocp.args.register_with_handler(ManifestHandler, for_save=True)
@dataclasses.dataclass(repr=False)  # Orbax puts it into messages.
class ManifestSave(ocp.args.CheckpointArgs):
    """What a checkpoint is to hold; arrays, or `Blocks` of them."""

    manifest: Manifest
    arrays: Arrays


@ocp.args.register_with_handler(ManifestHandler, for_restore=True)
@dataclasses.dataclass
class ManifestRestore(ocp.args.CheckpointArgs):
    """Orbax wants one; the manifest is read without Orbax, before anything else is."""
