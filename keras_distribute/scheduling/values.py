"""What stands for values on workers: results that are not there yet, and what each
worker has of its own.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any

import jax
import numpy as np

from keras_distribute.errors import InputError, StructureTypeError, ValueStructureError
from keras_distribute.scheduling import traces
from keras_distribute.threads.condition import Condition
from keras_distribute.values.arrays import is_array, is_x64


class RemoteValue:
    """A result that a worker has yet to compute.

    Source: `tf.distribute.experimental.coordinator.RemoteValue`.

    Example:
        >>> result = coordinator.schedule(step, args=(x,))  # doctest: +SKIP
        >>> result.fetch()  # doctest: +SKIP
        array(0.25, dtype=float32)
    """

    def __init__(
        self,
        condition: Condition,
        look: Callable[[bool], None],
        on_read: Callable[[], None],
    ) -> None:
        self._condition, self._look, self._on_read = condition, look, on_read
        self.is_set = False
        self._value: Any = None
        self._error: BaseException | None = None

    def set_value(self, value: Any) -> None:
        """Called with the condition's lock."""
        self._value, self.is_set = value, True

    def set_error(self, error: BaseException) -> None:
        """Called with the condition's lock."""
        self._error, self.is_set = error, True

    def get(self) -> Any:
        """Waits for the result, a structure of `jax.Array`s.

        Raises:
            CancelledError: If another function has failed before.
            Exception: The function's own error.
        """
        self._condition.wait_until(lambda: self.is_set, self._look)
        self._on_read()
        if self._error is not None:
            raise self._error
        return self._value()

    def fetch(self) -> Any:
        """Waits for the result, a structure of NumPy arrays, which are the caller's to
        change; otherwise as `get`.
        """
        return jax.tree.map(
            lambda leaf: np.array(leaf) if isinstance(leaf, jax.Array) else leaf,
            self.get(),
        )

    def __repr__(self) -> str:
        state = "waiting" if not self.is_set else "failed" if self._error else "there"
        return f"<RemoteValue: {state}>"


class PerWorkerValues:
    """One value for each worker: a scheduled function gets its worker's own.

    Source: `tf.distribute.experimental.coordinator.PerWorkerValues`.

    Args:
        values: An array for each worker, of one shape and dtype.

    Raises:
        StructureTypeError: For anything else.
    """

    def __init__(self, values: Sequence[Any]) -> None:
        if not isinstance(values, list | tuple) or not values:
            raise StructureTypeError(
                "PerWorkerValues holds a value for each worker.",
                received=f"{values!r}.",
                fix="PerWorkerValues([value_of_worker_0, value_of_worker_1])",
            )
        # Copies: they are read when their turn comes.
        self.values = tuple(map(np.array, values))
        forms = {(value.shape, value.dtype) for value in self.values}
        if len(forms) > 1:
            raise StructureTypeError(
                "The values of the workers have one shape and one dtype.",
                received=f"{sorted(map(str, forms))}.",
                fix="pad them to one shape.",
            )

    def check_number(self, workers: int) -> None:
        """Raises `ValueStructureError` unless there is one for each worker."""
        if len(self.values) != workers:
            raise ValueStructureError(
                "PerWorkerValues holds a value for each worker.",
                received=f"{len(self.values)} values for {workers} worker(s).",
                fix="PerWorkerValues([...]) of as many values as there are workers.",
            )


@dataclasses.dataclass(frozen=True)
class IteratorArgument:
    """An iterator among the arguments of a function: one of a form is as good as
    another for the program.

    Args:
        index: Among the iterators.
        forms: Of the arrays of a batch.
        structure: Of a batch.
    """

    index: int
    forms: tuple[traces.Form, ...]
    structure: Any

    def __iter__(self) -> IteratorArgument:
        return self

    def __next__(self) -> Any:
        return traces.next_element(self)

    def get_next(self) -> Any:
        """The next batch, as TensorFlow calls it."""
        return next(self)

    def rebuilt(self, arrays: Sequence[Any]) -> Any:
        """A batch of these arrays."""
        return jax.tree.unflatten(self.structure, list(arrays))


def _form(array: Any) -> traces.Form:
    """The form of an array of a batch.

    Raises:
        InputError: For text and objects.
    """
    if not is_array(array):
        raise InputError(
            "A program on workers computes with numbers.",
            received=f"a batch with an array of dtype {array.dtype}.",
            fix="numbers: in the dataset function, text becomes some by "
            "keras.layers.StringLookup or in tf.data.",
        )
    return str(jax.dtypes.canonicalize_dtype(array.dtype)), array.shape


class PerWorkerDataset:
    """A dataset on each worker.

    Source: what `ClusterCoordinator.create_per_worker_dataset` of TensorFlow returns.

    Args:
        pickled: The dataset function.
        element: The first batch, of which the forms are taken.
        numbers: Of what workers have; it takes one, and each of its iterators another.
        arguments: Those of all datasets, by their forms.
        dropped: Takes its number when it is gone, and those of its iterators.
    """

    def __init__(
        self,
        pickled: Any,
        element: Any,
        numbers: Iterator[int],
        arguments: MutableMapping[Any, IteratorArgument],
        dropped: list[int],
    ) -> None:
        self.number, self.pickled = next(numbers), pickled
        self.x64 = is_x64()  # Its batches are those that the coordinator would read.
        self.numbers, self._arguments = numbers, arguments
        leaves, self._structure = jax.tree.flatten(element)
        self._forms = tuple(map(_form, map(np.asarray, leaves)))
        self._dropped = dropped
        weakref.finalize(self, dropped.append, self.number)

    def __iter__(self) -> PerWorkerIterator:
        iterator = PerWorkerIterator(self)
        weakref.finalize(iterator, self._dropped.append, iterator.number)
        return iterator

    def argument(self, index: int) -> IteratorArgument:
        """An iterator of it as an argument of a function; for datasets of one form the
        same object, by which the function's program is found again.
        """
        key = index, self._forms, self._structure
        return self._arguments.setdefault(key, IteratorArgument(*key))

    def example(self) -> Any:
        """A batch of zeros."""
        arrays = [np.zeros(shape, dtype) for dtype, shape in self._forms]
        return jax.tree.unflatten(self._structure, arrays)


class PerWorkerIterator:
    """An iterator over a `PerWorkerDataset` on each worker, made when that first needs
    it, and anew on a worker that comes back.

    `next(iterator)` in a scheduled function is the next batch of the worker that runs
    it; the iterator is one of the function's arguments.

    Args:
        dataset: What it is over.
    """

    def __init__(self, dataset: PerWorkerDataset) -> None:
        self.dataset = dataset
        self.number = next(dataset.numbers)

    def __iter__(self) -> PerWorkerIterator:
        return self

    def __next__(self) -> Any:
        raise traces.not_an_argument()

    def get_next(self) -> Any:
        """The next batch, as TensorFlow calls it."""
        return next(self)
