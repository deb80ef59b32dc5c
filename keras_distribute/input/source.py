"""What input is read through: a `Source` is a dataset of any kind, a `Reader` one pass
over it. Knows no devices.

Readers yield host batches: structures of NumPy arrays and sparse ones, with the number
of rows of the whole batch. Positions are dicts of numbers, strings, bytes, lists and
arrays; restoring one gives the very next batch.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from keras_distribute import config
from keras_distribute._compat import adapters as compat
from keras_distribute.errors import InputError

Part = Callable[[int], tuple[int, int]]
Position = dict[str, Any]


class _InUse:
    """What this process reads, as long as somebody holds it.

    Attributes:
        works: The threads that read ahead (`prefetch`).
        streams: By their generators, what was read ahead of them (`generators`).
    """

    def __init__(self) -> None:
        self.works: weakref.WeakSet[Any] = weakref.WeakSet()
        self.streams: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


in_use = _InUse()


class Batch(NamedTuple):
    """A batch on the host.

    Args:
        data: A structure of arrays: all rows, or those of this process.
        rows: The number of rows of the whole batch.
        specs: For each replica of all processes the shapes and dtypes of the leaves of
            its piece, where the processes read data of their own.
    """

    data: Any
    rows: int
    specs: Any = None


class Excerpt(NamedTuple):
    """Some numbers of an array.

    Args:
        name: Where the array is in a batch.
        rows: Of which rows they are.
        numbers: Of each row the same number of them, as complex ones.
    """

    name: str
    rows: tuple[int, ...]
    numbers: np.ndarray[Any, Any]


def rows_of(data: Any) -> int:
    """The rows of a batch: those of its first array that has any dimensions."""
    shapes = map(np.shape, jax.tree.leaves(data, is_leaf=compat.is_sparse))
    return next((shape[0] for shape in shapes if shape), 0)


def copy_arrays(data: Any) -> Any:
    """The batch with copies of its arrays, for a pipeline that fills them again while
    the batch still waits for its step.
    """
    return jax.tree.map(lambda a: np.array(a) if isinstance(a, np.ndarray) else a, data)


class Reader:
    """One pass over a source, from its beginning or from a position.

    `cheap_position` says whether a position is taken after each batch; otherwise only
    when it is asked for. `reuses_arrays` says that an array may change after the batch
    was read, so that one that waits must be copied.
    """

    kind = "data"
    cheap_position = True
    reuses_arrays = False
    # Whether positions may be asked for, which some readers must prepare for.
    followed = True
    why_no_position = "its reader has no position."
    fix_no_position = "use arrays, tf.data, Grain or a PyDataset."

    def describe_as(self, inner: Reader) -> None:
        """Takes over what another reader says of itself, which this one reads from."""
        self.kind, self.cheap_position = inner.kind, inner.cheap_position
        self.reuses_arrays = inner.reuses_arrays

    def start(self, ahead: int) -> None:
        """Called once, before the first batch, in the thread of the caller.

        Args:
            ahead: How many batches may be read before they are asked for.
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
        """A batch that `seek` brought back: prefetched, but not used."""
        return batch

    def interrupt(self) -> None:
        """Called before `close`: makes a `__next__` in another thread return soon."""

    def close(self, unread: int) -> None:
        """Ends the pass; its last `unread` batches were prefetched and not used."""


class Source:
    """A dataset of one kind."""

    kind = "data"

    @property
    def is_at_hand(self) -> bool:
        """Whether a batch is a slice of arrays in memory, which costs no time."""
        return False

    def steps_ahead(self, platform: str) -> int:
        """How many batches to prefetch for devices of a platform by default."""
        if platform == "cpu" and self.is_at_hand:
            # A thread that slices arrays and hands them over takes more of the cores
            # that compute the steps than it saves.
            return config.prefetch_steps(0)
        return config.prefetch_steps()

    @property
    def num_batches(self) -> int | None:
        """The batches of one pass; `None` where unknown or without end."""
        return None

    @property
    def batch_size(self) -> int | None:
        """The rows of a full batch; `None` where they vary."""
        return None

    @property
    def num_rows(self) -> int | None:
        """The rows of one pass, if all batches but the last are known to be full."""
        return None

    @property
    def order(self) -> str:
        """How the rows are shuffled, in words; empty where the dataset does that."""
        return ""

    @property
    def excerpts(self) -> list[Excerpt]:
        """Some numbers of each array, if they are in memory: the same in all processes
        that have the same arrays.
        """
        return []

    @property
    def example(self) -> Any:
        """A structure like a batch's, of arrays or specs with `shape` and `dtype`, with
        any number of rows.

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
        """The first batch of a pass, which a later pass begins with again, if alike."""
        return first_of(self.open())

    def only_rows(self, part: Part) -> Source:
        """The same batches with some of their rows: `part(rows)` is the first of them
        and the one after the last.
        """
        return _RowsOf(self, part)


def uncounted() -> None:
    """Stands for Keras's count of epochs, for data that has none."""


class Shuffled(Source):
    """A dataset that is shuffled here, as Keras shuffles it.

    `epoch` is the number of the next pass; where Keras counts epochs, and shuffles by
    their number alone, `counted` says the number.
    """

    epoch = 0
    shuffle: bool | str = False
    seed: int | None = None
    counted: Callable[[], int | None]

    @property
    def order(self) -> str:
        if not self.shuffle:
            return "not shuffled"
        within = " within each batch" if self.shuffle == "batch" else ""
        by = "" if self.seed is None else f" by the seed {self.seed}"
        return f"shuffled{within}{by}"

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
    """Some rows of each batch of a source that reads whole batches."""

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
        self.describe_as(whole)
        self._whole, self._part = whole, part
        self.start, self.position, self.seek = whole.start, whole.position, whole.seek
        self.form, self.close = whole.form, whole.close

    def __next__(self) -> Batch:
        batch = next(self._whole)
        rows = slice(*self._part(batch.rows))
        data = jax.tree.map(lambda a: a[rows] if np.ndim(a) else a, batch.data)
        return Batch(data, batch.rows)


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
