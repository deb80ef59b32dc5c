"""What is asked of TensorFlow's partitioners, and of ours: limits, shapes and dtypes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

# The name of the class, and its arguments.
PARTITIONERS: list[tuple[str, dict[str, Any]]] = [
    *(("FixedShardsPartitioner", {"num_shards": n}) for n in (1, 2, 3, 5, 16)),
    ("MinSizePartitioner", {}),
    *(
        ("MinSizePartitioner", {"min_shard_bytes": size, "max_shards": most})
        for size, most in itertools.product((1, 4, 7, 1000, 1 << 18), (1, 2, 3, 100))
    ),
    (
        "MinSizePartitioner",
        {"min_shard_bytes": 64, "max_shards": 9, "bytes_per_string": 5},
    ),
    ("MinSizePartitioner", {"min_shard_bytes": 2.5e3, "max_shards": 50}),
    *(
        ("MaxSizePartitioner", {"max_shard_bytes": size, "max_shards": most})
        for size, most in itertools.product(
            (1, 4, 7, 1000, (64 << 20) - 1), (None, 0, 1, 2, 3, 100)
        )
    ),
    (
        "MaxSizePartitioner",
        {"max_shard_bytes": 64, "max_shards": 9, "bytes_per_string": 5},
    ),
    ("MaxSizePartitioner", {"max_shard_bytes": 2.5e3}),
]
BAD: list[tuple[str, dict[str, Any]]] = [
    *(
        ("MinSizePartitioner", {name: n})
        for name in ("min_shard_bytes", "max_shards", "bytes_per_string")
        for n in (0, -1)
    ),
    *(
        ("MaxSizePartitioner", {"max_shard_bytes": 4} | {name: n})
        for name in ("max_shard_bytes", "bytes_per_string")
        for n in (0, -1)
    ),
    ("MaxSizePartitioner", {"max_shard_bytes": 4, "max_shards": -1}),
    ("MinSizePartitioner", {"min_shard_bytes": 0.5}),
]
SHAPES: list[list[int]] = [
    [1],
    [2],
    [7],
    [13],
    [6, 1],
    [10, 3],
    [13, 5],
    [1, 1000],
    [1000, 1],
    [300, 300],
    [100_003, 64],
    [4, 5, 6],
    [2, 3, 4, 5],
    [0, 4],
    [4, 0],
    [0],
    [],
]
DTYPES = ["float32", "float64", "bfloat16", "int8", "bool", "complex64", "string"]
AXES = [0, 1, -1, 2, 9]
# Rows, columns, parts wanted: how a variable on parameter servers is divided.
DIVIDED = [
    (rows, columns, parts)
    for rows, columns in ((1, 2), (2, 1), (4, 3), (13, 1), (16, 2), (17, 1))
    for parts in (1, 2, 3, 5, 13, 20)
]


def counts(make: Callable[[], Any], as_shape: Callable[[list[int]], Any]) -> list[Any]:
    """What one partitioner says of each shape, dtype and axis; the name of the error
    where it raises one.
    """
    try:
        partitioner = make()
    except (ValueError, TypeError) as error:
        return [type(error).__name__]
    return [
        _said(partitioner, as_shape(shape), dtype, axis)
        for shape, dtype, axis in cases()
    ]


def cases() -> list[tuple[list[int], str, int]]:
    """The shapes, dtypes and axes in the order of a record."""
    every = itertools.product(SHAPES, DTYPES, AXES)
    return [case for case in every if case[2] == 0 or case[1] in ("float32", "string")]


def _said(partitioner: Any, shape: Any, dtype: str, axis: int) -> Any:
    try:
        return partitioner(shape, dtype, axis=axis)
    except (ValueError, TypeError, IndexError, ZeroDivisionError) as error:
        return type(error).__name__
