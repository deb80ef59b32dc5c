"""What a batch of a source is to the replicas: a global batch to split, or one
replica's own.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from keras_distribute._compat import adapters as compat
from keras_distribute.errors import InputError
from keras_distribute.input.source import Batch, Position, Reader, Source, copy_arrays
from keras_distribute.input.splitting import piece_sizes, worker_sizes
from keras_distribute.values import structures
from keras_distribute.values.arrays import on_host

Group = Callable[[Any, list[Any]], Any]


class Layout(Protocol):
    """From the batches of a reader, one a step, to the replicas of this process."""

    @property
    def source(self) -> Source:
        """Where the batches come from."""
        ...

    @property
    def num_steps(self) -> int | None:
        """The steps of one pass; `None` where unknown or infinite."""
        ...

    def open(self) -> Reader:
        """A pass that yields one batch for each step."""
        ...

    def peek(self) -> Batch:
        """The batch of the first step; a later pass begins with it again."""
        ...

    def sample(self, batch: Batch) -> Any:
        """The structure of one replica, with whatever rows."""
        ...

    def grouped(self, batch: Batch, group: Group) -> Any:
        """The structure of what `group` makes of each leaf of `sample`, and of that
        leaf's rows on the replicas of this process.

        Raises:
            InputError: For what cannot be split.
        """
        ...

    def whole(self, batch: Batch) -> Any:
        """The rows of all replicas of this process, in one structure."""
        ...


class SplitLayout:
    """Each batch is a global one, split into pieces for the replicas.

    Args:
        source: Yields global batches.
        num_replicas: The number of replicas of all processes.
        replicas: The index of the first replica of this process, and of the one after
            its last.
    """

    def __init__(
        self, source: Source, num_replicas: int, replicas: tuple[int, int]
    ) -> None:
        self._num_replicas, self._replicas = num_replicas, replicas
        shares = replicas[1] - replicas[0] < num_replicas
        self.source = source.only_rows(self._part) if shares else source

    @property
    def num_steps(self) -> int | None:
        return self.source.num_batches

    def open(self) -> Reader:
        return self.source.open()

    def peek(self) -> Batch:
        return self.source.peek()

    def sample(self, batch: Batch) -> Any:
        return batch.data

    def grouped(self, batch: Batch, group: Group) -> Any:
        _check_splits(batch, several=self._num_replicas > 1)
        sizes = piece_sizes(batch.rows, self._num_replicas)
        first, last = self._replicas
        ends = itertools.accumulate(sizes[first:last], initial=0)
        between = list(itertools.pairwise(ends))

        def split(one: Sequence[Any]) -> Any:
            return group(one[0], [_rows(one[0], *each) for each in between])

        # Keeps the order of keys; jax.tree would sort them.
        return structures.regroup([batch.data], split)

    def whole(self, batch: Batch) -> Any:
        return batch.data

    def _part(self, rows: int) -> tuple[int, int]:
        sizes = piece_sizes(rows, self._num_replicas)
        first, last = self._replicas
        return sum(sizes[:first]), sum(sizes[:last])


class RoundLayout:
    """Each batch is one replica's: consecutive batches of one source, or one of each
    source, make a step.

    Args:
        sources: One source for all replicas of this process, or one for each.
        num_replicas: The number of replicas of this process.
    """

    def __init__(self, sources: Sequence[Source], num_replicas: int) -> None:
        self._sources, self._num_replicas = list(sources), num_replicas

    @property
    def source(self) -> Source:
        return self._sources[0]

    @property
    def num_steps(self) -> int | None:
        counts = [source.num_batches for source in self._sources]
        known = [count for count in counts if count is not None]
        if len(known) < len(counts):
            return None
        return max(known) if len(counts) > 1 else -(-known[0] // self._num_replicas)

    def open(self) -> Reader:
        readers = [source.open() for source in self._sources]
        return _RoundReader(readers, self._num_replicas)

    def peek(self) -> Batch:
        return Batch([self.source.peek().data], 0)

    def sample(self, batch: Batch) -> Any:
        return batch.data[0]

    def grouped(self, batch: Batch, group: Group) -> Any:
        return structures.regroup(batch.data, lambda own: group(own[0], list(own)))

    def whole(self, batch: Batch) -> Any:
        return jax.tree.map(_joined, *batch.data)


class _RoundReader(Reader):
    """A round of batches at a time; replicas for which none are left get no rows."""

    def __init__(self, readers: list[Reader], num_replicas: int) -> None:
        self.describe_as(readers[0])
        self._readers, self._num_replicas = readers, num_replicas
        self._turns = readers if len(readers) > 1 else readers * num_replicas
        # How many batches each reader gave: in each of the last rounds, and in one that
        # failed or was the end.
        self._rounds: deque[Counter[Reader]] = deque()
        self._begun = Counter[Reader]()

    def start(self, ahead: int) -> None:
        self._rounds = deque(maxlen=max(ahead, 1))
        for reader in self._readers:
            reader.start((ahead + 1) * self._num_replicas)

    def __next__(self) -> Batch:
        taken: list[Batch | None] = []
        self._begun = Counter()
        for reader in self._turns:
            batch = next(reader, None)
            self._begun[reader] += batch is not None
            if batch is not None and self.reuses_arrays:
                batch = batch._replace(data=copy_arrays(batch.data))
            taken.append(batch)
        present = [batch for batch in taken if batch is not None]
        if not present:
            raise StopIteration
        for batch in present:
            _check_splits(batch, several=len(present) < len(taken))
        data = [
            _cut(present[0], 0, 0) if batch is None else batch.data for batch in taken
        ]
        self._rounds.append(self._begun)
        self._begun = Counter()
        return Batch(data, sum(batch.rows for batch in present))

    def position(self) -> Position:
        return {"readers": [reader.position() for reader in self._readers]}

    def seek(self, position: Position) -> None:
        for reader, own in zip(self._readers, position["readers"], strict=True):
            reader.seek(own)

    def form(self) -> Any:
        form = self._readers[0].form()
        one = jax.tree.unflatten(form, [0] * form.num_leaves)
        return jax.tree.structure([one] * self._num_replicas)

    def close(self, unread: int) -> None:
        rounds = [*list(self._rounds)[len(self._rounds) - unread :], self._begun]
        for reader in self._readers:
            reader.close(sum(counts[reader] for counts in rounds))


class CutSource(Source):
    """The batches of one worker's own data, cut to what its replicas take in turn.

    Args:
        source: Yields batches of the global size.
        num_workers: The number of workers.
        num_replicas: The number of replicas of each worker.
        worker: Which worker this is, from 0.
    """

    def __init__(
        self, source: Source, num_workers: int, num_replicas: int, worker: int
    ) -> None:
        self._source, self.kind = source, source.kind
        self._worker = (num_workers, num_replicas, worker)

    @property
    def example(self) -> Any:
        return self._source.example

    def open(self) -> Reader:
        return _CutReader(self._source.open(), self._source.batch_size, self._worker)


class _CutReader(Reader):
    def __init__(
        self, inner: Reader, batch_size: int | None, worker: tuple[int, int, int]
    ) -> None:
        self.describe_as(inner)
        self._inner, self._batch_size, self._worker = inner, batch_size, worker
        self._batch: Batch | None = None
        self._ends: list[int] = []
        self._cut = self._skip = 0
        self._before: Position | None = None
        # How many pieces were handed out of each of the last batches.
        self._cuts: deque[int] = deque()
        self.form = inner.form

    def start(self, ahead: int) -> None:
        self._cuts = deque(maxlen=ahead + 1)
        self._inner.start(ahead + 1)

    def __next__(self) -> Batch:
        while self._cut + 1 >= len(self._ends):
            self._before = self._position_before()
            self._batch = next(self._inner)
            _check_splits(self._batch, several=True)
            self._ends = self._ends_in(self._batch.rows)
            self._cut, self._skip = self._skip, 0
            self._cuts.append(0)
        assert self._batch is not None
        start, stop = self._ends[self._cut], self._ends[self._cut + 1]
        self._cut += 1
        self._cuts[-1] += 1
        piece = _cut(self._batch, start, stop)
        return Batch(piece, stop - start)

    def _ends_in(self, rows: int) -> list[int]:
        """Where the pieces of a batch end, after a 0; some are empty. A batch that is
        not full has no more than its rows.
        """
        num_workers, num_replicas, _ = self._worker
        if self._batch_size is None:
            sizes = piece_sizes(rows, num_workers * num_replicas)
        else:
            sizes = worker_sizes(max(self._batch_size, rows), *self._worker)
        ends = list(itertools.accumulate(sizes, initial=0))
        if self._batch_size is not None and rows < self._batch_size:
            ends = [end for end in ends if end < rows] + [rows]
        return ends

    def _position_before(self) -> Position | None:
        # Data without positions raises when `position` is called.
        with contextlib.suppress(InputError):
            return self._inner.position() if self.cheap_position else None
        return None

    def position(self) -> Position:
        if self._before is not None:
            return {"at": self._before, "cut": self._cut}
        at = self._inner.position()
        if self._batch is None or self._cut + 1 >= len(self._ends):
            return {"at": at, "cut": 0}
        arrays = list(map(on_host, jax.tree.leaves(self._batch.data)))
        batch = {"leaves": arrays, "rows": self._batch.rows}
        return {"at": at, "cut": self._cut, "batch": batch}

    def seek(self, position: Position) -> None:
        self._inner.seek(position["at"])
        if "batch" not in position:
            self._skip = position["cut"]
            return
        batch = position["batch"]
        data = jax.tree.unflatten(self._inner.form(), batch["leaves"])
        self._batch = Batch(data, batch["rows"])
        self._ends, self._cut = self._ends_in(batch["rows"]), position["cut"]
        self._cuts.append(0)

    def close(self, unread: int) -> None:
        """Gives back whole batches, and drops the rest of one used in part."""
        whole = 0
        while self._cuts and self._cuts[-1] <= unread:
            unread -= self._cuts.pop()
            whole += 1
        self._inner.close(whole)


def _check_splits(batch: Batch, *, several: bool) -> None:
    """Raises `InputError` for sparse arrays, arrays that do not have the rows of the
    batch, and, for several replicas, an element without rows.
    """
    leaves = jax.tree.leaves(batch.data, is_leaf=compat.is_sparse)
    shapes = [np.shape(leaf) for leaf in leaves]
    rows = {shape[0] for shape in shapes if shape}
    if several and not rows:
        raise InputError(
            "An element without rows cannot be split over the replicas.",
            received=f"an element of {_types(leaves) or 'nothing'}.",
            fix="batch the dataset: dataset.batch(64).",
        )
    if len(rows) > 1:
        raise InputError(
            "The arrays of a batch have different numbers of rows.",
            received=f"shapes {', '.join(map(str, shapes))}.",
            fix="make every array of an element have the batch as its first dimension.",
        )
    if any(compat.is_sparse(leaf) for leaf in leaves):
        raise InputError(
            "A sparse tensor cannot be split over the replicas of a custom loop.",
            received=f"an element with {_types(leaves)}.",
            fix="make it dense in the pipeline (tf.sparse.to_dense), or train with "
            "model.fit.",
        )


def _rows(leaf: Any, start: int, stop: int) -> Any:
    """Rows of an array; a scalar as it is."""
    return leaf[start:stop] if np.ndim(leaf) else leaf


def _cut(batch: Batch, start: int, stop: int) -> Any:
    """The structure of some rows of a batch."""
    return structures.regroup([batch.data], lambda one: _rows(one[0], start, stop))


def _types(leaves: list[Any]) -> str:
    return ", ".join(sorted({type(leaf).__name__ for leaf in leaves}))


def _joined(*parts: Any) -> Any:
    return np.concatenate(parts) if np.ndim(parts[0]) else parts[0]
