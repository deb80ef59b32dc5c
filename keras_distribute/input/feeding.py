"""Reads batches and makes them ready ahead of the step that needs them, in a thread.
Knows no devices.

The thread has at most `ahead` batches ready. Exceptions of the user's pipeline come out
of `next`, after the batches before them, with their traceback. What was read for nobody
goes back to the reader when the feed is closed.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple

import jax
import numpy as np

from keras_distribute import context, dropped, timing
from keras_distribute._compat import adapters as compat
from keras_distribute.errors import InputError
from keras_distribute.input.source import Batch, Position, Reader

_JOIN_SECONDS = 30.0


class _Ready(NamedTuple):
    batch: Batch
    prepared: Any
    position: Position | None


class Feed(Iterator[Any]):
    """An iterator over `prepare(batch)` for the batches of a reader.

    Args:
        open_reader: Opens a new pass.
        prepare: Makes a batch ready: puts it on devices.
        ahead: How many batches to have ready; 0 prepares each in the caller's thread
            when it is asked for.
        per_epoch: Reads no further than a multiple of this number until a batch beyond
            it is asked for.
        followed: Whether somebody may ask for positions.
    """

    def __init__(
        self,
        open_reader: Callable[[], Reader],
        prepare: Callable[[Batch], Any],
        ahead: int,
        per_epoch: int | None = None,
        followed: bool = True,
    ) -> None:
        self._open, self._prepare, self._ahead, self._per_epoch = (
            open_reader,
            prepare,
            ahead,
            per_epoch,
        )
        self._followed = followed
        self._opening = threading.Lock()
        self._work: _Work | None = None
        self._dropped: Any = None
        self._sought: Position | None = None
        self._closed = False

    def __next__(self) -> Any:
        if self._closed:
            raise StopIteration
        try:
            with timing.of("input"):
                return self._started().take().prepared
        except BaseException:
            self.close()
            raise

    def start(self) -> None:
        """Starts to read; otherwise the first batch that is asked for does."""
        self._started()

    def position(self, *, ended: bool = False) -> Position:
        """The position after the last batch that was handed out.

        Args:
            ended: Whether that was the last of the pass: what its owner has changed for
                the next one is then included.

        Raises:
            InputError: For data that has none.
        """
        if self._work is None and self._sought is not None:
            return self._sought
        return self._started().position(ended)

    def seek(self, position: Position) -> None:
        """Goes on from `position` instead."""
        self.close()
        reader = self._opened()
        reader.seek(position["at"])
        work = self._new_work(reader)
        work.pending = _unpacked(position.get("pending"), reader)
        self._sought, self._closed = position, False

    def close(self) -> None:
        """Ends the thread, and gives back what nobody took."""
        self._closed = True
        if self._work is not None:
            self._work.stop(wait=True)

    def release(self) -> None:
        """Closes, and lets go of the reader: pipelines hold threads and large buffers.
        It has no position then.
        """
        self.close()
        if self._dropped is not None:
            self._dropped.detach()
        self._work = None

    def _opened(self) -> Reader:
        dropped.settle()  # A pass that was dropped gives back first what it has read ahead.
        return self._open()

    def _new_work(self, reader: Reader) -> _Work:
        """Dropping the feed closes it."""
        if self._dropped is not None:
            self._dropped.detach()
        self._work = _Work(reader, self._prepare, self._ahead, self._per_epoch)
        self._dropped = dropped.when_dropped(
            self, functools.partial(self._work.stop, wait=True)
        )
        return self._work

    def _started(self) -> _Work:
        with self._opening:
            work = self._work
            if work is None:
                reader = self._opened()
                reader.followed = self._followed
                work = self._new_work(reader)
            work.start()
            return work


class _Work:
    """What the thread and the feed share; it does not know the feed, so that dropping a
    feed ends its thread.
    """

    _all: ClassVar[weakref.WeakSet[_Work]] = weakref.WeakSet()

    def __init__(
        self,
        reader: Reader,
        prepare: Callable[[Batch], Any],
        ahead: int,
        per_epoch: int | None,
    ) -> None:
        self._reader, self._prepare, self._ahead, self._per_epoch = (
            reader,
            prepare,
            ahead,
            per_epoch,
        )
        self.pending: deque[Batch] = deque()
        self._ready: deque[_Ready] = deque()
        self._failure: BaseException | None = None
        self._changed = threading.Condition()
        self._reading = threading.Lock()
        self._asked = self._read = 0
        self._running = self._ended = self._stopped = False
        self._thread: threading.Thread | None = None
        self._position: Position | None = None
        self._no_position: InputError | None = None
        self._all.add(self)

    def start(self) -> None:
        if self._running:
            return
        self._running = True
        self._reader.start(self._ahead + 2)
        self._position = self._position_now()
        if self._ahead:
            frames, state = context.frames(), compat.thread_state()
            self._thread = threading.Thread(
                target=self._run,
                args=(frames, state),
                name="keras_distribute input",
                daemon=True,
            )
            self._thread.start()

    def take(self) -> _Ready:
        """The next batch, waiting for it if need be.

        Raises:
            StopIteration: At the end, when somebody else has closed the feed, or has
                met its failure.
        """
        if self._thread is None:
            with self._reading:
                if self._stopped:
                    raise StopIteration
                item = self._next()
        else:
            with self._changed:
                self._asked += 1
                self._changed.notify_all()
                while not (self._ready or self._ended or self._stopped):
                    self._changed.wait()
                if self._stopped or not self._ready:
                    failure, self._failure = (
                        self._failure,
                        None,
                    )  # Its traceback holds the feed, which would never end.
                    try:
                        raise failure or StopIteration
                    finally:
                        del failure  # Or the traceback and this frame would hold each other, and the reader with them.
                item = self._ready.popleft()
                self._changed.notify_all()
        self._position = item.position
        return item

    def _next(self) -> _Ready:
        with timing.of("reading"):
            batch = (
                self._reader.again(self.pending.popleft())
                if self.pending
                else next(self._reader)
            )
        if self._reader.reuses_arrays:
            data = jax.tree.map(
                lambda a: np.array(a) if isinstance(a, np.ndarray) else a, batch.data
            )
            batch = batch._replace(data=data)
        with timing.of("placing"):
            prepared = self._prepare(batch)
        return _Ready(batch, prepared, self._position_now())

    def _run(self, frames: list[Any], state: dict[str, Any]) -> None:
        compat.set_thread_state(state)
        with context.inherited(frames):
            while self._wait_for_room():
                with self._reading:
                    try:
                        item = self._next()
                    except BaseException as failure:
                        with self._changed:
                            # The end needs no traceback, which would hold this frame,
                            # and with it the reader.
                            self._failure = (
                                None if isinstance(failure, StopIteration) else failure
                            )
                            self._ended = True
                            self._changed.notify_all()
                        return
                    with self._changed:
                        self._ready.append(item)
                        self._read += 1
                        self._changed.notify_all()

    def _wait_for_room(self) -> bool:
        with self._changed:
            while not self._stopped and self._read >= self._limit():
                self._changed.wait()
            return not self._stopped

    def _limit(self) -> int:
        limit = self._asked + self._ahead
        if self._per_epoch is None:
            return limit
        return min(limit, -(-self._asked // self._per_epoch) * self._per_epoch)

    def _position_now(self) -> Position | None:
        if not self._reader.cheap_position or self._no_position is not None:
            return None
        try:
            return {"at": self._reader.position()}
        except InputError as error:
            self._no_position = error.with_traceback(
                None
            )  # Its frames would keep the feed alive.
            return None

    def position(self, ended: bool) -> Position:
        if self._no_position is not None:
            raise self._no_position
        if self._position is not None and not ended:
            return self._position
        with (
            self._reading,
            self._changed,
        ):  # The reader stands still; what it has read ahead belongs to the position.
            if ended:
                return {"at": self._reader.position()}
            waiting = [item.batch for item in self._ready] + list(self.pending)
            return {"at": self._reader.position(), "pending": _packed(waiting)}

    def stop(self, wait: bool = False) -> None:
        with self._changed:
            if self._stopped:
                return
            self._stopped = True
            self._changed.notify_all()
        if not wait or not self._running or self._thread is threading.current_thread():
            return
        if self._thread is not None:
            self._reader.interrupt()
            self._thread.join(_JOIN_SECONDS)
            if self._thread.is_alive():
                warnings.warn(
                    f"{self._reader.kind} did not return a batch for "
                    f"{_JOIN_SECONDS:.0f} seconds after its reading was "
                    "ended; its thread is left alone.",
                    stacklevel=3,
                )
                return
        unread = len(self._ready)
        self._ready.clear()
        self._failure = None  # Nobody has asked for it.
        self._reader.close(unread)


def _packed(batches: list[Batch]) -> list[Any]:
    packed: list[Any] = []
    for batch in batches:
        leaves = jax.tree.leaves(batch.data)
        if any(
            compat.is_sparse(leaf)
            for leaf in jax.tree.leaves(batch.data, is_leaf=compat.is_sparse)
        ):
            raise InputError(
                "The position of a pipeline with sparse tensors cannot be saved.",
                received="a batch with a sparse tensor.",
                fix="tf.sparse.to_dense in the pipeline.",
            )
        packed.append(
            {"leaves": [np.asarray(leaf) for leaf in leaves], "rows": batch.rows}
        )
    return packed


def _unpacked(packed: list[Any] | None, reader: Reader) -> deque[Batch]:
    if not packed:
        return deque()
    form = reader.form()
    return deque(
        Batch(jax.tree.unflatten(form, item["leaves"]), item["rows"]) for item in packed
    )


@atexit.register
def _stop_all() -> None:
    """Threads that still read when Python ends would crash in libraries that are being
    taken down.
    """
    for work in list(_Work._all):
        with contextlib.suppress(Exception):
            work.stop()
            if work._thread is not None:
                work._thread.join(2.0)
