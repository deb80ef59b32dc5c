"""What stands for values on workers: results that are not there yet, and what each
worker has of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from keras_distribute.errors import StructureTypeError
from keras_distribute.scheduling import programs


class RemoteValue:
    """A result that a worker has yet to compute.

    Source: `tf.distribute.experimental.coordinator.RemoteValue`.

    Example:
        >>> result = coordinator.schedule(step, args=(x,))  # doctest: +SKIP
        >>> result.fetch()  # doctest: +SKIP
        array(0.25, dtype=float32)
    """

    def __init__(self, condition: threading.Condition) -> None:
        self._condition = condition
        self._is_set = False
        self._value: Any = None
        self._error: BaseException | None = None
        self._on_read: Callable[[], None] = lambda: None

    def set_value(self, value: Any) -> None:
        """Called with the condition's lock."""
        self._value, self._is_set = value, True

    def set_error(self, error: BaseException) -> None:
        """Called with the condition's lock."""
        self._error, self._is_set = error, True

    def get(self) -> Any:
        """Waits for the result, a structure of `jax.Array`s.

        Raises:
            CancelledError: If another function has failed before.
            Exception: The function's own error.
        """
        with self._condition:
            self._condition.wait_for(lambda: self._is_set)
        self._on_read()
        if self._error is not None:
            raise self._error
        return self._value()

    def fetch(self) -> Any:
        """Waits for the result, a structure of NumPy arrays; otherwise as `get`."""
        return jax.tree.map(
            lambda leaf: np.asarray(leaf) if isinstance(leaf, jax.Array) else leaf,
            self.get(),
        )

    def __repr__(self) -> str:
        state = "waiting" if not self._is_set else "failed" if self._error else "there"
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
        self.values = tuple(map(np.asarray, values))
        forms = {(value.shape, value.dtype) for value in self.values}
        if len(forms) > 1:
            raise StructureTypeError(
                "The values of the workers have one shape and one dtype.",
                received=f"{sorted(map(str, forms))}.",
                fix="pad them to one shape.",
            )

    def of(self, worker: int) -> np.ndarray[Any, Any]:
        """The value of a worker."""
        return self.values[worker % len(self.values)]


class PerWorkerDataset:
    """A dataset on each worker.

    Source: what `ClusterCoordinator.create_per_worker_dataset` of TensorFlow returns.

    Args:
        number: In all tasks.
        pickled: The dataset function.
        element: The first batch, of which the forms are taken.
    """

    def __init__(self, number: int, pickled: Any, element: Any) -> None:
        self.number, self.pickled = number, pickled
        self._leaves, self._structure = jax.tree.flatten(element)
        self._made = 0

    def __iter__(self) -> PerWorkerIterator:
        return PerWorkerIterator(self)

    def forms(self) -> list[programs.Form]:
        """The dtype and the shape of each array of a batch."""
        arrays = map(np.asarray, self._leaves)
        return [(str(jax.dtypes.canonicalize_dtype(a.dtype)), a.shape) for a in arrays]

    def rebuilt(self, arrays: Sequence[Any]) -> Any:
        """A batch of these arrays."""
        return jax.tree.unflatten(self._structure, list(arrays))


class PerWorkerIterator:
    """An iterator over a `PerWorkerDataset` on each worker, made when that first needs
    it, and anew on a worker that comes back.

    `next(iterator)` in a scheduled function is the next batch of the worker that runs
    it.

    Args:
        dataset: What it is over.
    """

    def __init__(self, dataset: PerWorkerDataset) -> None:
        self.dataset = dataset
        self.number = next(_numbers)

    def __iter__(self) -> PerWorkerIterator:
        return self

    def __next__(self) -> Any:
        return programs.next_element(self)

    def get_next(self) -> Any:
        """The next batch, as TensorFlow calls it."""
        return next(self)

    def forms(self) -> list[programs.Form]:
        """The dtype and the shape of each array of a batch."""
        return self.dataset.forms()

    def rebuilt(self, arrays: Sequence[Any]) -> Any:
        """A batch of these arrays."""
        return self.dataset.rebuilt(arrays)


_numbers = programs.numbers
