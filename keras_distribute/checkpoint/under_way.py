"""Which checkpoints are being written in the background. Knows no Orbax, and reads no
files.

One process writes, but all have the same list of steps from the moment when `save`
returns, and learn together whether the write has failed: when they read the checkpoint,
or when its manager waits for it.
"""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from keras_distribute.cluster import agreement
from keras_distribute.threads.uninterrupted import Calls

_T = TypeVar("_T")


class Writing(Protocol):
    """What writes in the background."""

    @property
    def is_saving(self) -> bool:
        """Whether it has not finished."""
        ...

    def finish(self) -> Exception | None:
        """Returns when it has finished: with the error, if it failed."""
        ...


@dataclasses.dataclass(eq=False)
class Save:
    """A checkpoint that is being written.

    Args:
        path: Where it will be.
        step: The step of the `CheckpointManager`.
        metrics: The metrics that it will hold.
        writer: What writes it; `None` in a process that does not.
        replaces: The steps that will be deleted when it is complete.
        seen: Whether it was in the folder. Gone since, it was deleted.
    """

    path: str
    step: int
    metrics: dict[str, float] | None
    writer: Writing | None = None
    replaces: frozenset[int] = frozenset()
    seen: bool = False


class _Unfinished:
    """What this process has not finished.

    Attributes:
        saves: By folder: before a manager writes, it waits for any other.
        writers: Those that have to be closed before Python ends.
    """

    def __init__(self) -> None:
        self.saves: dict[str, Save] = {}
        self.writers: set[Any] = set()
        self._writes = Calls("keras_distribute checkpoint")
        self._failed: tuple[str, Exception] | None = None  # Which path's, and why.
        self._writing = threading.RLock()
        self._reads = Calls("keras_distribute reading")
        self._reading = threading.RLock()

    def write(self, path: str, function: Callable[[], None]) -> None:
        """Writes what is no step of a manager, also if the caller is interrupted.

        Raises the error of the function, or of one before whose caller was interrupted.
        """

        def call() -> None:
            try:
                function()
            except Exception as error:
                self._failed = (path, error)

        with self._writing:
            self.settle()
            self._writes.run(call)
            self.settle()

    def settle(self, path: str | None = None) -> None:
        """Waits for a write whose caller was interrupted; raises its error, once.

        Args:
            path: Raise only what this path could not be written for.
        """
        with self._writing:
            self._writes.settle()
            if self._failed is not None:
                failed, error = self._failed
                if path is None or _key(failed) == _key(path):
                    self._failed = None
                    raise error

    def read(self, function: Callable[[], _T]) -> _T:
        """Calls a function where no interruption can break Orbax's threads."""
        results: list[_T] = []
        with self._reading:
            self._reads.run(lambda: results.append(function()))
        return results[0]


unfinished = _Unfinished()
if hasattr(os, "register_at_fork"):  # What its parent writes, that completes.
    os.register_at_fork(after_in_child=unfinished.__init__)


def begin(save: Save) -> None:
    """Another checkpoint of its folder is being written."""
    unfinished.saves[_folder_of(save.path)] = save


def forget(save: Save | None) -> None:
    """From now on the folder alone counts: complete, or its error was raised."""
    if save is not None and unfinished.saves.get(_folder_of(save.path)) is save:
        del unfinished.saves[_folder_of(save.path)]


def in_folder(directory: str) -> Save | None:
    """The save that is under way in a folder, or whose error is still to be raised."""
    return unfinished.saves.get(_key(directory))


def steps(directory: str, complete: Callable[[], list[int]]) -> list[int]:
    """The steps of a folder, as if the save that is under way there were complete.

    Args:
        complete: Lists the steps that are complete now.
    """
    save = in_folder(directory)
    writer = None if save is None else save.writer
    if writer is not None and not writer.is_saving and writer.finish() is None:
        forget(save)
        save = None
    found = set(complete())
    if save is None:
        return sorted(found)
    save.seen = save.seen or save.step in found
    return sorted((found if save.seen else found | {save.step}) - save.replaces)


def finish(directory: str, num_processes: int) -> tuple[Save | None, Exception | None]:
    """Waits until nothing is being written to a folder.

    Returns:
        The save that was under way, and its error, in all of the processes.
    """

    def finished() -> Exception | None:
        save = in_folder(directory)
        return None if save is None or save.writer is None else save.writer.finish()

    error = agreement.from_chief("a save under way", finished, num_processes)
    save = in_folder(directory)
    if save is not None and error is None and (save.writer or num_processes > 1):
        forget(save)
    return save, error


def before_reading(path: str, num_processes: int) -> None:
    """Waits until `path` is complete, if it is being written; raises its error.

    A save that is under way beside it also ends first, since it may delete it.
    """
    unfinished.settle(path)
    save, error = finish(_folder_of(path), num_processes)
    if error is not None and save is not None and _key(save.path) == _key(path):
        forget(save)
        raise error


def is_elsewhere(path: str) -> bool:
    """Whether another process writes `path`, as far as this one knows."""
    save = unfinished.saves.get(_folder_of(path))
    return save is not None and save.writer is None and _key(save.path) == _key(path)


def _folder_of(path: str) -> str:
    return os.path.dirname(_key(path))


def _key(path: str) -> str:
    """One name for a folder, however it is written."""
    return path if "://" in path else os.path.realpath(path)
