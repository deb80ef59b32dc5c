"""The datasets that a worker reads itself, and the batches that it has read of them."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from keras_distribute.context import running_as
from keras_distribute.errors import OutOfRangeError
from keras_distribute.remote.frames import Array, Header, form_of

_QUICK_SECONDS = 0.002  # For a batch that is read before the last one is pushed.


class _Dataset(NamedTuple):
    """A dataset of this worker.

    Attributes:
        make: The user's function.
        x64: Whether its numbers may have 64 bits.
    """

    make: Callable[[], Any]
    x64: bool


class _Batches(NamedTuple):
    """An iterator over such a dataset."""

    elements: Iterator[Any]
    x64: bool

    def next(self) -> list[Array]:
        """The arrays of the next element."""
        with jax.enable_x64(self.x64):
            arrays = list(map(np.asarray, jax.tree.leaves(next(self.elements))))
            kinds = [jax.dtypes.canonicalize_dtype(array.dtype) for array in arrays]
        return list(map(np.asarray, arrays, kinds))


class _Read(NamedTuple):
    """What was read for a function, for which the coordinator makes a program.

    Attributes:
        iterators: Of which it takes batches.
        elements: Those batches.
    """

    iterators: set[int]
    elements: list[list[Array]]

    @property
    def forms(self) -> list[list[Any]]:
        """The forms of the arrays of each batch."""
        return [list(map(form_of, element)) for element in self.elements]


class Reading:
    """What one worker reads.

    Args:
        worker: Its number.

    Attributes:
        waiting: By their numbers, what was read for functions whose program is for
            other shapes.
        is_quick: Whether what the last step takes was read in no time.
    """

    def __init__(self, worker: int) -> None:
        self._worker = worker
        self._datasets: dict[int, _Dataset] = {}
        self._iterators: dict[int, _Batches] = {}
        self.waiting: dict[int, _Read] = {}
        self.is_quick = False

    def take_dataset(self, number: int, pickled: Array, x64: bool) -> None:
        """Takes the function that makes a dataset."""
        # Who has the token of the job may run code: it is the user's own.
        self._datasets[number] = _Dataset(pickle.loads(pickled.tobytes()), x64)

    def begin(self, number: int, dataset: int) -> None:
        """Begins to read a dataset, by an iterator of this number."""
        own = self._datasets[dataset]
        with running_as(self._worker), jax.enable_x64(own.x64):
            made = iter(own.make())
        self._iterators[number] = _Batches(made, own.x64)

    def drop(self, number: int) -> None:
        """Drops a dataset or an iterator."""
        self._iterators.pop(number, None)
        self._datasets.pop(number, None)

    def taken_by(self, header: Header, layout: Mapping[str, Any]) -> Taken | None:
        """What a function takes; `None` where one before it still has to take of the
        same iterators: batches are taken in their order.
        """
        for each in [each for each in self.waiting if each < header["done"]]:
            del self.waiting[each]  # It has failed.
        for each, read in self.waiting.items():
            is_before = each < header["closure"]
            if is_before and not read.iterators.isdisjoint(header["iterators"]):
                return None
        return Taken(self, header, layout)

    def next_of(self, number: int) -> list[Array]:
        """The next batch of an iterator.

        Raises:
            OutOfRangeError: At its end.
        """
        try:
            with running_as(self._worker):
                return self._iterators[number].next()
        except StopIteration:
            raise OutOfRangeError(
                "The dataset of a worker is at its end.",
                received=f"the worker {self._worker}.",
                fix="dataset.repeat() in the dataset function, and count the steps.",
            ) from None


class Taken:
    """What the steps of one function take of iterators; nothing of a function without.

    Args:
        reading: Who reads.
        header: What the coordinator says of the function.
        layout: Of its program, which may be for batches of other shapes.
    """

    def __init__(
        self, reading: Reading, header: Header, layout: Mapping[str, Any]
    ) -> None:
        self._reading, self._iterators = reading, header["iterators"]
        self._closure, self._forms = header["closure"], layout["elements"]
        self._looks_up = bool(layout["tables"])
        # A step may be computed twice.
        self._batches: dict[int, list[Array]] = {}
        self._failure: Exception | None = None

    def __getitem__(self, step: int) -> list[Array]:
        """The arrays that a step takes, which were read."""
        return self._batches[step] if self._forms else []

    @property
    def waiting_forms(self) -> list[list[Any]]:
        """The forms of what was read and does not fit."""
        return self._reading.waiting[self._closure].forms

    def has(self, step: int) -> bool:
        """Reads what a step takes; false where that has other shapes than the program,
        and waits for one that fits.

        Raises:
            OutOfRangeError: At the end of a dataset.
            Exception: What reading raises.
        """
        if step in self._batches or not self._forms:
            return True
        if self._failure is not None:
            raise self._failure
        waiting = self._reading.waiting
        read = waiting.pop(self._closure, None)
        if read is None:
            start = time.monotonic()
            # No `map`, which would end quietly at the end of a dataset.
            elements = [
                self._reading.next_of(self._iterators[index])
                for index, _ in self._forms
            ]
            self._reading.is_quick = time.monotonic() - start < _QUICK_SECONDS
            read = _Read(set(self._iterators), elements)
        if read.forms != [form for _, form in self._forms]:
            waiting[self._closure] = read
            return False
        self._batches[step] = [array for each in read.elements for array in each]
        return True

    def has_early(self, step: int) -> bool:
        """The same before the step before it was pushed: where the answer to that may
        have the rows of this one, and to read takes no time.
        """
        if self._forms and not (self._looks_up and self._reading.is_quick):
            return False
        try:
            return self.has(step)
        except Exception as error:  # Told when that step has been pushed.
            self._failure = error
            return False
