"""`DistributedDataset` and its iterator: elements with one component for each replica,
on the devices.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax

from keras_distribute import checks
from keras_distribute._compat import adapters as compat
from keras_distribute.context import require_cross_replica
from keras_distribute.devices.mesh import ReplicaMesh
from keras_distribute.errors import (
    InputError,
    OutOfRangeError,
    StructureTypeError,
    ValueStructureError,
)
from keras_distribute.input.lockstep import Specs, replica_specs
from keras_distribute.input.options import ElementSpec, InputOptions
from keras_distribute.input.prefetch import Feed
from keras_distribute.input.shares import Layout
from keras_distribute.input.source import Batch
from keras_distribute.values import structures
from keras_distribute.values.arrays import is_array, on_host
from keras_distribute.values.per_replica import PerReplica

_FORMAT = 1


class DistributedDataset:
    """A dataset whose elements have one component for each replica.

    Made by `strategy.experimental_distribute_dataset` and
    `strategy.distribute_datasets_from_function`. Iterate over it in a custom loop, once
    for each epoch, or give it to `model.fit`. Source:
    `tf.distribute.DistributedDataset`.

    Example:
        >>> import numpy as np, keras_distribute as kd
        >>> strategy = kd.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> arrays = {"x": np.ones((6, 3)), "y": np.arange(6)}
        >>> data = kd.ArrayDataset(arrays, batch_size=4)
        >>> dataset = strategy.experimental_distribute_dataset(data)
        >>> for batch in dataset:
        ...     total = strategy.run(lambda batch: batch["y"].sum(), args=(batch,))
        ...     print(strategy.reduce("SUM", total, axis=None))
        6
        9
    """

    def __init__(
        self, layout: Layout, mesh: ReplicaMesh, options: InputOptions, how: str
    ) -> None:
        self._layout, self._mesh, self._options, self._how = layout, mesh, options, how
        self._spec: Any = None
        self._seen: Any = None

    def __iter__(self) -> DistributedIterator:
        """A new pass, which is a new epoch: shuffled data comes in another order.

        Raises:
            ContextError: Inside `run`.
        """
        return DistributedIterator(self)

    def __len__(self) -> int:
        """The steps of one pass.

        Raises:
            TypeError: Where that is unknown.
        """
        steps = self._layout.num_steps
        if steps is None:
            raise StructureTypeError(
                "The length of this dataset is not known.",
                received=f"{self!r}.",
                fix="count the elements while iterating.",
            )
        return steps

    def __bool__(self) -> bool:
        """Always true; `len(dataset)` says whether it has elements, where that is
        known.
        """
        return True

    @property
    def element_spec(self) -> Any:
        """The structure of an element, with a `kd.ElementSpec` for each component; the
        rows are `None`.

        Raises:
            InputError: Where it is not known before an element was read.
        """
        if self._spec is None:
            try:
                self._spec = _spec_of(self._layout.source.example)
            except InputError:
                if self._seen is None:
                    raise
                self._spec = self._seen
        return self._spec

    def reduce(self, initial_state: Any, reduce_func: Callable[[Any, Any], Any]) -> Any:
        """What is left of `state = reduce_func(state, element)` after all elements."""
        what, fix = "A state is made by a function of two.", "dataset.reduce(0, add)"
        checks.function("reduce_func", reduce_func, what, fix)
        state = initial_state
        for element in self:
            state = reduce_func(state, element)
        return state

    @property
    def layout(self) -> Layout:
        """What the batches of the pipeline are to the replicas."""
        return self._layout

    @property
    def steps_ahead(self) -> int:
        """How many steps are prefetched."""
        size = self._options.experimental_per_replica_buffer_size
        if size is None:
            return self._layout.source.steps_ahead(self._mesh.platform)
        return size

    def __repr__(self) -> str:
        return f"DistributedDataset({self._layout.source.kind}: {self._how})"


class DistributedIterator(Iterator[Any]):
    """One pass over a `DistributedDataset`. Source:
    `tf.distribute.DistributedIterator`.

    Elements are read and put on the devices ahead of the loop, by a thread that ends
    with the iterator.
    """

    def __init__(self, dataset: DistributedDataset) -> None:
        _require_cross_replica()
        self._dataset = dataset
        self._feed = Feed(dataset._layout.open, _Prepare(dataset), dataset.steps_ahead)

    def __iter__(self) -> DistributedIterator:
        return self

    def __next__(self) -> Any:
        _require_cross_replica()
        return next(self._feed)

    def get_next(self) -> Any:
        """The next element.

        Raises:
            OutOfRangeError: At the end; it is also a `StopIteration`.
        """
        try:
            return next(self)
        except StopIteration:
            raise OutOfRangeError(
                "The dataset has no more elements.",
                received=f"get_next() at the end of {self._dataset!r}.",
                fix="iterate with `for element in dataset`, or ask "
                "get_next_as_optional().has_value().",
            ) from None

    def get_next_as_optional(self) -> Optional:
        """The next element, or the news that there is none."""
        try:
            return Optional(next(self))
        except StopIteration:
            return Optional.empty()

    @property
    def element_spec(self) -> Any:
        """As of the dataset."""
        return self._dataset.element_spec

    def get_state(self) -> dict[str, Any]:
        """The position after the last element that this iterator gave.

        A dict of numbers, strings, bytes, lists and NumPy arrays, to be stored in a
        checkpoint. That of a `tf.data` pipeline holds what the pipeline buffers, such
        as the elements in a shuffle buffer.

        Raises:
            InputError: For data that cannot go on from a position: generators, torch's
                own `DataLoader`, and a `PyDataset` that changes between epochs without
                saying how.
        """
        kind, position = self._dataset._layout.source.kind, self._feed.position()
        return {"format": _FORMAT, "kind": kind, "position": position}

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes on from a position: the next element is the very one that would have
        come next.

        Args:
            state: What `get_state` returned, in this process or another, for the same
                data.

        Raises:
            InputError: For a state of another kind of data.
        """
        kind = self._dataset._layout.source.kind
        found: Any = (
            state if isinstance(state, dict) else {"kind": type(state).__name__}
        )
        if found.get("format") != _FORMAT or found.get("kind") != kind:
            raise InputError(
                f"This is not a position in {kind}.",
                received=f"a state of {found.get('kind', 'no kind')}.",
                fix="pass what get_state() of an iterator over the same data returned.",
            )
        self._feed.seek(state["position"])

    def close(self) -> None:
        """Ends the reading ahead; the iterator has no more elements. Dropping the
        iterator does the same.
        """
        self._feed.close()


def _require_cross_replica() -> None:
    # A traced program would keep the one element that it was traced with.
    require_cross_replica(
        "The iteration over a distributed dataset",
        "strategy.run(step, args=(next(iterator),))",
    )


class _Prepare:
    """From a batch to an element on the devices, each of the same structure."""

    def __init__(self, dataset: DistributedDataset) -> None:
        self._dataset, self._mesh = dataset, dataset._mesh
        self._on_devices = dataset._options.experimental_fetch_to_device is not False
        self._structure: Any = None

    def __call__(self, batch: Batch) -> Any:
        layout = self._dataset._layout
        sample = layout.sample(batch)
        structure = jax.tree.structure(sample)
        self._structure = self._structure or structure
        if structure != self._structure:
            raise InputError(
                "The elements of a dataset have one structure.",
                received=f"{structure} after {self._structure}.",
                fix="yield the same structure for every batch.",
            )
        specs = self._specs(batch, sample)

        def group(leaf: Any, components: list[Any]) -> PerReplica | None:
            return self._group(components, next(specs))

        element = layout.grouped(batch, group)
        self._dataset._seen = self._dataset._seen or _spec_of(sample)
        return element

    def _specs(self, batch: Batch, sample: Any) -> Iterator[Specs | None]:
        """For each leaf of `sample`, in its own order, the specs of that component on
        all replicas; `None` in a single process, which has them all.
        """
        if self._mesh.num_processes == 1:
            return itertools.repeat(None)
        of_replicas = replica_specs(batch, sample, self._mesh.num_replicas)
        columns = list(map(list, zip(*of_replicas, strict=True)))
        return iter(structures.in_own_order(sample, columns))

    def _group(self, components: list[Any], specs: Specs | None) -> PerReplica | None:
        if all(component is None for component in components):
            return None
        arrays = list(map(on_host, components))
        if any(array.dtype == object and not array.ndim for array in arrays):
            raise _no_arrays(components[0])
        make = PerReplica.of if self._on_devices else PerReplica.on_host
        # Text, which no device takes, stays in the process that has it.
        return make(arrays, self._mesh, specs if is_array(arrays[0]) else None)


class Optional:
    """An element that may be missing. Source: `tf.experimental.Optional`."""

    def __init__(self, value: Any, present: bool = True) -> None:
        self._value, self._present = value, present

    @staticmethod
    def empty() -> Optional:
        """The one without a value."""
        return Optional(None, present=False)

    def has_value(self) -> bool:
        """Whether there is an element."""
        return self._present

    def get_value(self) -> Any:
        """The element.

        Raises:
            ValueStructureError: Where there is none.
        """
        if not self._present:
            raise ValueStructureError(
                "The dataset had no more elements.",
                received="get_value() of an empty Optional.",
                fix="ask has_value() first.",
            )
        return self._value


def _spec_of(example: Any) -> Any:
    def spec(leaf: Any) -> ElementSpec:
        if not hasattr(leaf, "shape"):
            raise _no_arrays(leaf)
        shape = tuple(leaf.shape)
        dtype = str(getattr(leaf.dtype, "name", leaf.dtype))
        return ElementSpec((None, *shape[1:]) if shape else (), dtype)

    def is_leaf(part: Any) -> bool:
        return hasattr(part, "shape") or compat.is_sparse(part)

    return jax.tree.map(spec, example, is_leaf=is_leaf)


def _no_arrays(part: Any) -> InputError:
    return InputError(
        "The elements of a dataset are structures of arrays.",
        received=f"an element with a {type(part).__name__}.",
        fix="yield arrays; of datasets of datasets, as from window(), make one "
        "dataset: flat_map(...).",
    )
