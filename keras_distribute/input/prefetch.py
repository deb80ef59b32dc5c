"""Prefetches batches: reads them and makes them ready, in a thread, ahead of the step
that needs them. Knows no devices.

Exceptions of the user's pipeline come out of `next`, after the batches before them,
with their traceback. What was prefetched and not used goes back to the reader when the
feed is closed.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax

from keras_distribute import context
from keras_distribute._compat import adapters as compat
from keras_distribute._compat import scopes
from keras_distribute.devices import timing
from keras_distribute.errors import InputError
from keras_distribute.input.source import Batch, Position, Reader, copy_arrays, in_use
from keras_distribute.threads import dropped
from keras_distribute.threads.condition import Condition
from keras_distribute.values.arrays import on_host

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
        ahead: How many batches to prefetch; 0 reads each in the caller's thread when it
            is asked for.
        per_epoch: How many batches an epoch takes: none of the next one is read before
            it begins.
        followed: Whether positions may be asked for.
    """

    def __init__(
        self,
        open_reader: Callable[[], Reader],
        prepare: Callable[[Batch], Any],
        ahead: int,
        per_epoch: int | None = None,
        followed: bool = True,
    ) -> None:
        self._open_reader, self._followed = open_reader, followed
        self._new_work = functools.partial(
            _Work, prepare=prepare, ahead=ahead, per_epoch=per_epoch
        )
        self._opening = threading.Lock()
        self._work: _Work | None = None
        self._finalizer: Any = None
        self._sought: Position | None = None
        self._closed = False

    def __next__(self) -> Any:
        if self._closed:
            raise StopIteration
        try:
            with timing.of("input"):
                item = self._started().take()
        except BaseException:
            self.close()
            raise
        if item is None:
            self.close()
            # From here, since whoever catches it may keep it until garbage is
            # collected, and with it the frames that it has passed.
            raise StopIteration
        return item.prepared

    def start(self) -> None:
        """Starts to read; otherwise the first batch that is asked for does."""
        self._started()

    def position(self, *, ended: bool = False) -> Position:
        """The position after the last batch that was handed out.

        Args:
            ended: Whether that was the last of the pass: what has been changed since
                for the next pass is then included.

        Raises:
            InputError: For data that has none.
        """
        if self._work is None and self._sought is not None:
            return self._sought
        return self._started().position(ended)

    def seek(self, position: Position) -> None:
        """Goes on from `position` instead."""
        self.close()
        reader = self._open()
        reader.seek(position["at"])
        work = self._work_on(reader)
        work.pending = _unpacked(position.get("pending"), reader)
        self._sought, self._closed = position, False

    def close(self) -> None:
        """Ends the thread, and gives back to the reader what was not used."""
        self._closed = True
        if self._work is not None:
            self._work.stop(wait=True)

    def release(self) -> None:
        """Closes, and drops the reader: pipelines hold threads and large buffers. The
        feed has no position then.
        """
        self.close()
        if self._finalizer is not None:
            self._finalizer.detach()
        self._work = None

    def _open(self) -> Reader:
        dropped.settle()  # A pass that was dropped first gives back what it prefetched.
        return self._open_reader()

    def _work_on(self, reader: Reader) -> _Work:
        """Dropping the feed closes it."""
        if self._finalizer is not None:
            self._finalizer.detach()
        self._work = work = self._new_work(reader)
        stop = functools.partial(work.stop, wait=True)
        self._finalizer = dropped.when_dropped(self, stop)
        return work

    def _started(self) -> _Work:
        with self._opening:
            work = self._work
            if work is None:
                reader = self._open()
                reader.followed = self._followed
                work = self._work_on(reader)
            work.start()
            return work


class _Work:
    """What the thread and the feed share; it does not know the feed, so that dropping a
    feed ends its thread.
    """

    def __init__(
        self,
        reader: Reader,
        prepare: Callable[[Batch], Any],
        ahead: int,
        per_epoch: int | None,
    ) -> None:
        self._reader, self._prepare = reader, prepare
        self._ahead, self._per_epoch = ahead, per_epoch
        self.pending: deque[Batch] = deque()
        self._ready: deque[_Ready] = deque()
        self._failure: BaseException | None = None
        self._changed = Condition()
        self._reading = threading.Lock()
        self._asked = self._read = 0
        self._running = self._ended = self._stopped = False
        self._closed = self._thread_left = False
        self._thread: threading.Thread | None = None
        self._position: Position | None = None
        self._no_position: InputError | None = None
        in_use.works.add(self)

    def start(self) -> None:
        if self._running:
            return
        self._running = True
        self._reader.start(self._ahead + 2)
        self._position = self._position_now()
        if self._ahead:
            args = (context.frames(), scopes.thread_state())
            name = "keras_distribute input"
            self._thread = threading.Thread(
                target=self._run, args=args, name=name, daemon=True
            )
            self._thread.start()

    def take(self) -> _Ready | None:
        """The next batch, waiting for it if need be; `None` at the end, and when
        another thread has closed the feed or was raised its failure.
        """
        if self._thread is None:
            with self._reading, timing.of("due"):
                if self._stopped:
                    return None
                try:
                    item = self._next()
                except StopIteration:
                    return None
        else:
            with self._changed.lock:
                self._asked += 1
                self._changed.notify_all()
                while not (self._ready or self._ended or self._stopped):
                    self._changed.wait()
                if self._stopped or not self._ready:
                    # Its traceback holds the feed, so the feed must not hold it, nor
                    # this frame: the cycle would keep the reader alive.
                    failure, self._failure = self._failure, None
                    if failure is None:
                        return None
                    try:
                        raise failure
                    finally:
                        del failure
                item = self._ready.popleft()
                self._changed.notify_all()
        self._position = item.position
        return item

    def _next(self) -> _Ready:
        with timing.of("reading"):
            if self.pending:
                batch = self._reader.again(self.pending.popleft())
            else:
                batch = next(self._reader)
        if self._reader.reuses_arrays:
            batch = batch._replace(data=copy_arrays(batch.data))
        with timing.of("placing"):
            prepared = self._prepare(batch)
        return _Ready(batch, prepared, self._position_now())

    def _run(self, frames: list[Any], state: dict[str, Any]) -> None:
        scopes.set_thread_state(state)
        try:
            self._read_ahead(frames)
        finally:
            with self._changed.lock:
                self._thread_left = True
                self._changed.notify_all()

    def _read_ahead(self, frames: list[Any]) -> None:
        with context.inherited(frames):
            while self._wait_for_room():
                with self._reading:
                    try:
                        item = self._next()
                    except BaseException as failure:
                        with self._changed.lock:
                            # The end needs no traceback, which would hold this frame,
                            # and with it the reader.
                            is_end = isinstance(failure, StopIteration)
                            self._failure = None if is_end else failure
                            self._ended = True
                            self._changed.notify_all()
                        return
                    with self._changed.lock:
                        self._ready.append(item)
                        self._read += 1
                        self._changed.notify_all()

    def _wait_for_room(self) -> bool:
        with self._changed.lock, timing.of("room"):
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
            # The frames of its traceback would keep the feed alive.
            self._no_position = error.with_traceback(None)
            return None

    def position(self, ended: bool) -> Position:
        if self._no_position is not None:
            raise self._no_position
        if self._position is not None and not ended:
            return self._position
        # The reader stands still; what it has prefetched belongs to the position.
        with self._reading, self._changed.lock:
            if ended:
                return {"at": self._reader.position()}
            waiting = [item.batch for item in self._ready] + list(self.pending)
            return {"at": self._reader.position(), "pending": _packed(waiting)}

    def stop(self, wait: bool = False) -> None:
        with self._changed.lock:
            self._stopped = True
            self._changed.notify_all()
            own = self._thread is threading.current_thread()
            if self._closed or not wait or not self._running or own:
                return
            self._closed = True
        try:
            reads_on = self._thread is not None and not self._wait_until_left()
        except BaseException:
            self._closed = False  # By Ctrl-C: the next call waits again.
            raise
        if reads_on:
            warnings.warn(
                f"{self._reader.kind} did not return a batch for {_JOIN_SECONDS:.0f} "
                "seconds after its reading was ended; its thread is left alone.",
                stacklevel=3,
            )
            return
        unread = len(self._ready)
        self._ready.clear()
        self._failure = None
        self._reader.close(unread)

    def _wait_until_left(self) -> bool:
        """Whether the thread ends soon."""
        assert self._thread is not None
        self._reader.interrupt()
        # An interrupted `join` takes the thread for ended, so that comes last.
        with self._changed.lock:
            left = self._changed.wait_for(lambda: self._thread_left, _JOIN_SECONDS)
        if left:
            self._thread.join()
        return left


def _packed(batches: list[Batch]) -> list[Any]:
    packed: list[Any] = []
    for batch in batches:
        leaves = jax.tree.leaves(batch.data, is_leaf=compat.is_sparse)
        if any(map(compat.is_sparse, leaves)):
            raise InputError(
                "The position of a pipeline with sparse tensors cannot be saved.",
                received="a batch with a sparse tensor.",
                fix="tf.sparse.to_dense in the pipeline.",
            )
        packed.append({"leaves": list(map(on_host, leaves)), "rows": batch.rows})
    return packed


def _unpacked(packed: list[Any] | None, reader: Reader) -> deque[Batch]:
    if not packed:
        return deque()
    form = reader.form()
    data = [jax.tree.unflatten(form, item["leaves"]) for item in packed]
    return deque(Batch(d, item["rows"]) for d, item in zip(data, packed, strict=True))


@atexit.register
def _stop_all() -> None:
    """Threads that read on while Python ends crash in libraries taken down."""
    for work in list(in_use.works):
        with contextlib.suppress(Exception):
            work.stop()
            if work._thread is not None:
                work._thread.join(2.0)
