"""Readers of several processes that take their steps together. Knows no devices.

Ahead of each step every process tells the others the shapes of its batch, or that it
has none left. A process without data goes on with batches of no rows until all have
ended, so that all take every step.

Where each keeps its rows of the same batches, they only compare how many rows these
have, how they shuffle, and the shapes and dtypes of a row: before the first pass, if
that is known; of each batch, if not even their number is; else of many batches at once.
Of arrays in memory they compare some numbers, too.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from keras_distribute._compat import adapters as compat
from keras_distribute._compat.jax_internals import is_key
from keras_distribute.cluster import agreement, processes
from keras_distribute.errors import InputError
from keras_distribute.input.shares import Layout, RoundLayout, SplitLayout
from keras_distribute.input.source import Batch, Excerpt, Reader
from keras_distribute.input.splitting import piece_sizes
from keras_distribute.values.arrays import on_host

# Shape and dtype of an array, and those of all arrays of a replica's piece.
Spec = tuple[tuple[int, ...], str]
Specs = list[Spec]

# How many batches of a known number are compared at once: to speak with the others
# takes as long as a small step, and there may be many of them.
_COMPARED_AT_ONCE = 16
_ROUNDING = 1e-3  # Up to which numbers of several processes are the same.
# The rows of a batch, and what the arrays of one row are; `None` for no batch.
_Seen = tuple[int, str] | None


class Announcement(NamedTuple):
    """What a process tells the others of its next batch.

    Args:
        specs: For each replica of the process the shapes and dtypes of its piece.
        structure: The structure of a piece, with zeros for leaves; keys of random
            numbers without rows, which a shape and a dtype do not make.
    """

    specs: list[Specs]
    structure: Any


class AgreedLayout:
    """The layout of one process, whose steps all processes take together."""

    def __init__(self, layout: Layout, num_processes: int) -> None:
        self._layout, self._num_processes = layout, num_processes
        self.source, self.sample = layout.source, layout.sample
        self.grouped, self.whole = layout.grouped, layout.whole
        self._in_rounds = isinstance(layout, RoundLayout)
        self._same_batches = isinstance(layout, SplitLayout)
        rows, known = self.source.num_rows, None
        if rows is not None:
            form = _form_of_row(self.source.example)
            known = (self.source.batch_size, rows, form)
        own = (self._same_batches, layout.num_steps, known, self.source.order)
        said = (own, self.source.excerpts if self._same_batches else [])
        of_all = agreement.exchange(self.topic("its length"), said, num_processes)
        told = [each for each, _ in of_all]
        self._check_shared_alike([same for same, *_ in told])
        counts = [count for _, count, *_ in told if count is not None]
        # The steps of one pass, which ends when the last process has no data left.
        self.num_steps = max(counts) if len(counts) == num_processes else None
        if self._same_batches and len(set(told)) > 1:
            forms = {known[2] for _, _, known, _ in told if known is not None}
            found = [_in_words(*each, of_rows=len(forms) > 1) for _, *each, _ in told]
            orders = [order for *_, order in told]
            if len(set(orders)) > 1:
                pairs = zip(found, orders, strict=True)
                found = [f"{text}, {order}" for text, order in pairs]
            raise self.different("a dataset", found)
        found = _other_numbers([excerpts for _, excerpts in of_all])
        if found:
            raise self.different("arrays", found)

    def open(self) -> Reader:
        """A pass that yields one batch for each step."""
        return _AgreedReader(self)

    def peek(self) -> Batch:
        """The batch of the first step; of a process that has none, one without rows."""
        try:
            batch = self._layout.peek()
        except StopIteration:
            batch = None
        announced = agreement.exchange(
            self.topic("the first batch"), self.announce(batch), self._num_processes
        )
        first = next((each for each in announced if each is not None), None)
        if first is None:
            raise StopIteration
        return self.without_rows(first) if batch is None else batch

    def announce(self, batch: Batch | None) -> Announcement | None:
        """What this process tells the others of a batch; `None` for none.

        Raises:
            InputError: For sparse arrays.
        """
        if batch is None:
            return None
        pieces = batch.data if self._in_rounds else [batch.data]
        if any(compat.is_sparse(leaf) for piece in pieces for leaf in _leaves(piece)):
            raise InputError(
                "Sparse tensors cannot be shared by several processes.",
                received=f"a batch of {self.source.kind}.",
                fix="tf.sparse.to_dense in the pipeline.",
            )
        structure = jax.tree.map(_stand_in, pieces[0])
        return Announcement([_specs(piece) for piece in pieces], structure)

    def without_rows(self, announced: Announcement) -> Batch:
        """A batch without rows, like the one that another process has announced."""
        specs = _with_rows(announced.specs[0], 0)
        leaves = [
            leaf if is_key(leaf) else np.zeros(shape, dtype)
            for leaf, (shape, dtype) in zip(
                jax.tree.leaves(announced.structure), specs, strict=True
            )
        ]
        piece = jax.tree.unflatten(jax.tree.structure(announced.structure), leaves)
        return Batch([piece] * len(announced.specs) if self._in_rounds else piece, 0)

    def topic(self, what: str) -> str:
        """What is agreed on, for the others to compare."""
        return f"{what} ({self.source.kind})"

    def _check_shared_alike(self, same: Sequence[bool]) -> None:
        """Raises where only some processes keep their rows of the same batches."""
        if len(set(same)) > 1:
            ways = {True: "its rows of each batch", False: "a dataset of its own"}
            listed = "; ".join(f"process {i}: {ways[s]}" for i, s in enumerate(same))
            raise InputError(
                "The processes share a dataset in different ways.",
                received=f"{listed}.",
                fix="the same auto_shard_policy in every process.",
            )

    def different(self, what: str, found: Sequence[str]) -> InputError:
        """The error for processes that should read the same, and do not."""
        listed = "; ".join(f"process {i}: {text}" for i, text in enumerate(found))
        return InputError(
            f"The processes read {what} of their own, but each is to keep its rows of "
            "the same batches.",
            received=f"{listed}.",
            fix="read the same data in every process, in the same order, or "
            "kd.InputOptions(auto_shard_policy=kd.AutoShardPolicy.OFF) "
            "for data of its own in each.",
        )


class _AgreedReader(Reader):
    def __init__(self, layout: AgreedLayout) -> None:
        self._layout = layout
        self._inner = inner = layout._layout.open()
        self.describe_as(inner)
        self.seek, self.position, self.form = inner.seek, inner.position, inner.form
        self._same = same = layout._same_batches
        self._agrees_once = same and layout.source.num_rows is not None
        self._channel: agreement.Channel | None = None
        # The batches that were compared, and what those are that were not.
        self._num_compared = 0
        self._seen: list[_Seen] = []
        self._ended = False
        # Batches without rows, after the last own one.
        self._num_empty = 0
        # Whether the last own batch was read, but not yet announced.
        self._unannounced = False

    def start(self, ahead: int) -> None:
        self._inner.followed = self.followed
        topic = self._layout.topic("reading")
        self._channel = channel = agreement.Channel(topic, self._layout._num_processes)
        # A shuffle that draws from a global stream has to be the same everywhere.
        if self._same and len(set(channel.exchange(processes.random_streams()))) > 1:
            states = channel.exchange(processes.random_states())
            processes.set_random_states(states[0])
        self._inner.start(ahead)

    def __next__(self) -> Batch:
        if self._agrees_once:
            return next(self._inner)
        batch = None if self._ended else next(self._inner, None)
        self._ended = batch is None
        return self._agree(batch)

    def again(self, batch: Batch) -> Batch:
        return batch if self._agrees_once else self._agree(batch)

    def _agree(self, batch: Batch | None) -> Batch:
        """The batch of the next step; `None` where this process has none left."""
        self._unannounced = batch is not None
        if self._same:
            self._compare(batch)
        else:
            batch = self._announced(batch)
        self._unannounced = False
        if batch is None:
            raise StopIteration
        return batch

    def _compare(self, batch: Batch | None) -> None:
        """Compares the batches of all processes: the first and the last before they are
        used, since most differences are seen there.
        """
        assert self._channel is not None
        own = None if batch is None else (batch.rows, _form_of_row(batch.data))
        self._seen.append(own)
        num_steps, step = self._layout.num_steps, self._num_compared + len(self._seen)
        many = num_steps is not None and len(self._seen) < _COMPARED_AT_ONCE
        if batch is not None and many and step not in (1, num_steps):
            return
        said, self._seen, self._num_compared = self._seen, [], step
        for each in itertools.zip_longest(*self._channel.exchange(said)):
            if len(set(each)) > 1:
                raise self._layout.different("data", _seen_in_words(each))

    def _announced(self, batch: Batch | None) -> Batch | None:
        """The batch with the specs of all processes; `None` where none has one."""
        assert self._channel is not None
        announced = self._channel.exchange(self._layout.announce(batch))
        first = next((each for each in announced if each is not None), None)
        if first is None:
            return None
        specs = self._specs_of_all(first, announced)
        if batch is None:
            batch = self._layout.without_rows(first)
            self._num_empty += 1
        return batch._replace(specs=specs)

    def _specs_of_all(
        self, first: Announcement, announced: list[Announcement | None]
    ) -> list[Specs]:
        """The specs of all replicas; those without data have no rows."""
        empty = [_with_rows(specs, 0) for specs in first.specs]
        specs = [s for each in announced for s in (each.specs if each else empty)]
        kinds = [[(len(shape), dtype) for shape, dtype in each] for each in specs]
        if any(kind != kinds[0] for kind in kinds):
            listed = "; ".join(f"replica {i}: {each}" for i, each in enumerate(specs))
            raise InputError(
                "The elements of all processes have one structure, and one dtype and "
                "rank for each array.",
                received=f"{listed}.",
                fix="yield the same structure in every process.",
            )
        if None in announced and not any(shape for shape, _ in specs[0]):
            raise InputError(
                "A process whose data has ended has no element to go on with.",
                received="elements without rows.",
                fix="batch the dataset: dataset.batch(64).",
            )
        return specs

    def interrupt(self) -> None:
        if self._channel is not None:
            self._channel.give_up()

    def close(self, unread: int) -> None:
        self._inner.close(max(unread - self._num_empty, 0) + self._unannounced)


def agreed(layout: Layout, num_processes: int) -> Layout:
    """A layout whose steps all processes take together; of one process, itself."""
    return layout if num_processes == 1 else AgreedLayout(layout, num_processes)


def replica_rows(batch: Batch, num_replicas: int) -> tuple[int, ...]:
    """The rows of each replica, over all processes."""
    if batch.specs is None:
        return tuple(piece_sizes(batch.rows, num_replicas))
    return tuple(
        next((shape[0] for shape, _ in specs if shape), 0) for specs in batch.specs
    )


def replica_specs(batch: Batch, piece: Any, num_replicas: int) -> list[Specs]:
    """The specs of each replica's piece, over all processes.

    Args:
        batch: The batch of this process.
        piece: The piece of it of one of its replicas.
        num_replicas: The number of replicas of all processes.
    """
    if batch.specs is not None:
        return batch.specs
    specs = _specs(piece)
    return [_with_rows(specs, rows) for rows in piece_sizes(batch.rows, num_replicas)]


def _in_words(
    num_steps: int | None, of: tuple[int, int, str] | None, *, of_rows: bool
) -> str:
    batches = f"{num_steps} batches"
    if of is None:
        return batches
    size, rows, form = of
    return f"{batches} of {size} rows, {rows} in all" + (f", of {form}" * of_rows)


def _other_numbers(of_all: Sequence[Sequence[Excerpt]]) -> list[str]:
    """What each process has in the first place that differs; nothing if none does.

    What every process has computed by itself, as a mean that was subtracted, may differ
    in its last digits.
    """
    for same in zip(*of_all, strict=True):
        numbers = np.stack([each.numbers for each in same])
        most = np.max(np.abs(numbers), initial=0.0, where=np.isfinite(numbers))
        alike = np.isclose(
            numbers, numbers[:1], _ROUNDING, _ROUNDING * most, equal_nan=True
        )
        differing = np.argwhere(~alike.all(axis=0))
        if len(differing):
            row, place = differing[0]
            where = f"in row {same[0].rows[row]} of the array{same[0].name}"
            return [f"{_plain(each[row, place])} {where}" for each in numbers]
    return []


def _plain(number: complex) -> str:
    return f"{number:.6g}" if number.imag else f"{number.real:.6g}"


def _seen_in_words(batches: Sequence[_Seen]) -> list[str]:
    """The batches of one step, of which one differs from another."""
    of_rows = len({form for _, form in filter(None, batches)}) > 1
    return [
        "nothing left"
        if each is None
        else f"a batch of {each[0]} rows" + f" of {each[1]}" * of_rows
        for each in batches
    ]


def _form_of_row(data: Any) -> str:
    """The shapes and dtypes of one row of a batch, as devices have them."""

    def form(path: Any, leaf: Any) -> str:
        dtype = leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype
        if getattr(dtype, "kind", "O") not in "OSUMm":
            dtype = jax.dtypes.canonicalize_dtype(dtype)
        shape = np.shape(leaf)
        return f"{jax.tree_util.keystr(path)} {dtype}{list(shape[1:]) if shape else ''}"

    leaves = jax.tree_util.tree_leaves_with_path(data, is_leaf=compat.is_sparse)
    return ", ".join(form(path, leaf).strip() for path, leaf in leaves)


def _specs(piece: Any) -> Specs:
    return [
        (tuple(np.shape(leaf)), _name_of(on_host(leaf).dtype))
        for leaf in _leaves(piece)
    ]


def _stand_in(leaf: Any) -> Any:
    """What a process tells the others of an array, beside its shape and dtype."""
    if not is_key(leaf):
        return 0
    return leaf[:0] if leaf.ndim else leaf


def _name_of(dtype: Any) -> str:
    """The dtype; of text without its length, which may be another elsewhere."""
    return dtype.kind if getattr(dtype, "kind", "") in {*"SU"} else str(dtype)


def _with_rows(specs: Specs, rows: int) -> Specs:
    return [((rows, *shape[1:]) if shape else (), dtype) for shape, dtype in specs]


def _leaves(structure: Any) -> list[Any]:
    return jax.tree.leaves(structure, is_leaf=compat.is_sparse)
