"""The rows that a trial trains on: those of the first batch, as often as needed."""

from __future__ import annotations

import types
from typing import Any

import jax
import numpy as np

from keras_distribute import checks
from keras_distribute._compat import adapters
from keras_distribute.errors import InputError
from keras_distribute.input.generators import Stream
from keras_distribute.training import adoption, feeds
from keras_distribute.training.fit_arguments import check_fit_arguments


def first_batch(x: Any, y: Any, sample_weight: Any) -> Any:
    """The first batch that `fit` would read, in host memory, as it gives it to a
    step. `fit` will read it again.

    Raises:
        InputError: For what `fit` cannot read, for sparse arrays, and for no rows.
    """
    if isinstance(x, types.GeneratorType):
        stream = Stream.of(x)
        batch = next(adapters.generator_batches(stream.read(x)), None)
        stream.give_back(0 if batch is None else 1)
    else:
        check_fit_arguments(x, {"y": y, "sample_weight": sample_weight})
        adapter = adapters.adapter_of(x, y, sample_weight)
        batch = next(feeds.look(adapter), None)
    if batch is None:
        adoption.refuse_empty()
    leaves = jax.tree.leaves(batch, is_leaf=adapters.is_sparse)
    if any(map(adapters.is_sparse, leaves)):
        raise InputError(
            "The rows of sparse arrays cannot be repeated to try larger batches.",
            received=f"x={checks.shown(x)}.",
            fix="dense arrays of the same shapes: kd.find_batch_size(model, "
            "np.zeros(shape), y)",
        )
    batch = jax.tree.map(np.asarray, batch)
    if any(leaf.shape[:1] == (0,) for leaf in jax.tree.leaves(batch)):
        raise InputError(
            "The first batch has no rows that could be repeated to try larger batches.",
            received=f"x={checks.shown(x)}.",
            fix="data whose first batch has a row.",
        )
    return batch


def repeated(batch: Any, rows: int) -> Any:
    """A batch of so many rows, which are those of `batch` over and over."""

    def fill(leaf: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        if not leaf.ndim:
            return leaf
        filled = np.empty((rows, *leaf.shape[1:]), leaf.dtype)
        done = min(rows, leaf.shape[0])
        filled[:done] = leaf[:done]
        while done < rows:
            more = min(done, rows - done)
            filled[done : done + more] = filled[:more]
            done += more
        return filled

    return jax.tree.map(fill, batch)
