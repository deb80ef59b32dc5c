"""`keras.utils.PyDataset`s, read by their own workers in an order of ours."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np

from keras_distribute._compat import adapters as compat
from keras_distribute.cluster import processes
from keras_distribute.errors import InputError
from keras_distribute.input.source import (
    Batch,
    Position,
    Reader,
    Shuffled,
    first_of,
    rows_of,
    uncounted,
)


class PyDatasetSource(Shuffled):
    """A `keras.utils.PyDataset`. Its batches depend on their index alone, or it has
    `get_state` and `set_state`.

    Args:
        class_weight: The argument of `fit`.
        shuffle: Whether each pass takes the batches in an order of its own.
        hooks: Whether a pass calls `on_epoch_begin` and `on_epoch_end`; `fit` does that
            by itself.
        counted: Returns Keras's count of epochs, where it shuffles by that and not from
            the stream of `random`.
    """

    kind = "PyDataset"

    def __init__(
        self,
        dataset: Any,
        class_weight: Any = None,
        shuffle: bool | str = False,
        hooks: bool = True,
        counted: Callable[[], int | None] = uncounted,
    ) -> None:
        self.dataset, self.class_weight, self.shuffle = dataset, class_weight, shuffle
        self.hooks, self.counted = hooks, counted

    @property
    def num_batches(self) -> int | None:
        return self.dataset.num_batches

    @property
    def example(self) -> Any:
        return self.dataset[0]

    def open(self) -> Reader:
        return _PyDatasetReader(self)

    def peek(self) -> Batch:
        # Not by workers: they would read many batches more.
        own = (self.dataset, self.class_weight, self.shuffle)
        return first_of(_PyDatasetReader(PyDatasetSource(*own, False, self.counted), 1))


class _PyDatasetReader(Reader):
    kind = "PyDataset"
    reuses_arrays = True

    def __init__(self, source: PyDatasetSource, workers: int | None = None) -> None:
        self._source, self._workers = source, workers
        self._epoch = self._step = 0
        self._sought: Position | None = None
        self._before: Any = None
        # Seeds of the random streams after the pass, where the workers of each process
        # may have drawn from them another number of times.
        self._after: list[int] | None = None
        self._adapter: Any = None
        self._iterator: Iterator[Any] = iter(())

    def start(self, ahead: int) -> None:
        source, sought = self._source, self._sought
        self._epoch, draws = source.next_pass(sought)
        source.epoch = self._epoch + 1
        if source.hooks:
            several = processes.process_count() > 1 and source.dataset.workers > 1
            if several and self._after is None:
                self._after = np.random.randint(2**31, size=8).tolist()
            source.dataset.on_epoch_begin()
        if sought is not None and sought["own"] is not None:
            source.dataset.set_state(sought["own"])
        order: Sequence[int] = range(self._step, sys.maxsize)
        if source.num_batches is not None:
            order = list(range(source.num_batches))
            if source.shuffle and not draws:
                random.Random(self._epoch).shuffle(order)
            elif source.shuffle:
                if sought is not None:
                    version, numbers, gauss = sought["random"]
                    random.setstate((version, tuple(numbers), gauss))
                self._before = random.getstate()
                random.shuffle(order)
            order = order[self._step :]
            if not order:  # Keras's workers would wait for a first batch without end.
                return
        batches = compat.Reordered(source.dataset, order, self._workers)
        self._adapter = compat.PyDatasetAdapter(batches, source.class_weight)
        self._adapter.on_epoch_begin()
        self._iterator = iter(self._adapter.get_jax_iterator())

    def __next__(self) -> Batch:
        data = next(self._iterator)
        self._step += 1
        return Batch(data, rows_of(data))

    def position(self) -> Position:
        dataset = self._source.dataset
        own = dataset.get_state() if hasattr(dataset, "get_state") else None
        kind, base = type(dataset), keras.utils.PyDataset
        if own is None and (
            kind.on_epoch_end is not base.on_epoch_end
            or kind.on_epoch_begin is not base.on_epoch_begin
        ):
            raise InputError(
                f"{kind.__name__} cannot be resumed: it changes between epochs, in a "
                "way that only it knows.",
                received="a PyDataset with on_epoch_begin or on_epoch_end, and without "
                "get_state.",
                fix="add get_state(self), which returns what they change, and "
                "set_state(self, state).",
            )
        before = self._before and [self._before[0], [*self._before[1]], self._before[2]]
        return {
            "epoch": self._epoch,
            "step": self._step,
            "random": before,
            "after": self._after,
            "own": own,
        }

    def seek(self, position: Position) -> None:
        self._sought, self._step = position, position["step"]
        self._after = position.get("after")

    def close(self, unread: int) -> None:
        if self._adapter is not None:
            compat.stop_workers(self._adapter)
            self._adapter = None
            if self._after is not None:
                np.random.seed(self._after)
                random.seed(str(self._after))
            if self._source.hooks:
                self._source.dataset.on_epoch_end()
