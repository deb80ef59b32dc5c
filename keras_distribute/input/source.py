"""What input is read through: a `Source` is a dataset of any kind, a `Reader` one pass
over it. Knows no devices.

Readers yield host batches: structures of NumPy arrays and sparse ones, with the number
of rows of the whole batch. Positions are dicts of numbers, strings, bytes, lists and
arrays; restoring one gives the very next batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from keras_distribute import config
from keras_distribute._compat import adapters as compat
from keras_distribute.errors import InputError

Part = Callable[[int], tuple[int, int]]
Position = dict[str, Any]


class Batch(NamedTuple):
    """A batch on the host.

    Args:
        data: A structure of arrays: all rows, or those of this process.
        rows: The number of rows of the whole batch.
        forms: For each replica of all processes the shapes and dtypes of the leaves of
            its part, where the processes read data of their own.
    """

    data: Any
    rows: int
    forms: Any = None


def rows_of(data: Any) -> int:
    """The rows of a batch: those of its first array that has any dimensions."""
    shapes = (
        np.shape(leaf) for leaf in jax.tree.leaves(data, is_leaf=compat.is_sparse)
    )
    return next((shape[0] for shape in shapes if shape), 0)


class Reader:
    """One pass over a source, from its beginning or from a position.

    `cheap_position` says whether a position can be taken after each batch; otherwise it
    is taken only when asked for. `reuses_arrays` says that an array may change after
    the batch was read, so that it must be copied to wait.
    """

    kind = "data"
    cheap_position = True
    reuses_arrays = False
    followed = (
        True  # Whether positions may be asked for, which some readers must prepare for.
    )
    why_no_position = "its reader has no position."
    fix_no_position = "use arrays, tf.data, Grain or a PyDataset."

    def start(self, ahead: int) -> None:
        """Called once, before the first batch, in the thread of the caller.

        Args:
            ahead: How many batches may be read that nobody has asked for yet.
        """

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        raise NotImplementedError

    def position(self) -> Position:
        """The position after the last batch that was read.

        Raises:
            InputError: For data that cannot go on from a position.
        """
        raise InputError(
            f"{self.kind} cannot be resumed: {self.why_no_position}",
            received="get_state().",
            fix=self.fix_no_position,
        )

    def seek(self, position: Position) -> None:
        """Makes this pass go on from `position`; called before `start`."""
        self.position()

    def form(self) -> Any:
        """The structure of a batch, for a reader whose position is not cheap."""
        raise NotImplementedError

    def again(self, batch: Batch) -> Batch:
        """A batch that was read before the position to which the pass was moved, and
        that nobody has taken.
        """
        return batch

    def interrupt(self) -> None:
        """Called before `close`, while another thread may be in `__next__`: makes it
        return soon.
        """

    def close(self, unread: int) -> None:
        """Ends the pass; its last `unread` batches were read for nobody."""


class Source:
    """A dataset of one kind."""

    kind = "data"

    @property
    def is_at_hand(self) -> bool:
        """Whether a batch is there at once, as a slice of what is in memory."""
        return False

    def steps_ahead(self, platform: str) -> int:
        """How many batches to have ready for devices of a platform, where the user does
        not say.
        """
        # A thread that slices arrays and hands them over takes more of the steps' cores
        # than it saves.
        return (
            config.prefetch_steps(0)
            if platform == "cpu" and self.is_at_hand
            else config.prefetch_steps()
        )

    @property
    def num_batches(self) -> int | None:
        """The batches of one pass; `None` where unknown or without end."""
        return None

    @property
    def batch_size(self) -> int | None:
        """The rows of a full batch; `None` where they vary."""
        return None

    @property
    def example(self) -> Any:
        """A structure like a batch's, of arrays or specs with `shape` and `dtype`; the
        number of rows says nothing.

        Raises:
            InputError: Where that is not known before a batch has been read.
        """
        raise InputError(
            f"The form of the elements of {self.kind} is known only when one has been "
            "read.",
            received="element_spec of a dataset that was not read yet.",
            fix="ask for it after the first element.",
        )

    def open(self) -> Reader:
        """A new pass."""
        raise NotImplementedError

    def peek(self) -> Batch:
        """The first batch of a pass; a later pass begins with it again, if passes are
        alike.
        """
        return first_of(self.open())

    def only_rows(self, part: Part) -> Source:
        """The same batches, of which only some rows are wanted: `part(rows)` says from
        which to which.
        """
        return _RowsOf(self, part)


def uncounted() -> None:
    """For data whose epochs nobody counts."""


class Shuffled(Source):
    """A dataset that is shuffled here, as Keras shuffles it.

    `epoch` is the number of the next pass; where Keras counts epochs, and shuffles by
    their number alone, `counted` says the number.
    """

    epoch = 0
    counted: Callable[[], int | None]

    def next_pass(self, sought: Position | None) -> tuple[int, bool]:
        """The number of the pass that begins, and whether a global stream shuffles it.

        Args:
            sought: The position that it goes on from. That says how it was shuffled,
                perhaps by another version of Keras.
        """
        if sought is not None:
            return sought["epoch"], sought["random"] is not None
        counted = self.counted()
        return (self.epoch, True) if counted is None else (counted, False)


def first_of(reader: Reader) -> Batch:
    """Reads one batch, and ends the pass.

    Raises:
        StopIteration: Where there is none.
    """
    reader.start(0)
    batch, unread = None, 0
    try:
        batch = next(reader)
        unread = 1
    finally:
        reader.close(unread)
    return batch


class IteratorReader(Reader):
    """A pass that is a plain iterator of batches."""

    reuses_arrays = True

    def __init__(self, kind: str, iterator: Callable[[], Iterator[Any]]) -> None:
        self.kind = kind
        self._open = iterator
        self._iterator: Iterator[Any] = iter(())

    def start(self, ahead: int) -> None:
        self._iterator = iter(self._open())

    def __next__(self) -> Batch:
        data = next(self._iterator)
        return Batch(data, rows_of(data))


class _RowsOf(Source):
    """Some rows of each batch of a source that can only be read whole."""

    def __init__(self, whole: Source, part: Part) -> None:
        self._whole, self._part, self.kind = whole, part, whole.kind

    @property
    def num_batches(self) -> int | None:
        return self._whole.num_batches

    @property
    def batch_size(self) -> int | None:
        return self._whole.batch_size

    @property
    def example(self) -> Any:
        return self._whole.example

    def open(self) -> Reader:
        return _RowsReader(self._whole.open(), self._part)


class _RowsReader(Reader):
    def __init__(self, whole: Reader, part: Part) -> None:
        self.kind, self.cheap_position, self.reuses_arrays = (
            whole.kind,
            whole.cheap_position,
            whole.reuses_arrays,
        )
        self._whole, self._part = whole, part
        self.start, self.position, self.seek = whole.start, whole.position, whole.seek
        self.form, self.close = whole.form, whole.close

    def __next__(self) -> Batch:
        batch = next(self._whole)
        start, stop = self._part(batch.rows)
        return Batch(
            jax.tree.map(lambda a: a[start:stop] if np.ndim(a) else a, batch.data),
            batch.rows,
        )


class AdapterSource(Source):
    """Any other `DataAdapter`."""

    def __init__(self, adapter: Any) -> None:
        self._adapter = adapter
        self.kind = type(adapter).__name__

    @property
    def num_batches(self) -> int | None:
        return self._adapter.num_batches

    @property
    def batch_size(self) -> int | None:
        return self._adapter.batch_size

    def open(self) -> Reader:
        return IteratorReader(self.kind, self._adapter.get_jax_iterator)
