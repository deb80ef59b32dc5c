"""Into how many parts a variable is divided, and how many rows each part has. Knows
shapes and dtypes alone.

The formulas are those of TensorFlow's `sharded_variable.py` and
`partitioned_variables.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_distribute import checks
from keras_distribute.errors import StructureTypeError, ValueStructureError
from keras_distribute.input.splitting import even_sizes


class Partitioner:
    """Says into how many parts each axis of a variable is divided: the base of the
    partitioners, for one of your own.

    Source: `tf.distribute.experimental.partitioners.Partitioner`.

    Example:
        >>> partitioners = kd.experimental.partitioners
        >>> class Halves(partitioners.Partitioner):
        ...     def __call__(self, shape, dtype, axis=0):
        ...         return [2 if i == axis else 1 for i in range(len(shape))]
        >>> Halves()((10, 3), "float32")
        [2, 1]
    """

    def __call__(self, shape: Sequence[int], dtype: Any, axis: int = 0) -> list[int]:
        """The number of parts of each axis.

        Args:
            shape: Of the variable.
            dtype: Its dtype or the name of it.
            axis: The axis to divide.

        Returns:
            An integer for each axis: 1 for those that are not divided.
        """
        raise NotImplementedError


class FixedShardsPartitioner(Partitioner):
    """A number of parts, or as many as there are rows.

    Source: `tf.distribute.experimental.partitioners.FixedShardsPartitioner`.

    Args:
        num_shards: How many parts.

    Raises:
        ValueStructureError: For a number below 1.
        StructureTypeError: For what is no integer.

    Example:
        >>> partitioner = kd.experimental.partitioners.FixedShardsPartitioner(2)
        >>> partitioner((10, 3), "float32")
        [2, 1]
        >>> partitioner((1, 3), "float32")
        [1, 1]
    """

    def __init__(self, num_shards: int) -> None:
        self._num_shards = checks.count("num_shards", num_shards, 1)

    def __call__(self, shape: Sequence[int], dtype: Any, axis: int = 0) -> list[int]:
        """The number of parts of each axis; see `Partitioner`."""
        sizes, axis = _checked(shape, axis)
        return _along(axis, sizes, min(self._num_shards, sizes[axis]))


class MinSizePartitioner(Partitioner):
    """As many parts as can be, each of at least some bytes.

    Source: `tf.distribute.experimental.partitioners.MinSizePartitioner`. As there, the
    number is rounded up: a part may have fewer bytes than `min_shard_bytes`.

    Args:
        min_shard_bytes: The bytes of a part, at least; 256 KiB by default.
        max_shards: How many parts at most; by default 1, which divides nothing.
        bytes_per_string: How long a string is taken to be, for that dtype.

    Raises:
        ValueStructureError: For a number below 1.
        StructureTypeError: For what is no number.

    Example:
        >>> partitioners = kd.experimental.partitioners
        >>> partitioners.MinSizePartitioner(4, max_shards=2)((6, 1), "float32")
        [2, 1]
        >>> partitioners.MinSizePartitioner(4, max_shards=10)((6, 1), "float32")
        [6, 1]
    """

    def __init__(
        self,
        min_shard_bytes: int = 256 << 10,
        max_shards: int = 1,
        bytes_per_string: int = 16,
    ) -> None:
        self._min_shard_bytes = _bytes("min_shard_bytes", min_shard_bytes)
        self._max_shards = checks.count("max_shards", max_shards, 1)
        self._bytes_per_string = _bytes("bytes_per_string", bytes_per_string)

    def __call__(self, shape: Sequence[int], dtype: Any, axis: int = 0) -> list[int]:
        """The number of parts of each axis; see `Partitioner`."""
        sizes, axis = _checked(shape, axis)
        size = math.prod(sizes) * _bytes_of(dtype, self._bytes_per_string)
        wanted = math.ceil(size / self._min_shard_bytes)
        count = max(1, min(sizes[axis], self._max_shards, wanted))
        return _along(axis, sizes, count)


class MaxSizePartitioner(Partitioner):
    """As few parts as can be, each of at most some bytes.

    Source: `tf.distribute.experimental.partitioners.MaxSizePartitioner`. Differs from
    TF: a shape without elements is one part, where TensorFlow divides by zero.

    Args:
        max_shard_bytes: The bytes of a part, at most.
        max_shards: How many parts at most, even if they have more bytes then; `None`:
            any number.
        bytes_per_string: How long a string is taken to be, for that dtype.

    Raises:
        ValueStructureError: For a number below 1.
        StructureTypeError: For what is no number.

    Example:
        >>> partitioners = kd.experimental.partitioners
        >>> partitioners.MaxSizePartitioner(4)((6, 1), "float32")
        [6, 1]
        >>> partitioners.MaxSizePartitioner(1024)((6, 1), "float32")
        [1, 1]
    """

    def __init__(
        self,
        max_shard_bytes: int,
        max_shards: int | None = None,
        bytes_per_string: int = 16,
    ) -> None:
        self._max_shard_bytes = _bytes("max_shard_bytes", max_shard_bytes)
        # TensorFlow takes 0 for no limit, too.
        self._max_shards = max_shards and checks.count("max_shards", max_shards, 1)
        self._bytes_per_string = _bytes("bytes_per_string", bytes_per_string)

    def __call__(self, shape: Sequence[int], dtype: Any, axis: int = 0) -> list[int]:
        """The number of parts of each axis; see `Partitioner`."""
        sizes, axis = _checked(shape, axis)
        if 0 in sizes:
            return [1] * len(sizes)
        of_row = (
            math.prod(sizes) / sizes[axis] * _bytes_of(dtype, self._bytes_per_string)
        )
        rows = max(1, math.floor(self._max_shard_bytes / of_row))
        count = math.ceil(sizes[axis] / rows)
        return _along(axis, sizes, min(count, self._max_shards or count))


def rows_of_parts(rows: int, count: int) -> list[int]:
    """The rows of each of `count` parts: even, the first ones with one more where they
    do not divide, as in TensorFlow's `ShardedVariable`. No part is empty.
    """
    return even_sizes(rows, max(1, min(count, rows)))


def _bytes(name: str, value: Any) -> Any:
    what = f"{name} is a number of bytes, 1 or more."
    checks.number(name, value, what=what, fix=f"{name}=1024")
    if value < 1:
        raise ValueStructureError(what, received=f"{name}={value}.", fix=f"{name}=1024")
    return value


def _checked(shape: Any, axis: Any) -> tuple[list[int], int]:
    """The sizes of a shape, and the axis that is divided."""
    what, fix = "A partitioner is given the shape of a variable.", "(1000, 64)"
    try:
        sizes: list[Any] = list(shape)
    except (TypeError, ValueError):  # Also TensorFlow's shape of unknown rank.
        received = f"shape={checks.shown(shape)}."
        raise StructureTypeError(what, received=received, fix=fix) from None
    sizes = [checks.count("shape", n, what=what, fix=fix) for n in sizes]
    axis = checks.count("axis", axis, -len(sizes), most=max(0, len(sizes) - 1))
    if not sizes:
        raise ValueStructureError(
            "A scalar has no axis to be divided.",
            received="shape=().",
            fix="leave scalars whole: a ParameterServerStrategy asks for none.",
        )
    return sizes, axis


def _along(axis: int, sizes: Sequence[int], count: int) -> list[int]:
    result = [1] * len(sizes)
    result[axis] = count
    return result


def _bytes_of(dtype: Any, of_string: Any) -> Any:
    """The bytes of an element."""
    name = getattr(dtype, "name", dtype)  # Of NumPy's, JAX's and TensorFlow's dtypes.
    try:
        found = np.dtype("str" if name == "string" else name)
    except TypeError:
        raise StructureTypeError(
            "A partitioner is given the dtype of a variable.",
            received=f"dtype={checks.shown(dtype)}.",
            fix='"float32"',
        ) from None
    return of_string if found.kind in "OSU" else found.itemsize
