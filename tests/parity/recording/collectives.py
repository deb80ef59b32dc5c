"""Records `strategy.reduce` and `gather`, and the collectives of a replica context with
their gradients.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from ..encoding import JSON, Pair, encode
from ..scenarios import collectives as scenario
from . import session
from .session import Entry, mirrored, per_replica, result_of, stored

F32 = np.float32
SCALARS = [F32(1.5), F32(2), F32(-4), F32(8)]
INTS = [np.int32(1), np.int32(2), np.int32(3), np.int32(5)]
MATRICES = [np.arange(6, dtype=F32).reshape(2, 3) + 10 * index for index in range(4)]
INT_MATRICES = [
    np.arange(6, dtype=np.int32).reshape(2, 3) + index for index in range(4)
]
RAGGED_ROWS = [np.arange(3 * rows, dtype=F32).reshape(rows, 3) for rows in (3, 1, 2, 1)]
EMPTY_ROWS = [np.arange(2 * rows, dtype=F32).reshape(rows, 2) for rows in (2, 0, 1, 0)]
RAGGED_COLUMNS = [
    np.arange(2 * columns, dtype=F32).reshape(2, columns) for columns in (1, 3, 2, 1)
]
RAGGED_CUBES = [
    np.arange(4 * size, dtype=F32).reshape(2, size, 2) for size in (2, 1, 3, 1)
]
RAGGED_VECTORS = [
    np.arange(1, size + 1, dtype=F32) * (index + 1)
    for index, size in enumerate((2, 3, 0, 1))
]
MIXED_RANKS = [
    np.ones((2,), F32),
    np.ones((2, 1), F32),
    np.ones((2,), F32),
    np.ones((2,), F32),
]

REDUCED: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "float32 scalars": (SCALARS, (None, 0)),
    "int32 scalars": (INTS, (None, 0)),
    "float32 matrices": (MATRICES, (None, 0, 1, -1, 2, (0, 1), ())),
    "float16 matrices": ([matrix.astype(np.float16) for matrix in MATRICES], (None, 0)),
    "int32 matrices": (INT_MATRICES, (None, 0, (0, 1))),
    "bool scalars": (
        [np.bool_(True), np.bool_(False), np.bool_(True), np.bool_(True)],
        (None,),
    ),
    "ragged rows": (RAGGED_ROWS, (None, 0, 1, (0, 1))),
    "an empty replica": (EMPTY_ROWS, (0,)),
    "ragged columns": (RAGGED_COLUMNS, (0, 1, (0, 1))),
    "mixed ranks": (MIXED_RANKS, (None, 0)),
    "dict per replica": (
        [{"a": a, "b": b} for a, b in zip(SCALARS, INTS, strict=True)],
        (None,),
    ),
}
UNDISTRIBUTED: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "plain scalar": (F32(3), (None, 0)),
    "plain matrix": (MATRICES[0], (None, 0, (0, 1))),
    "plain int": (np.int32(3), (None,)),
    "python float": (3.0, (None, 0)),
    "python int": (3, (None,)),
    "none": (None, (None,)),
    "list": ([F32(1), F32(2)], (None,)),
}
GATHERED: dict[
    str, tuple[Any, tuple[int, ...]]
] = {  # for what cannot be gathered see `mismatches`
    "float32 matrices": (MATRICES, (0, 1, -1, -2, 2)),
    "int32 matrices": (INT_MATRICES, (0,)),
    "scalars": (SCALARS, (0,)),
    "ragged rows": (RAGGED_ROWS, (0,)),
    "an empty replica": (EMPTY_ROWS, (0,)),
    "ragged columns": (RAGGED_COLUMNS, (1, -1)),
    "ragged cubes": (RAGGED_CUBES, (1,)),
    "ragged cubes, turned": ([np.moveaxis(cube, 1, 2) for cube in RAGGED_CUBES], (2,)),
    "ragged rows of a dict": (
        [{"a": a, "b": b} for a, b in zip(RAGGED_ROWS, EMPTY_ROWS, strict=True)],
        (0,),
    ),
    "dict per replica": (
        [{"a": a, "b": b} for a, b in zip(MATRICES, INT_MATRICES, strict=True)],
        (0,),
    ),
}
STRUCTURES: dict[str, Any] = {
    "scalar": SCALARS,
    "int scalar": INTS,
    "matrix": MATRICES,
    "list": [[a, b] for a, b in zip(SCALARS, MATRICES, strict=True)],
    "tuple": list(zip(SCALARS, MATRICES, strict=True)),
    "mixed dtypes": list(zip(SCALARS, INTS, strict=True)),
    "dict": [{"a": a, "b": {"c": b}} for a, b in zip(SCALARS, MATRICES, strict=True)],
    "named tuple": [Pair(a, [b]) for a, b in zip(SCALARS, MATRICES, strict=True)],
}
COEFFICIENTS = [F32(1), F32(10), F32(100), F32(1000)]


def reduce(replicas: int) -> Iterator[Entry]:
    """`strategy.reduce` of values per replica and of plain ones: "results" holds
    [operation, axis, result].
    """
    strategy = mirrored(replicas)

    def results(value: Any, axes: tuple[Any, ...]) -> list[Any]:
        cases = [(op, axis) for axis in axes for op in ("SUM", "MEAN")]
        return [
            [op, axis, result_of(partial(strategy.reduce, op, value, axis=axis))]
            for op, axis in cases
        ]

    for name, (components, axes) in REDUCED.items():
        yield {
            "name": name,
            "value": stored(components, replicas),
            "results": results(per_replica(strategy, components), axes),
        }
    for name, (plain, axes) in UNDISTRIBUTED.items():
        yield {
            "name": name,
            "value": encode(plain),
            "results": results(_tensors(plain), axes),
        }
    for op in ("sum", "MAX", None, tf.distribute.ReduceOp.SUM):
        result = result_of(
            lambda op=op: strategy.reduce(op, per_replica(strategy, SCALARS), axis=None)
        )
        yield {
            "name": "operation",
            "value": stored(SCALARS, replicas),
            "results": [[op and str(op), None, result]],
        }
    as_list = result_of(
        lambda: strategy.reduce("SUM", per_replica(strategy, MATRICES), axis=[0, 1])
    )
    yield {
        "name": "axis as a list",
        "value": stored(MATRICES, replicas),
        "results": [["SUM", [0, 1], as_list]],
    }


def gather(replicas: int) -> Iterator[Entry]:
    """`strategy.gather`: "results" holds [axis, result]."""
    strategy = mirrored(replicas)
    for name, (components, axes) in GATHERED.items():
        value = per_replica(strategy, components)
        results = [
            [axis, result_of(lambda v=value, axis=axis: strategy.gather(v, axis=axis))]
            for axis in axes
        ]
        yield {"name": name, "value": stored(components, replicas), "results": results}
    for name, plain in {
        "plain matrix": MATRICES[0],
        "plain scalar": SCALARS[0],
        "python int": 3,
    }.items():
        result = result_of(lambda plain=plain: strategy.gather(_tensors(plain), axis=0))
        yield {"name": name, "value": encode(plain), "results": [[0, result]]}


MISMATCHES = {
    "ragged rows": (RAGGED_ROWS, 1),
    "ragged columns": (RAGGED_COLUMNS, 0),
    "mixed ranks": (MIXED_RANKS, 0),
}


def mismatch(replicas: int, collective: str, name: str) -> Iterator[Entry]:
    """A value that `gather` or `all_gather` cannot take: alone, because every later
    collective fails after it.
    """
    strategy = mirrored(replicas)
    components, axis = MISMATCHES[name]
    if collective == "gather":
        result = result_of(
            lambda: strategy.gather(per_replica(strategy, components), axis=axis)
        )
    else:
        result = _in_run(strategy, scenario.all_gather(session, axis), components)
    yield {
        "name": name,
        "value": stored(components, replicas),
        "results": [[axis, result]],
    }


def mismatches(collective: str) -> list[Callable[[int], Iterator[Entry]]]:
    """One topic per mismatch."""
    return [partial(mismatch, collective=collective, name=name) for name in MISMATCHES]


def all_reduce(replicas: int) -> Iterator[Entry]:
    """`ReplicaContext.all_reduce` of structures: "results" holds [operation, result]."""
    strategy = mirrored(replicas)
    for name, components in STRUCTURES.items():
        results = [
            [op, _in_run(strategy, scenario.all_reduce(session, op), components)]
            for op in ("SUM", "MEAN")
        ]
        yield {"name": name, "value": stored(components, replicas), "results": results}


def all_gather(replicas: int) -> Iterator[Entry]:
    """`ReplicaContext.all_gather` along axes, of ragged values and of structures:
    "results" holds [axis, result].
    """
    strategy = mirrored(replicas)
    for name, (components, axes) in GATHERED.items():
        results = [
            [axis, _in_run(strategy, scenario.all_gather(session, axis), components)]
            for axis in axes
        ]
        yield {"name": name, "value": stored(components, replicas), "results": results}


def gradients(replicas: int) -> Iterator[Entry]:
    """The gradient, on each replica, through each collective."""
    strategy = mirrored(replicas)
    even = [np.asarray([1, 2], F32) * (index + 1) for index in range(4)]
    for collective in ("SUM", "MEAN", "all_gather", "ragged all_gather"):
        vectors = RAGGED_VECTORS if "ragged" in collective else even
        components = list(zip(vectors, COEFFICIENTS, strict=True))
        for power in (1, 2):
            step = scenario.gradient(session, collective, power)
            yield {
                "collective": collective,
                "power": power,
                "value": stored(components, replicas),
                "result": _in_run(strategy, step, components),
            }


def merge_call(replicas: int) -> Iterator[Entry]:
    """What each replica gets back from a merge function, by what that returns."""
    strategy = mirrored(replicas)
    for name, step in scenario.merge_calls(session).items():
        yield {
            "name": name,
            "value": stored(SCALARS, replicas),
            "result": _in_run(strategy, step, SCALARS),
        }


def _in_run(strategy: tf.distribute.Strategy, step: Any, components: Any) -> JSON:
    """The result of `step` run on the components."""
    return result_of(
        lambda: strategy.run(step, args=(per_replica(strategy, components),))
    )


def _tensors(value: Any) -> Any:
    return tf.nest.map_structure(
        lambda x: tf.constant(x) if isinstance(x, (np.generic, np.ndarray)) else x,
        value,
    )
