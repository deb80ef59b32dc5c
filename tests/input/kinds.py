"""The same examples as each kind of dataset that can be distributed, so that one test
covers them all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np

import keras_distribute as kd


def examples(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """`rows` examples: the number of each, and two features that follow from it."""
    ids = np.arange(rows, dtype=np.int32)
    return ids, np.stack([ids * 0.5, -ids], 1).astype(np.float32)


class Batches(keras.utils.PyDataset):
    """A `PyDataset` whose batches depend on their index alone."""

    def __init__(
        self, data: Any, batch_size: int, drop: bool, order: np.ndarray, **options: Any
    ) -> None:
        super().__init__(**options)
        self.data, self.batch_size, self.order = data, batch_size, order
        self.count = len(order) // batch_size if drop else -(-len(order) // batch_size)

    @property
    def num_batches(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        rows = self.order[index * self.batch_size : (index + 1) * self.batch_size]
        return tuple(array[rows] for array in self.data)


def order_of(rows: int, shuffle: bool, repeat: int) -> np.ndarray:
    """The order of the examples for the kinds that leave it to the user."""
    passes = [
        np.random.RandomState(7 + i).permutation(rows) if shuffle else np.arange(rows)
        for i in range(repeat)
    ]
    return np.concatenate(passes) if passes else np.arange(0)


def arrays(rows: int, batch: int, shuffle: bool, repeat: int, drop: bool) -> Any:
    ids, features = examples(rows)
    order = np.tile(np.arange(rows), repeat)
    return kd.ArrayDataset(
        (ids[order], features[order]),
        batch,
        shuffle=shuffle,
        seed=3,
        drop_remainder=drop,
    )


def tf_data(rows: int, batch: int, shuffle: bool, repeat: int, drop: bool) -> Any:
    import tensorflow as tf

    dataset = tf.data.Dataset.from_tensor_slices(examples(rows))
    dataset = dataset.shuffle(max(rows, 1), seed=5) if shuffle else dataset
    return dataset.repeat(repeat).batch(batch, drop_remainder=drop).prefetch(1)


def grain_examples(rows: int, shuffle: bool, repeat: int) -> Any:
    import grain

    ids, features = examples(rows)
    dataset = grain.MapDataset.source(range(rows)).seed(1)
    dataset = (dataset.shuffle() if shuffle else dataset).repeat(repeat)
    return dataset.map(lambda i: (ids[i], features[i]))


def grain_map(rows: int, batch: int, shuffle: bool, repeat: int, drop: bool) -> Any:
    dataset = grain_examples(rows, shuffle, repeat)
    return dataset.batch(batch, drop_remainder=drop)


def grain_iter(rows: int, batch: int, shuffle: bool, repeat: int, drop: bool) -> Any:
    dataset = grain_examples(rows, shuffle, repeat).to_iter_dataset()
    return dataset.batch(batch, drop_remainder=drop)


def grain_loader(rows: int, batch: int, shuffle: bool, repeat: int, drop: bool) -> Any:
    import grain

    ids, features = examples(rows)

    class Look(grain.transforms.Map):
        def map(self, i: int) -> Any:
            return ids[i], features[i]

    sampler = grain.samplers.IndexSampler(
        rows, shuffle=shuffle, seed=1, num_epochs=repeat
    )
    return grain.DataLoader(
        data_source=range(rows),
        sampler=sampler,
        operations=[Look(), grain.transforms.Batch(batch, drop)],
    )


def py_dataset(rows: int, batch: int, shuffle: bool, repeat: int, drop: bool) -> Any:
    return Batches(examples(rows), batch, drop, order_of(rows, shuffle, repeat))


def py_workers(rows: int, batch: int, shuffle: bool, repeat: int, drop: bool) -> Any:
    return Batches(
        examples(rows), batch, drop, order_of(rows, shuffle, repeat), workers=2
    )


def torch_loader(rows: int, batch: int, shuffle: bool, repeat: int, drop: bool) -> Any:
    import torch
    from torch.utils import data

    ids, features = (torch.from_numpy(array) for array in examples(rows))
    order = list(np.tile(np.arange(rows), repeat))
    dataset = data.TensorDataset(ids[order], features[order])
    generator = torch.Generator().manual_seed(2)
    return data.DataLoader(
        dataset,
        batch,
        shuffle=shuffle and len(order) > 0,
        generator=generator,
        drop_last=drop,
    )


def generator(
    rows: int, batch: int, shuffle: bool, repeat: int, drop: bool
) -> Iterator[Any]:
    dataset = py_dataset(rows, batch, shuffle, repeat, drop)
    return (dataset[i] for i in range(dataset.num_batches))


def reusing_generator(
    rows: int, batch: int, shuffle: bool, repeat: int, drop: bool
) -> Iterator[Any]:
    """One that fills the same arrays again and again, as careful pipelines do."""
    dataset = py_dataset(rows, batch, shuffle, repeat, drop)
    buffers = tuple(
        np.zeros((batch, *array.shape[1:]), array.dtype) for array in dataset.data
    )

    def batches() -> Iterator[Any]:
        for i in range(dataset.num_batches):
            arrays = dataset[i]
            for buffer, array in zip(buffers, arrays, strict=True):
                buffer[: len(array)] = array
            yield tuple(
                buffer[: len(array)]
                for buffer, array in zip(buffers, arrays, strict=True)
            )
            for buffer in buffers:
                buffer[:] = -1

    return batches()


KINDS: dict[str, Callable[..., Any]] = {
    "arrays": arrays,
    "tf.data": tf_data,
    "Grain MapDataset": grain_map,
    "Grain IterDataset": grain_iter,
    "Grain DataLoader": grain_loader,
    "PyDataset": py_dataset,
    "PyDataset with workers": py_workers,
    "torch DataLoader": torch_loader,
    "generator": generator,
    "reusing generator": reusing_generator,
}
RESUMABLE = [kind for kind in KINDS if "generator" not in kind and "torch" not in kind]
EMPTY_IS_AN_ERROR = ("Grain IterDataset", "Grain DataLoader", "Grain MapDataset")
