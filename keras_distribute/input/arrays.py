"""Arrays in memory, read by index, shuffled as Keras does or by a seed of their own."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from keras_distribute import checks
from keras_distribute._compat import adapters as compat
from keras_distribute.devices import host_memory
from keras_distribute.errors import InputError
from keras_distribute.input.source import (
    Batch,
    Excerpt,
    Part,
    Position,
    Reader,
    Shuffled,
    first_of,
    uncounted,
)

_EXCERPT = 16  # Rows of each array, and numbers of each of them.


class ArrayDataset:
    """Arrays as a dataset of batches, for `strategy.experimental_distribute_dataset`;
    `fit` takes arrays themselves.

    Args:
        arrays: An array, or a structure of arrays (tuples, dicts), all with the same
            number of rows: NumPy, JAX, TensorFlow, pandas or SciPy sparse.
        batch_size: The rows of a global batch.
        shuffle: Whether each pass has an order of its own.
        seed: Of the orders, an integer of at least 0; by default one is drawn from
            NumPy's global stream, which `keras.utils.set_random_seed` seeds. The order
            depends on the seed and the number of the pass alone.
        drop_remainder: Whether to leave out a last batch that is not full.

    Raises:
        InputError: For arrays of different lengths, none at all, a batch size below 1,
            and arguments of other kinds.

    Example:
        >>> import numpy as np, keras_distribute as kd
        >>> strategy = kd.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> data = kd.ArrayDataset(np.arange(5), batch_size=4)
        >>> dataset = strategy.experimental_distribute_dataset(data)
        >>> [[part.tolist() for part in batch.values] for batch in dataset]
        [[[0, 1], [2, 3]], [[4], []]]
    """

    def __init__(
        self,
        arrays: Any,
        batch_size: int,
        shuffle: bool = False,
        seed: int | None = None,
        drop_remainder: bool = False,
    ) -> None:
        leaves: list[Any] = jax.tree.leaves(
            arrays, is_leaf=lambda leaf: hasattr(leaf, "shape")
        )
        formed = all(hasattr(leaf, "shape") and _dtypes(leaf) for leaf in leaves)
        if not leaves or not formed or not compat.can_convert_arrays(arrays):
            raise InputError(
                "An ArrayDataset is made of arrays.",
                received=f"{type(arrays).__name__} with "
                f"{sorted({type(leaf).__name__ for leaf in leaves})}.",
                fix="kd.ArrayDataset((x, y), batch_size=64)",
            )
        dtypes = [dtype for leaf in leaves for dtype in _dtypes(leaf)]
        others = [dtype for dtype in dtypes if getattr(dtype, "kind", "f") in "OSUMm"]
        if others:
            raise InputError(
                "Arrays of text, times or objects have no place on a device.",
                received=f"an array of dtype {others[0]}.",
                fix="numbers; tf.data can hold text, and turn it into numbers.",
            )
        lengths = {int(leaf.shape[0]) if leaf.shape else -1 for leaf in leaves}
        if len(lengths) > 1 or -1 in lengths:
            shapes = ", ".join(str(tuple(leaf.shape)) for leaf in leaves)
            raise InputError(
                "The arrays of a dataset have the same number of rows.",
                received=f"shapes {shapes}.",
                fix="pass arrays of one length.",
            )
        what, fix, error = "A batch has at least one row.", "batch_size=64", InputError
        self.batch_size = checks.count(
            "batch_size", batch_size, 1, what=what, fix=fix, error=error
        )
        checks.flag("shuffle", shuffle, InputError)
        checks.flag("drop_remainder", drop_remainder, InputError)
        if seed is not None:
            seed = checks.count("seed", seed, error=InputError)
        self.arrays, self.shuffle, self.drop_remainder = arrays, shuffle, drop_remainder
        self.rows = lengths.pop()
        self.seed = int(np.random.randint(2**31)) if seed is None and shuffle else seed
        self.one_order = seed is not None or not shuffle

        self._own: ArraySource | None = None  # Counts the passes of `__iter__`.

    def __len__(self) -> int:
        return _num_batches(self.rows, self.batch_size, self.drop_remainder)

    def __iter__(self) -> Iterator[Any]:
        """One pass over the global batches on the host: what a loop sees under the
        default strategy.
        """
        if self._own is None:
            self._own = self.source()
        reader = self._own.open()
        reader.start(0)
        for batch in reader:
            yield batch.data

    def source(self) -> ArraySource:
        """What reads the arrays, from the first pass on."""
        return ArraySource(
            compat.sliceable_arrays(self.arrays),
            self.rows,
            self.batch_size,
            self.shuffle,
            self.seed,
            self.drop_remainder,
            one_order=self.one_order,
        )


class ArraySource(Shuffled):
    """Arrays in memory, read by index.

    Args:
        arrays: A structure that `compat.take` slices.
        rows: The number of rows of the arrays.
        batch_size: The rows of a batch.
        shuffle: Whether each pass has an order of its own; `"batch"`: only within each
            batch.
        seed: Of the orders; `None` shuffles as Keras does: by its count of epochs, or
            from NumPy's global stream.
        drop_remainder: Whether to leave out a last batch that is not full.
        part: Which rows of each batch to read.
        one_order: Whether all processes have the same order.
        counted: Returns Keras's count of epochs, where it shuffles by that.
    """

    kind = "arrays"

    def __init__(
        self,
        arrays: Any,
        rows: int,
        batch_size: int,
        shuffle: bool | str,
        seed: int | None = None,
        drop_remainder: bool = False,
        part: Part | None = None,
        one_order: bool = True,
        counted: Callable[[], int | None] = uncounted,
    ) -> None:
        self.arrays, self.rows, self.shuffle, self.seed = arrays, rows, shuffle, seed
        self.part, self._one_order, self.counted = part, one_order, counted
        self._batch_size, self._drop = batch_size, drop_remainder

    @property
    def is_at_hand(self) -> bool:
        return not self.shuffle

    @property
    def num_batches(self) -> int:
        return _num_batches(self.rows, self._batch_size, self._drop)

    @property
    def batch_size(self) -> int:
        return self._batch_size

    @property
    def num_rows(self) -> int:
        return self.rows

    @property
    def example(self) -> Any:
        return compat.take(self.arrays, slice(0, 0))

    @property
    def excerpts(self) -> list[Excerpt]:
        rows = _spread(self.rows, _EXCERPT)
        taken = jax.tree_util.tree_leaves_with_path(
            compat.take(self.arrays, rows), is_leaf=compat.is_sparse
        )
        return [
            _excerpt(jax.tree_util.keystr(path), rows, array)
            for path, array in taken
            if isinstance(array, np.ndarray) and array.dtype.kind not in "OSUMm"
        ]

    def open(self) -> Reader:
        return _ArrayReader(self)

    def peek(self) -> Batch:
        epoch, ahead = self.epoch, jax.default_backend() != "cpu"
        # Keras looks at the first batch, too, and draws the order of no other one, but
        # of one more where it copies a batch ahead.
        batch = first_of(_ArrayReader(self, drawn=2 if ahead else 1))
        self.epoch = epoch
        return batch

    def only_rows(self, part: Part) -> ArraySource:
        if not self._one_order:
            raise InputError(
                "Each process would shuffle these arrays in another order.",
                received="shuffle=True without a seed.",
                fix="kd.ArrayDataset(arrays, batch_size, shuffle=True, seed=7), one "
                "seed for all processes.",
            )
        form = (self.rows, self._batch_size, self.shuffle, self.seed, self._drop)
        return ArraySource(self.arrays, *form, part, counted=self.counted)


class _ArrayReader(Reader):
    """
    Args:
        source: What it reads.
        drawn: Of how many batches the order is drawn where each has its own; `None`: of
            all.
    """

    kind = "arrays"

    def __init__(self, source: ArraySource, drawn: int | None = None) -> None:
        self._source, self._drawn = source, drawn
        self._epoch = self._step = 0
        self._sought: Position | None = None
        self._before: Any = None
        self._order: Any = None

    def start(self, ahead: int) -> None:
        source, sought = self._source, self._sought
        self._epoch, draws = source.next_pass(sought)
        source.epoch = self._epoch + 1
        if not source.shuffle:
            return
        if source.seed is None and draws:
            if sought is not None:
                np.random.set_state(_random_state(sought["random"]))
            self._before = np.random.get_state(legacy=False)
        if source.shuffle != "batch":
            self._order = self._permutation(0, source.rows)
            return
        # All drawn now: a thread prefetches the batches, while the program may draw
        # from NumPy's stream, too.
        num_batches = source.num_batches
        starts = range(0, num_batches * source.batch_size, source.batch_size)
        starts = starts[: self._drawn]
        sizes = [min(source.batch_size, source.rows - start) for start in starts]
        orders = [
            start + self._permutation(i, n)
            for i, (start, n) in enumerate(zip(starts, sizes, strict=True))
        ]
        self._order = np.concatenate(orders) if orders else np.arange(0)

    def _permutation(self, step: int, rows: int) -> Any:
        """A new order of `rows`: from the seed, the epoch and the step, or Keras's."""
        seed = self._source.seed
        if seed is not None:
            return np.random.default_rng((seed, self._epoch, step)).permutation(rows)
        if self._before is not None:
            return np.random.permutation(rows)
        return np.random.default_rng(self._epoch + step).permutation(rows)

    def __next__(self) -> Batch:
        source, step = self._source, self._step
        if step >= source.num_batches:
            raise StopIteration
        start = step * source.batch_size
        stop = min(start + source.batch_size, source.rows)
        rows = stop - start
        first, last = (0, rows) if source.part is None else source.part(rows)
        if self._order is not None:
            indices: Any = self._order[start + first : start + last]
        else:
            indices = slice(start + first, start + last)
        self._step += 1
        return Batch(compat.take(source.arrays, indices, host_memory.gathered), rows)

    def position(self) -> Position:
        state = self._before and self._before["state"]
        return {
            "epoch": self._epoch,
            "step": self._step,
            "random": state and {"key": state["key"], "pos": state["pos"]},
            "seed": self._source.seed,
            **self._arguments(),
        }

    def _arguments(self) -> dict[str, Any]:
        """What a position is for: other arrays or batches cannot go on from it."""
        source = self._source
        return {
            "rows": source.rows,
            "batch_size": source.batch_size,
            "shuffle": source.shuffle,
        }

    def seek(self, position: Position) -> None:
        for name, own in self._arguments().items():
            if position[name] != own:
                raise InputError(
                    "The position belongs to other arrays, or other batches of them.",
                    received=f"{name}={position[name]} in the position, {name}={own} "
                    "here.",
                    fix="pass the same arrays, batch_size and shuffle as when the "
                    "position was taken.",
                )
        self._source.seed = position["seed"]
        self._sought, self._step = position, position["step"]


def _spread(count: int, most: int) -> Any:
    """At most so many of `count` indices, the first and the last among them."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).astype(int))


def _excerpt(name: str, rows: Any, array: Any) -> Excerpt:
    flat = array.reshape(len(rows), math.prod(array.shape[1:]))
    numbers = flat[:, _spread(flat.shape[1], _EXCERPT)].astype(complex)
    return Excerpt(name, tuple(rows.tolist()), numbers)


def _num_batches(rows: int, batch_size: int, drop_remainder: bool) -> int:
    return rows // batch_size if drop_remainder else -(-rows // batch_size)


def _dtypes(array: Any) -> list[Any]:
    """The dtype of an array, or those of the columns of a table."""
    return [array.dtype] if hasattr(array, "dtype") else [*getattr(array, "dtypes", [])]


def _random_state(state: Any) -> Any:
    return {
        "bit_generator": "MT19937",
        "state": {"key": np.asarray(state["key"], np.uint32), "pos": int(state["pos"])},
    }
