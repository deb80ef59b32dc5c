"""What `fit`, `evaluate` and `predict` read: Keras's data adapters and distributed
datasets, fed to the steps.
"""

from __future__ import annotations

import contextlib
import enum
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from keras_distribute import context
from keras_distribute._compat import adapters as compat
from keras_distribute.devices.mesh import ReplicaMesh
from keras_distribute.errors import ContextError, InputError
from keras_distribute.input.arrays import ArrayDataset
from keras_distribute.input.creator import DatasetCreator
from keras_distribute.input.datasets import DistributedDataset
from keras_distribute.input.generators import Stream
from keras_distribute.input.kinds import source_of_adapter
from keras_distribute.input.lockstep import replica_rows
from keras_distribute.input.options import InputContext, InputOptions
from keras_distribute.input.prefetch import Feed
from keras_distribute.input.sharing import distribute_source
from keras_distribute.input.source import Batch, Reader, Source
from keras_distribute.strategies.base import get_strategy
from keras_distribute.training import batches, calls
from keras_distribute.training.fit_arguments import check_fit_arguments
from keras_distribute.training.worker_data import WorkerDataAdapter, check_steps

_SOURCE, _STREAM = "_keras_distribute_source", "_keras_distribute_stream"


class Form(enum.Enum):
    """What takes the batches: a compiled step, one that runs operation by operation, or
    a function that the model makes itself (`make_train_function`), which gets arrays as
    from Keras.
    """

    TRACED = "traced"
    EAGER = "eager"
    PLAIN = "plain"


class DatasetAdapter(compat.DataAdapter):
    """A distributed dataset as the `x` of `fit`: the rows of all replicas are one
    batch.

    Args:
        original: Keras's adapter of the user's data, if that is what was distributed.
    """

    def __init__(self, dataset: DistributedDataset, original: Any = None) -> None:
        self.dataset, self.original = dataset, original
        # What it is called where positions are compared.
        self.stands_for = type(original or self).__name__

    def on_epoch_end(self) -> None:
        epoch = compat.epoch_of(self)
        compat.set_epoch(self, None if epoch is None else epoch + 1)

    def get_jax_iterator(self, super_batch: int | None = None) -> Iterator[Any]:
        """Host batches, for a model without a strategy."""
        layout = self.dataset.layout
        feed = Feed(layout.open, layout.whole, ahead=0)
        while super_batch is not None:
            try:
                yield compat.next_group(feed, super_batch)
            except StopIteration:
                return
        yield from feed

    @property
    def num_batches(self) -> int | None:
        return self.dataset.layout.num_steps

    @property
    def batch_size(self) -> int | None:
        return self.dataset.layout.source.batch_size


def choose_adapter(
    original: Callable[..., Any], x: Any, arguments: dict[str, Any]
) -> Any:
    """The adapter of the `x` of `fit`: ours for a distributed dataset and what workers
    read, Keras's for everything else.

    Args:
        arguments: The others of `fit` that concern data.
    """
    strategy = get_strategy() if context.has_strategy() else None
    if isinstance(x, ArrayDataset):
        raise InputError(
            "fit, evaluate and predict take arrays themselves, or a distributed "
            "dataset.",
            received=f"a kd.ArrayDataset of {x.rows} rows, which is neither.",
            fix="model.fit(x, y, batch_size=64), or "
            "model.fit(strategy.experimental_distribute_dataset(dataset)).",
        )
    if isinstance(x, DatasetCreator):
        _refuse_more("A DatasetCreator's dataset", x, arguments)
        check_steps(x, arguments.get("steps_per_epoch"))
        if strategy is not None and strategy.placement.is_on_servers:
            call = calls.innermost()
            return WorkerDataAdapter(x, strategy, call.name if call else "fit")
        if strategy is None:
            x = x.dataset_fn(InputContext())
        else:
            x = strategy.distribute_datasets_from_function(
                x.dataset_fn, x.input_options
            )
    if isinstance(x, DistributedDataset):
        _refuse_more("A distributed dataset", x, arguments)
        return DatasetAdapter(x)
    check_fit_arguments(x, arguments)
    if strategy is None:
        return original(x, **arguments)
    stream = Stream.of(x) if isinstance(x, types.GeneratorType) else None
    adapter = original(x if stream is None else stream.read(x), **arguments)
    setattr(adapter, _STREAM, stream)
    compat.leave_reading_to_us(adapter)
    place = strategy.input_context
    if place.num_input_pipelines == 1:
        return adapter
    source = source_of_adapter(adapter, stream)
    dataset = distribute_source(source, strategy.replica_mesh, place, InputOptions())
    return DatasetAdapter(dataset, adapter)


def _refuse_more(what: str, x: Any, arguments: dict[str, Any]) -> None:
    for name in ("y", "sample_weight", "class_weight"):
        if arguments.get(name) is not None:
            raise InputError(
                f"{what} already holds all that a step needs; {name} cannot be added.",
                received=f"{x!r} with {name}.",
                fix="yield (x, y, sample_weight) from the dataset.",
            )


def look(adapter: Any) -> Iterator[Any]:
    """The first batch, on the host; `fit` will read it again."""
    if isinstance(adapter, WorkerDataAdapter):
        yield adapter.look()
        return
    with contextlib.suppress(StopIteration):
        if isinstance(adapter, DatasetAdapter):
            yield _with_rows(
                adapter.dataset.layout.whole(adapter.dataset.layout.peek())
            )
        else:
            yield _source(adapter).peek().data


def feed(
    adapter: Any,
    mesh: ReplicaMesh,
    form: Form,
    per_epoch: int | None,
    followed: bool,
    has_loss: bool,
) -> Feed:
    """The batches of one pass, on the devices ahead of the steps that take them.

    Args:
        form: What takes them.
        per_epoch: How many batches an epoch takes, where the user says so.
        followed: Whether somebody may ask for positions.
        has_loss: Whether each batch has one, and so has to have rows.

    Raises:
        ContextError: For a function of the model's own over several processes.
    """
    if form is Form.PLAIN and mesh.num_processes > 1:
        raise ContextError(
            "Steps over several processes are made by the strategy.",
            received="a model with its own make_train_function, make_test_function or "
            f"make_predict_function, on {mesh.num_processes} processes.",
            fix="write train_step, test_step or predict_step in its place; or call "
            "super().make_train_function() there, and wrap self.train_function.",
        )
    open_reader, whole, ahead = _reading(adapter, mesh.platform)
    if (per_epoch or adapter.num_batches) == 1:
        ahead = 0  # To start a thread for one batch takes longer than to wait for it.
    several = mesh.num_processes > 1

    def placed(batch: Batch) -> Any:
        data = whole(batch)
        sizes = replica_rows(batch, mesh.num_replicas) if several else None
        ready = batches.place(data, mesh, sizes, traced=form is Form.TRACED)
        if has_loss and not ready.spread[0]:  # No rows of the first array at least.
            _refuse_empty(data, sizes)
        return ready.data if form is Form.PLAIN else ready

    return Feed(open_reader, placed, ahead, per_epoch, followed)


def _refuse_empty(data: Any, sizes: Sequence[int] | None) -> None:
    """Raises `InputError` for a batch of which no array has rows: a single one may be
    empty beside others, as where a graph has no edges.
    """
    shapes = list(map(np.shape, jax.tree.leaves(data, is_leaf=compat.is_sparse)))
    rows = [*(shape[0] for shape in shapes if shape), *(sizes or ())]
    if rows and not any(rows):
        raise InputError(
            "A batch without rows has no loss.",
            received=f"shapes {shapes}.",
            fix="leave such batches out of the dataset.",
        )


def host_feed(adapter: Any, per_epoch: int | None) -> Feed:
    """The batches of one pass on the host, for a model without a strategy."""
    return Feed(*_reading(adapter), per_epoch)


def claim(adapter: Any) -> None:
    """Makes `feed` the only one to read from an adapter."""
    _reading(adapter)


def _reading(
    adapter: Any, platform: str = "cpu"
) -> tuple[Callable[[], Reader], Callable[[Batch], Any], int]:
    """What opens a pass, makes of a batch what a step takes, and how many ahead."""
    if isinstance(adapter, DatasetAdapter):
        layout = adapter.dataset.layout
        return layout.open, layout.whole, adapter.dataset.steps_ahead
    if isinstance(adapter, WorkerDataAdapter):
        return adapter.open, _data, 0
    source = _source(adapter)
    return source.open, _data, source.steps_ahead(platform)


def _with_rows(data: Any) -> Any:
    """The batch, or where this process has no rows of it, one with a row of zeros: a
    model is built by its form.
    """

    def one_row(leaf: Any) -> Any:
        if np.shape(leaf)[:1] == (0,):
            return np.zeros((1, *np.shape(leaf)[1:]), leaf.dtype)
        return leaf

    return jax.tree.map(one_row, data, is_leaf=compat.is_sparse)


def _data(batch: Batch) -> Any:
    return batch.data


def _source(adapter: Any) -> Source:
    source = getattr(adapter, _SOURCE, None)
    if source is None:
        source = source_of_adapter(
            adapter, getattr(adapter, _STREAM, None), hooks=False
        )
        setattr(adapter, _SOURCE, source)
    return source
