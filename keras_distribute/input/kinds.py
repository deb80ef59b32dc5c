"""Which `Source` reads which kind of dataset."""

from __future__ import annotations

import types
from typing import Any

from keras_distribute._compat import adapters as compat
from keras_distribute._compat.tensorflow import is_pipeline
from keras_distribute.errors import InputError
from keras_distribute.input.arrays import ArrayDataset, ArraySource
from keras_distribute.input.generators import GeneratorSource, Stream
from keras_distribute.input.grain_data import GrainSource
from keras_distribute.input.py_datasets import PyDatasetSource
from keras_distribute.input.source import AdapterSource, Source
from keras_distribute.input.tensorflow_data import TensorFlowSource
from keras_distribute.input.torch_data import TorchSource


def source_of(dataset: Any) -> Source:
    """The source of a dataset given to `experimental_distribute_dataset`.

    Raises:
        InputError: For what is no dataset, and for arrays, which have no batch size.
    """
    if isinstance(dataset, ArrayDataset):
        return dataset.source()
    if dataset is not None and compat.can_convert_arrays(dataset):
        raise InputError(
            "Arrays do not say how many rows a batch has.",
            received=f"{type(dataset).__name__}.",
            fix="kd.ArrayDataset((x, y), batch_size=64)",
        )
    if isinstance(dataset, types.GeneratorType):
        return GeneratorSource.of(dataset)
    if dataset is None:
        raise _no_dataset(dataset)
    try:
        return source_of_adapter(compat.adapter_of(dataset))
    except (ValueError, TypeError, AttributeError) as error:
        raise _no_dataset(dataset) from error


def _no_dataset(dataset: Any) -> InputError:
    return InputError(
        "This cannot be distributed as a dataset.",
        received=f"a {type(dataset).__name__}.",
        fix="a tf.data.Dataset, a Grain dataset or loader, a torch DataLoader, a "
        "keras.utils.PyDataset, a generator of tuples, or kd.ArrayDataset((x, y), "
        "batch_size=64).",
    )


def source_of_adapter(
    adapter: Any, stream: Stream | None = None, hooks: bool = True
) -> Source:
    """The source of a Keras data adapter.

    Args:
        stream: What a generator is read through.
        hooks: Whether a pass over a `PyDataset` calls its `on_epoch_begin` and
            `on_epoch_end`.
    """
    if isinstance(adapter, compat.ArrayDataAdapter):
        counted = compat.epochs_of(adapter)
        return ArraySource(*compat.arrays_of(adapter), counted=counted)
    if isinstance(adapter, compat.TFDatasetAdapter):
        dataset = compat.tf_dataset_of(adapter)
        if not is_pipeline(dataset):
            raise _no_dataset(dataset)
        return TensorFlowSource(dataset)
    if isinstance(adapter, compat.GrainDatasetAdapter):
        dataset = compat.grain_dataset_of(adapter)
        example = compat.grain_example(adapter)
        return GrainSource(dataset, adapter.batch_size, example)
    if isinstance(adapter, compat.PyDatasetAdapter):
        counted = compat.epochs_of(adapter)
        return PyDatasetSource(*compat.py_dataset_of(adapter), hooks, counted)
    if isinstance(adapter, compat.TorchDataLoaderAdapter):
        return TorchSource(compat.torch_loader_of(adapter))
    if isinstance(adapter, compat.GeneratorDataAdapter) and stream is not None:
        return GeneratorSource(*compat.generator_of(adapter), stream)
    return AdapterSource(adapter)
