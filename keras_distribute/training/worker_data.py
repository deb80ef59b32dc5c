"""Data of `fit` and `evaluate` that workers read themselves: an adapter whose batches
are iterators, which stand for the next batch of whichever worker runs the step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from keras_distribute import context
from keras_distribute._compat import adapters as compat
from keras_distribute.errors import ContextError, InputError
from keras_distribute.input.creator import DatasetCreator, batches_of
from keras_distribute.input.options import InputContext, InputOptions
from keras_distribute.input.source import Batch, Position, Reader

if TYPE_CHECKING:
    from keras_distribute.scheduling.values import PerWorkerDataset, PerWorkerIterator


class WorkerDataAdapter(compat.DataAdapter):
    """A `DatasetCreator` as the `x` of `fit` and `evaluate` on workers.

    Args:
        method: Of the model: `"fit"`, ...

    Raises:
        ContextError: For what cannot be done with data of the workers.
        InputError: For a dataset without a batch, or one that cannot be pickled.
    """

    def __init__(self, creator: DatasetCreator, strategy: Any, method: str) -> None:
        # Few programs have workers; the others start without what this imports.
        from keras_distribute.coordinator import ClusterCoordinator

        _check(creator, method)
        made = functools.partial(
            _batches, creator.dataset_fn, len(strategy.cluster.workers)
        )
        coordinator = ClusterCoordinator(strategy)
        self._dataset: PerWorkerDataset = coordinator.create_per_worker_dataset(made)

    def look(self) -> Any:
        """A batch of the form that the workers read."""
        return self._dataset.example()

    def open(self) -> Reader:
        """A new pass, for which each worker makes the dataset."""
        return _Turns(iter(self._dataset))

    @property
    def num_batches(self) -> int | None:
        return None

    @property
    def batch_size(self) -> int | None:
        return None


class _Turns(Reader):
    """Whose batch is next: that of the worker that runs the step.

    Its position is nothing: who goes on from one lets the workers make their datasets
    again, as after a worker has died.
    """

    kind = "a DatasetCreator"

    def __init__(self, iterator: PerWorkerIterator) -> None:
        self._iterator = iterator

    def __next__(self) -> Batch:
        return Batch(self._iterator, 0)

    def position(self) -> Position:
        return {}


def check_steps(creator: DatasetCreator, steps: int | None) -> None:
    """Raises `InputError` unless the number of steps is known."""
    if steps is None:
        raise InputError(
            "How many steps to take of a DatasetCreator is not known: its datasets may "
            "have no end.",
            received=f"{creator!r}, and no number of steps.",
            fix="model.fit(creator, steps_per_epoch=100), with validation_steps=10 for "
            "one as validation_data; model.evaluate(creator, steps=10)",
        )


def _check(creator: DatasetCreator, method: str) -> None:
    if method == "predict":
        raise ContextError(
            "predict returns rows in the order of the data, and rows that several "
            "workers read have none.",
            received=f"model.predict({creator!r}).",
            fix="model.predict(dataset), whose batches travel to the workers.",
        )
    if creator.input_options not in (None, InputOptions()):
        raise InputError(
            "A worker takes each batch of its dataset as it is: no options apply.",
            received=f"{creator.input_options!r}.",
            fix="kd.experimental.DatasetCreator(dataset_fn)",
        )


def _batches(dataset_fn: Callable[[InputContext], Any], workers: int) -> Iterator[Any]:
    """What a worker reads; runs there."""
    worker, count = context.current_worker() or 0, 0
    for batch in batches_of(dataset_fn(InputContext(workers, worker))):
        yield batch
        count += 1
    raise InputError(
        f"The dataset of the worker {worker} has ended after {count} batch(es), and "
        "steps are left.",
        received=f"what {dataset_fn!r} has made.",
        fix="let it repeat: dataset.repeat() in dataset_fn.",
    )
