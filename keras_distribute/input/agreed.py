"""Readers of several processes that take their steps together. Knows no devices.

Ahead of each step every process tells the others the form of its batch, or that it has
none left. One without goes on with batches without rows until all have ended, so that
every step is taken by all. Where the processes keep their rows of the same batches, and
all know how many these are, they agree once for each pass instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from keras_distribute._compat import adapters as compat
from keras_distribute.cluster import agreement, processes
from keras_distribute.errors import InputError
from keras_distribute.input.layouts import Layout, RoundLayout, SplitLayout
from keras_distribute.input.source import Batch, Reader, Source
from keras_distribute.input.splitting import piece_sizes

Leaf = tuple[tuple[int, ...], str]


class Said(NamedTuple):
    """What a process says of its next batch: its rows, the forms of the leaves of each
    replica, and their structure.
    """

    rows: int
    forms: list[list[Leaf]]
    structure: Any


class AgreedLayout:
    """A layout whose steps are taken by several processes together.

    Args:
        layout: Of this process.
        num_processes: How many take part.
        process: The number of this one.
    """

    def __init__(self, layout: Layout, num_processes: int, process: int) -> None:
        self._layout, self._num_processes, self._process = (
            layout,
            num_processes,
            process,
        )
        counts = agreement.exchange(
            self.topic("its length"), layout.num_steps, num_processes
        )
        known = [count for count in counts if count is not None]
        self._num_steps = max(known) if len(known) == num_processes else None
        self._same_batches = isinstance(layout, SplitLayout)
        if self._same_batches and len(set(counts)) > 1:
            raise self.different("a dataset", [f"{count} batches" for count in counts])

    @property
    def source(self) -> Source:
        """Where the batches of this process come from."""
        return self._layout.source

    @property
    def num_steps(self) -> int | None:
        """The steps of one pass, which end when the last process has no data left;
        `None` where unknown.
        """
        return self._num_steps

    def open(self) -> Reader:
        """A pass that yields one batch for each step."""
        return _AgreedReader(self)

    def peek(self) -> Batch:
        """The batch of the first step; of a process that has none, one without rows."""
        try:
            batch = self._layout.peek()
        except StopIteration:
            batch = None
        said = agreement.exchange(
            self.topic("the first batch"),
            None if batch is None else self.said_of(batch),
            self._num_processes,
        )
        given = next((one for one in said if one is not None), None)
        if given is None:
            raise StopIteration
        return self.without_rows(given) if batch is None else batch

    def said_of(self, batch: Batch) -> Said:
        """What this process says of a batch.

        Raises:
            InputError: For sparse arrays.
        """
        parts = batch.data if isinstance(self._layout, RoundLayout) else [batch.data]
        leaves = [_leaves(part) for part in parts]
        if any(compat.is_sparse(leaf) for part in leaves for leaf in part):
            raise InputError(
                "Sparse tensors cannot be shared by several processes.",
                received=f"a batch of {self.source.kind}.",
                fix="tf.sparse.to_dense in the pipeline.",
            )
        forms = [
            [(tuple(np.shape(leaf)), str(np.asarray(leaf).dtype)) for leaf in part]
            for part in leaves
        ]
        return Said(batch.rows, forms, jax.tree.map(lambda _: 0, parts[0]))

    def without_rows(self, given: Said) -> Batch:
        """A batch without rows, of the form that another process has given."""
        leaves = [
            np.zeros((0, *shape[1:]) if shape else (), dtype)
            for shape, dtype in given.forms[0]
        ]
        nothing = jax.tree.unflatten(jax.tree.structure(given.structure), leaves)
        return Batch(
            [nothing] * len(given.forms)
            if isinstance(self._layout, RoundLayout)
            else nothing,
            0,
        )

    def pieces(self, batch: Batch) -> list[Any]:
        """The structure of each replica of this process."""
        return self._layout.pieces(batch)

    def whole(self, batch: Batch) -> Any:
        """The rows of all replicas of this process, in one structure."""
        return self._layout.whole(batch)

    def topic(self, what: str) -> str:
        """What is agreed on, for the others to compare."""
        return f"{what} ({self._layout.source.kind})"

    def different(self, what: str, said: Sequence[str]) -> InputError:
        """The error for processes that should read the same, and do not."""
        return InputError(
            f"The processes read {what} of their own, but each is to keep its rows of "
            "the same batches.",
            received="; ".join(f"process {i}: {text}" for i, text in enumerate(said))
            + ".",
            fix="read the same data in every process, or "
            "kd.InputOptions(auto_shard_policy=kd.AutoShardPolicy.OFF) "
            "for data of its own in each.",
        )


class _AgreedReader(Reader):
    def __init__(self, layout: AgreedLayout) -> None:
        self._layout = layout
        self._inner = inner = layout._layout.open()
        self.kind, self.cheap_position, self.reuses_arrays = (
            inner.kind,
            inner.cheap_position,
            inner.reuses_arrays,
        )
        self.seek, self.position, self.form = inner.seek, inner.position, inner.form
        self._once = layout._same_batches and layout.num_steps is not None
        self._channel: agreement.Channel | None = None
        self._ended = False
        self._num_empty = 0  # Batches without rows, after the last own one.
        self._untold = False  # Whether the last own batch was read, but the others do not know of it.

    def start(self, ahead: int) -> None:
        self._inner.followed = self.followed
        self._channel = agreement.Channel(
            self._layout.topic("reading"), self._layout._num_processes
        )
        stream = processes.numpy_stream()
        if (
            len(set(self._channel.exchange(stream))) > 1
        ):  # A shuffle that draws from it is the same everywhere.
            processes.set_numpy_stream(
                self._channel.exchange(processes.numpy_state())[0]
            )
        self._inner.start(ahead)

    def __next__(self) -> Batch:
        if self._once:
            return next(self._inner)
        batch = None if self._ended else next(self._inner, None)
        self._ended = batch is None
        return self._together(batch)

    def again(self, batch: Batch) -> Batch:
        return batch if self._once else self._together(batch)

    def _together(self, batch: Batch | None) -> Batch:
        assert self._channel is not None
        self._untold = batch is not None
        said = self._channel.exchange(
            None if batch is None else self._layout.said_of(batch)
        )
        self._untold = False
        given = [one for one in said if one is not None]
        if not given:
            raise StopIteration
        if self._layout._same_batches:
            return self._same(batch, said)
        forms = self._forms_of_all(said)
        if batch is None:
            batch = self._layout.without_rows(given[0])
            self._num_empty += 1
        return batch._replace(forms=forms)

    def _same(self, batch: Batch | None, said: list[Said | None]) -> Batch:
        rows = [None if one is None else one.rows for one in said]
        if batch is None or len(set(rows)) > 1:
            raise self._layout.different(
                "data",
                [
                    "nothing left" if count is None else f"a batch of {count} rows"
                    for count in rows
                ],
            )
        return batch

    def _forms_of_all(self, said: list[Said | None]) -> list[list[Leaf]]:
        """The forms of the leaves of all replicas; those without data have no rows."""
        given = next(one for one in said if one is not None)
        empty = [
            [((0, *shape[1:]) if shape else (), dtype) for shape, dtype in part]
            for part in given.forms
        ]
        forms = [part for one in said for part in (empty if one is None else one.forms)]
        kinds = [[(len(shape), dtype) for shape, dtype in part] for part in forms]
        if any(kind != kinds[0] for kind in kinds):
            raise InputError(
                "The elements of all processes have one structure, and one dtype and "
                "rank for each array.",
                received="; ".join(
                    f"replica {i}: {part}" for i, part in enumerate(forms)
                )
                + ".",
                fix="yield the same structure in every process.",
            )
        if any(one is None for one in said) and not any(shape for shape, _ in forms[0]):
            raise InputError(
                "A process whose data are over has no element to go on with.",
                received="elements without rows.",
                fix="batch the dataset: dataset.batch(64).",
            )
        return forms

    def interrupt(self) -> None:
        if self._channel is not None:
            self._channel.give_up()

    def close(self, unread: int) -> None:
        self._inner.close(max(unread - self._num_empty, 0) + self._untold)


def agreed(layout: Layout, num_processes: int, process: int) -> Layout:
    """The layout itself for one process, else one whose steps all processes take
    together.
    """
    return (
        layout if num_processes == 1 else AgreedLayout(layout, num_processes, process)
    )


def sizes_of(batch: Batch, num_replicas: int) -> tuple[int, ...]:
    """The rows of each replica, over all processes."""
    if batch.forms is None:
        return tuple(piece_sizes(batch.rows, num_replicas))
    return tuple(
        next((shape[0] for shape, _ in part if shape), 0) for part in batch.forms
    )


def forms_of(batch: Batch, piece: Any, num_replicas: int) -> list[list[Leaf]]:
    """The forms of the leaves of each replica's piece, over all processes.

    Args:
        batch: That was cut.
        piece: That of a replica of this process.
        num_replicas: Of all processes.
    """
    if batch.forms is not None:
        return batch.forms
    leaves = [
        (tuple(np.shape(leaf)), str(np.asarray(leaf).dtype)) for leaf in _leaves(piece)
    ]
    return [
        [((rows, *shape[1:]) if shape else (), dtype) for shape, dtype in leaves]
        for rows in piece_sizes(batch.rows, num_replicas)
    ]


def _leaves(structure: Any) -> list[Any]:
    return jax.tree.leaves(structure, is_leaf=compat.is_sparse)
