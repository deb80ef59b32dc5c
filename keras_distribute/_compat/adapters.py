"""Keras's data adapters: what `fit` makes of its `x`, and how each kind can be read
from a position.

An adapter gives an iterator from the beginning, and no position. What is needed to
start elsewhere is private: the sliceable arrays, the `PyDataset` inside, the dataset of
each kind, and from Keras 3.16 on the number of the epoch, by which alone an adapter
shuffles (up to 3.15 it draws from the global streams). Goes when adapters have
positions.
"""

# pyright: reportAttributeAccessIssue=false
from __future__ import annotations

import contextlib
import itertools
import operator
import queue
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import keras
import numpy as np
from keras import tree
from keras.src.trainers import data_adapters
from keras.src.trainers.data_adapters import array_slicing, data_adapter_utils
from keras.src.trainers.data_adapters.array_data_adapter import (
    ArrayDataAdapter,
    can_convert_arrays,
)
from keras.src.trainers.data_adapters.data_adapter import DataAdapter
from keras.src.trainers.data_adapters.generator_data_adapter import GeneratorDataAdapter
from keras.src.trainers.data_adapters.grain_dataset_adapter import GrainDatasetAdapter
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter
from keras.src.trainers.data_adapters.tf_dataset_adapter import TFDatasetAdapter
from keras.src.trainers.data_adapters.torch_data_loader_adapter import (
    TorchDataLoaderAdapter,
)

from keras_distribute._compat.jax_internals import is_key
from keras_distribute._compat.seams import Replacements, check

__all__ = [
    "ArrayDataAdapter",
    "DataAdapter",
    "GeneratorDataAdapter",
    "GrainDatasetAdapter",
    "PyDatasetAdapter",
    "TFDatasetAdapter",
    "TorchDataLoaderAdapter",
    "can_convert_arrays",
]

check(ArrayDataAdapter, "_inputs", "_num_samples", "_batch_size", "_shuffle")
check(GeneratorDataAdapter, "_first_batches")
check(GrainDatasetAdapter, "_output_signature")
check(PyDatasetAdapter, "py_dataset", "class_weight", "shuffle", "enqueuer")
if "on_epoch_end" in vars(ArrayDataAdapter):  # It counts epochs, from Keras 3.16 on.
    check(ArrayDataAdapter, "_epoch")
    check(PyDatasetAdapter, "_epoch")
check(TFDatasetAdapter, "_dataset")
check(TorchDataLoaderAdapter, "_dataloader")

Around = Callable[[Callable[..., Any], Any, dict[str, Any]], Any]


def install(replaced: Replacements, around: Around) -> None:
    """Puts `around(original, x, arguments)` around `fit`'s choice of an adapter."""
    original = data_adapters.get_data_adapter

    def get_data_adapter(x: Any, **arguments: Any) -> DataAdapter:
        return around(original, x, arguments)

    replaced.replace(data_adapters, "get_data_adapter", get_data_adapter)


def adapter_of(x: Any, y: Any = None, sample_weight: Any = None) -> DataAdapter:
    """The adapter that Keras would use for what is given to `fit`."""
    return data_adapters.get_data_adapter(x=x, y=y, sample_weight=sample_weight)


def sliceable_arrays(structure: Any) -> Any:
    """The arrays of a structure, of whichever library, to give to `take`."""
    return tree.map_structure(_sliceable_array, structure)


def _sliceable_array(array: Any) -> Any:
    # Keys of random numbers, which Keras would make NumPy's.
    if is_key(array):
        return array_slicing.Sliceable(array)
    return array_slicing.convert_to_sliceable(array, target_backend="jax")


def take(
    sliceables: Any, indices: Any, gather: Callable[..., Any] = operator.getitem
) -> Any:
    """Rows of each array, by a slice or an array of indices, as NumPy arrays, JAX
    sparse ones, and JAX's keys of random numbers.

    Args:
        gather: Takes the rows of a NumPy array by an array of indices.
    """

    def rows(sliceable: Any) -> Any:
        if isinstance(indices, np.ndarray) and type(sliceable.array) is np.ndarray:
            return gather(sliceable.array, indices)
        return sliceable.convert_to_jax_compatible(sliceable[indices])

    return tree.map_structure(rows, sliceables, none_is_leaf=False)


def arrays_of(adapter: Any) -> tuple[Any, int, int, bool | str]:
    """The sliceable arrays of an adapter, their rows, batch size, and shuffling."""
    return (
        sliceable_arrays(adapter._inputs),
        adapter._num_samples,
        adapter._batch_size,
        adapter._shuffle,
    )


def epoch_of(adapter: Any) -> int | None:
    """The epoch by which an adapter shuffles next; `None`: from the global streams."""
    return getattr(_counting(adapter), "_epoch", None)


def set_epoch(adapter: Any, epoch: int | None) -> None:
    """Makes an adapter that counts its epochs go on with one of them."""
    if epoch is not None and epoch_of(adapter) is not None:
        _counting(adapter)._epoch = epoch


def epochs_of(adapter: Any) -> Callable[[], int | None]:
    """`epoch_of`, for a source that its adapter holds."""
    held = weakref.ref(adapter)
    return lambda: epoch_of(held())


def _counting(adapter: Any) -> Any:
    """The adapter of Keras itself, where ours stands for it."""
    return getattr(adapter, "original", adapter)


def tf_dataset_of(adapter: Any) -> Any:
    """The `tf.data.Dataset` of an adapter, with class weights."""
    return adapter._dataset


def tf_to_host(batch: Any) -> Any:
    """A `tf.data` element as NumPy arrays and JAX sparse ones."""
    return tree.map_structure(_tf_leaf_to_host, batch, none_is_leaf=False)


def _tf_leaf_to_host(leaf: Any) -> Any:
    # By far the most, and Keras's way to it is slow: 20 microseconds each. NumPy looks
    # at TensorFlow's memory, which nobody changes: `leaf.numpy()` would copy it, which
    # takes 20 ms for 64 images of 224 x 224.
    if type(leaf).__name__ == "EagerTensor":
        return np.asarray(leaf) if leaf.ndim else leaf.numpy()
    if data_adapter_utils.is_tensorflow_sparse(leaf):
        return data_adapter_utils.tf_sparse_to_jax_sparse(leaf)
    return np.asarray(leaf.to_tensor() if hasattr(leaf, "to_tensor") else leaf)


def grain_dataset_of(adapter: Any) -> Any:
    """The Grain dataset or loader of an adapter, whose elements are ready for JAX."""
    return adapter.get_jax_iterator()


def grain_example(adapter: Any) -> Any:
    """A structure like an element's, of symbolic tensors."""
    return adapter._output_signature


def torch_loader_of(adapter: Any) -> Any:
    """The torch `DataLoader` of an adapter."""
    return adapter._dataloader


def py_dataset_of(adapter: Any) -> tuple[Any, Any, bool]:
    """The `PyDataset` of an adapter, its class weights, and whether it is shuffled."""
    return adapter.py_dataset, adapter.class_weight, bool(adapter.shuffle)


def leave_reading_to_us(adapter: Any) -> None:
    """Keeps the workers of an adapter from reading what nobody will take."""
    if isinstance(adapter, PyDatasetAdapter):
        adapter.enqueuer = None


class Reordered(keras.utils.PyDataset):
    """Some batches of another `PyDataset`, in an order of their own, read by its
    workers, or by so many.
    """

    def __init__(self, inner: Any, order: Sequence[int], workers: int | None) -> None:
        super().__init__(
            workers=inner.workers if workers is None else workers,
            use_multiprocessing=inner.use_multiprocessing and workers is None,
            max_queue_size=inner.max_queue_size,
        )
        self._inner, self._order = inner, order

    def __getitem__(self, index: int) -> Any:
        return self._inner[self._order[index]]

    @property
    def num_batches(self) -> int | None:  # pyright: ignore[reportIncompatibleMethodOverride, reportIncompatibleVariableOverride]
        return None if self._inner.num_batches is None else len(self._order)


def stop_workers(adapter: Any) -> None:
    """Ends the workers of an adapter. A batch that nobody asked for cannot fail."""
    workers = adapter.enqueuer
    if workers is None:
        return
    try:
        workers.stop()
    except Exception:
        with contextlib.suppress(queue.Empty):
            while True:
                workers.future_queue.get_nowait()


def generator_batches(batches: Iterator[Any]) -> Iterator[Any]:
    """The batches of a generator as NumPy, JAX and JAX sparse arrays."""
    return data_adapter_utils.get_jax_iterator(batches)


def generator_of(adapter: Any) -> tuple[list[Any], Callable[[], Iterator[Any]]]:
    """The batches that Keras has looked at, and what iterates over all of them."""
    return adapter._first_batches, adapter.get_jax_iterator


def group_size(steps_per_execution: int) -> int | None:
    """How many batches Keras's function of a step takes at once; `None`: one by one.

    From Keras 3.16 on a function of several steps asks its iterator once, and takes a
    list.
    """
    lists = hasattr(data_adapter_utils, "PartialBatchList")
    return steps_per_execution if lists and steps_per_execution > 1 else None


def next_group(batches: Iterator[Any], size: int) -> Any:
    """The next batches, at most `size`, as Keras's function takes them."""
    first = next(batches)
    others = itertools.islice(batches, size - 1)
    return data_adapter_utils.PartialBatchList([first, *others])


def is_sparse(leaf: Any) -> bool:
    """Whether a leaf of a batch is one of JAX's sparse arrays."""
    return isinstance(leaf, jax.experimental.sparse.JAXSparse)
