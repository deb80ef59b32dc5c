"""Records how a dataset is split over the replicas of one worker."""

from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from ..pipelines import Steps, build, name_of, with_policy
from .elements import ENDLESS, MOST, plain, said_of, spec
from .session import Entry, mirrored, result_of

SIZES = (0, 1, 7, 8, 10, 16)
BATCHES = (1, 3, 4, 5, 8, 16)

PIPELINES: list[Steps] = [
    *([["range", n], ["batch", b]] for n in SIZES for b in BATCHES),
    *(
        [["range", n], ["batch", b, "drop_remainder"]]
        for n in (0, 7, 10)
        for b in (3, 4, 5, 8)
    ),
    # Batches that end before a repeat, and others that run over it
    [["range", 10], ["batch", 4], ["repeat", 2]],
    [["range", 10], ["batch", 5], ["repeat", 3]],
    [["range", 5], ["batch", 4], ["repeat", 3]],
    [["range", 1], ["batch", 4], ["repeat", 5]],
    [["range", 10], ["repeat", 2], ["batch", 4]],
    [["range", 3], ["repeat", 3], ["batch", 4]],
    [["range", 10], ["batch", 4, "drop_remainder"], ["repeat", 2]],
    [["range", 10], ["batch", 4], ["repeat", 0]],
    # What may follow a batch
    [["range", 10], ["batch", 4], ["prefetch", 2]],
    [["range", 10], ["batch", 4], ["cache"]],
    [["range", 10], ["batch", 4], ["take", 2]],
    [["range", 10], ["batch", 4], ["skip", 1]],
    [["range", 10], ["batch", 4], ["shard", 2, 0]],
    [["range", 10], ["batch", 4], ["map", "same"]],
    [["range", 10], ["batch", 5], ["map", "same"]],
    [["range", 10], ["batch", 5, "drop_remainder"], ["map", "same"]],
    [["range", 10], ["batch", 5], ["map", "same"], ["repeat", 2]],
    [["range", 10], ["batch", 4], ["filter", "first is even"]],
    [["range", 10], ["batch", 3], ["filter", "first is even"]],
    [["range", 10], ["batch", 2], ["unbatch"], ["batch", 4]],
    [["range", 5], ["batch", 4], ["concatenate", [["range", 4], ["batch", 4]]]],
    [["range", 5], ["batch", 4], ["concatenate", [["range", 5], ["batch", 3]]]],
    [["zip", [[["range", 10], ["batch", 4]], [["range", 10], ["batch", 4]]]]],
    [["zip", [[["range", 10], ["batch", 4]], [["range", 10], ["batch", 2]]]]],
    [
        [
            "zip",
            [
                [["range", 8], ["batch", 4, "drop_remainder"]],
                [["range", 4], ["batch", 2, "drop_remainder"]],
            ],
        ]
    ],
    [["range", 16], ["batch", 2], ["batch", 4]],
    [["range", 7], ["batch", 2, "drop_remainder"], ["batch", 5]],
    # Without a batch
    [["range", 10]],
    [["range", 10], ["map", "row"]],
    [["range", 6], ["map", "row of its length"]],
    [["range", 10], ["batch", 4], ["unbatch"]],
    # Batches of no static size
    [["generator", [4, 4, 2]]],
    [["generator", [5, 3, 1, 0, 2]]],
    [["generator", [1, 8]]],
    [["generator", [0]]],
    [["generator", []]],
    [["range", 10], ["map", "row of its length"], ["padded_batch", 4]],
    [["range", 10], ["map", "row of its length"], ["ragged_batch", 4]],
    [["range", 10], ["map", "row of its length"], ["bucket", 4]],
    [["range", 10], ["window", 4]],
    [["range", 10], ["window_batch", 4]],
    # Endless
    [["range", 10], ["repeat"], ["batch", 4]],
    [["range", 10], ["batch", 4], ["repeat"]],
    [["range", 10], ["batch", 5], ["repeat"]],
    [["range", 3], ["batch", 4], ["repeat"]],
    [["range", 10], ["batch", 4, "drop_remainder"], ["repeat"]],
]

POLICIES = ("AUTO", "FILE", "DATA", "HINT", "OFF")
POLICY_PIPELINES: list[Steps] = [
    [["range", 10], ["batch", 4]],
    [["range", 10], ["batch", 5]],
    [["range", 7], ["batch", 3]],
    [["range", 11], ["batch", 6]],
    [["range", 5], ["batch", 4], ["repeat", 2]],
    [["range", 9], ["batch", 4], ["repeat", 2]],
    [["range", 10], ["batch", 4], ["map", "same"]],
    [["range", 10], ["batch", 4, "drop_remainder"]],
    [["range", 10], ["batch", 5, "drop_remainder"]],
    [["generator", [4, 4, 2]]],
    [["generator", [5, 3, 1, 0, 2]]],
    [["range", 10]],
]

STRUCTURES = (
    "tuple",
    "tuple of one",
    "dict",
    "named tuple",
    "nested",
    "list",
    "with none",
    "with empty tuple",
    "with scalar",
    "with constant row",
    "with half",
    "matrix",
    "ragged",
    "sparse",
    "string",
    "bool",
    "all dtypes",
)


def distribute_dataset(replicas: int) -> Iterator[Entry]:
    """What each replica gets of each pipeline."""
    for steps in PIPELINES:
        yield distributed(mirrored(replicas), steps)


def structures(replicas: int) -> Iterator[Entry]:
    """What becomes of elements with several components, and of other dtypes."""
    strategy = mirrored(replicas)
    for name in STRUCTURES:
        for rows in (4, 5):
            steps: Steps = [["range", rows], ["batch", 4], ["map", name]]

            def local(steps: Steps = steps) -> Any:
                dataset = strategy.experimental_distribute_dataset(build(steps))
                return strategy.experimental_local_results(next(iter(dataset)))

            yield distributed(strategy, steps) | {"local_results": result_of(local)}


def policies(replicas: int) -> Iterator[Entry]:
    """What the AutoShardPolicy of a dataset changes for one worker: which of two ways
    splits a batch.
    """
    strategy = mirrored(replicas)
    hint: Steps = [["range", 10], ["shard_hint"], ["batch", 4]]
    for policy in POLICIES:
        for steps in [*POLICY_PIPELINES, hint]:
            yield {"policy": policy} | distributed(strategy, steps, policy)


def distributed(
    strategy: tf.distribute.Strategy, steps: Steps, policy: str = "AUTO"
) -> Entry:
    """The entry of one pipeline: the whole dataset's elements, and those of the
    distributed dataset.
    """
    dataset = build(steps)
    endless = dataset.cardinality() == tf.data.INFINITE_CARDINALITY
    most = ENDLESS if endless else MOST
    entry: Entry = {
        "name": name_of(steps),
        "dataset": steps,
        "spec": spec(dataset.element_spec),
    }
    if ["shard_hint"] not in steps:
        entry["whole"] = plain(dataset, most)

    def distribute() -> Any:
        return strategy.experimental_distribute_dataset(
            with_policy(build(steps), policy)
        )

    return entry | said_of(distribute, most)
