"""torch `DataLoader`s, of which each process loads only its own examples."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from keras_distribute.errors import InputError
from keras_distribute.input.source import (
    Batch,
    IteratorReader,
    Part,
    Position,
    Reader,
    Source,
)


class TorchSource(Source):
    """A torch `DataLoader`; one with `state_dict`, as torchdata's `StatefulDataLoader`,
    has positions.

    Args:
        part: Which rows of each batch to load; `None` for all.
    """

    kind = "torch DataLoader"

    def __init__(self, loader: Any, part: Part | None = None) -> None:
        self._loader, self._part = loader, part

    @property
    def num_batches(self) -> int | None:
        return len(self._loader) if hasattr(self._loader.dataset, "__len__") else None

    @property
    def batch_size(self) -> int | None:
        size = self._loader.batch_size
        sampler = self._loader.batch_sampler
        return getattr(sampler, "batch_size", None) if size is None else size

    @property
    def example(self) -> Any:
        if self._loader.batch_sampler is None:
            return super().example
        try:
            first = self._loader.dataset[0]
        except (IndexError, KeyError):  # None, or not numbered.
            return super().example
        return _to_host(self._loader.collate_fn([first]))

    def open(self) -> Reader:
        if self._part is None:
            return _TorchReader(self._loader)
        return _PartReader(self._loader, self._part, self)

    def only_rows(self, part: Part) -> Source:
        if self._loader.batch_sampler is None:
            return super().only_rows(part)
        sampler = self._loader.sampler
        if type(sampler).__name__ == "RandomSampler" and sampler.generator is None:
            raise InputError(
                "Each process would shuffle this DataLoader in another order.",
                received="shuffle=True without a generator.",
                fix="DataLoader(..., shuffle=True, "
                "generator=torch.Generator().manual_seed(7)), one seed for all.",
            )
        return TorchSource(self._loader, part)


class _TorchReader(IteratorReader):
    why_no_position = "torch's own DataLoader has no position."
    fix_no_position = (
        "torchdata.stateful_dataloader.StatefulDataLoader, which takes the same "
        "arguments."
    )

    def __init__(self, loader: Any) -> None:
        super().__init__("torch DataLoader", lambda: map(_to_host, loader))
        self.reuses_arrays = False
        self._loader = loader

    def position(self) -> Position:
        if not hasattr(self._loader, "state_dict"):
            return super().position()
        return {"state": self._loader.state_dict()}

    def seek(self, position: Position) -> None:
        if not hasattr(self._loader, "load_state_dict"):
            super().seek(position)
        self._loader.load_state_dict(position["state"])


class _PartReader(IteratorReader):
    """Loads this process's examples of each batch; there may be none."""

    why_no_position = _TorchReader.why_no_position
    fix_no_position = "keras.utils.PyDataset, Grain or tf.data."

    def __init__(self, loader: Any, part: Part, source: Source) -> None:
        self._sampler = _PartOfBatches(loader.batch_sampler, part)
        super().__init__(
            "torch DataLoader",
            lambda: map(_to_host, _with_batch_sampler(loader, self._sampler)),
        )
        self._loaded: Any = None
        self._source = source

    def __next__(self) -> Batch:
        drawn = self._sampler.drawn
        if self._loaded is None and not (drawn and drawn[0][1] == 0):
            self._loaded = next(self._iterator, None)
        if not drawn:
            raise StopIteration
        rows, mine = drawn.popleft()
        if mine == 0:
            return Batch(jax.tree.map(lambda a: a[:0], self._source.example), rows)
        data, self._loaded = self._loaded, None
        return Batch(data, rows)


class _PartOfBatches:
    """A batch sampler that keeps a part of each batch of another one.

    `drawn` has the rows of each batch, and how many of them are in the part.
    """

    def __init__(self, whole: Any, part: Part) -> None:
        self._whole, self._part = whole, part
        self.drawn: deque[tuple[int, int]] = deque()

    def __iter__(self) -> Iterator[Any]:
        for indices in self._whole:
            indices = list(indices)
            start, stop = self._part(len(indices))
            self.drawn.append((len(indices), stop - start))
            if stop > start:
                yield indices[start:stop]


def _with_batch_sampler(loader: Any, sampler: Any) -> Any:
    import torch.utils.data

    names = (
        "num_workers collate_fn pin_memory timeout worker_init_fn generator "
        "multiprocessing_context prefetch_factor persistent_workers"
    )
    arguments = {name: getattr(loader, name) for name in names.split()}
    arguments["batch_sampler"] = sampler
    return torch.utils.data.DataLoader(loader.dataset, **arguments)


def _to_host(batch: Any) -> Any:
    """A batch as Keras takes it from a `DataLoader`: of NumPy arrays, not a list."""
    batch = jax.tree.map(
        lambda leaf: np.asarray(leaf.cpu() if hasattr(leaf, "cpu") else leaf),
        batch,
        is_leaf=_is_text,
    )
    return tuple(batch) if isinstance(batch, list) else batch


def _is_text(part: Any) -> bool:
    """Whether it is the texts of a batch, of which torch makes a list of its rows."""
    return (
        isinstance(part, list | tuple)
        and bool(part)
        and all(isinstance(row, str | bytes) for row in part)
    )
