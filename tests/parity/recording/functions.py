"""Records `distribute_datasets_from_function`: calls, contexts, elements, ends and
mistakes.
"""

from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from ..encoding import JSON
from ..pipelines import Steps, build, name_of
from ..scenarios import functions
from ..scenarios.functions import attributes
from . import session
from .elements import ENDLESS, MOST, elements_of, plain, said_of, spec
from .session import Entry, mirrored, result_of, results

Mode = tf.distribute.InputReplicationMode

FUNCTIONS: list[Steps] = [
    [["range", 0], ["batch", 2]],
    [["range", 1], ["batch", 2]],
    [["range", 7], ["batch", 2]],
    [["range", 8], ["batch", 2]],
    [["range", 10], ["batch", 2]],
    [["range", 11], ["batch", 2]],
    [["range", 16], ["batch", 2]],
    [["range", 7], ["batch", 2, "drop_remainder"]],
    [["range", 8], ["batch", 2, "drop_remainder"]],
    [["range", 10], ["batch", 2, "drop_remainder"]],
    [["range", 12], ["batch", 2, "drop_remainder"]],
    [["range", 5], ["batch", 2], ["repeat", 2]],
    [["range", 10], ["batch", 2], ["repeat"]],
    [["range", 5]],
    [["range", 8]],
    [["range", 5], ["map", "row"]],
    [["range", 5], ["map", "row of its length"]],
    [["generator", [3, 1, 2, 4, 5]]],
    [["range", 5], ["batch", 2], ["map", "dict"]],
    [["range", 5], ["batch", 2], ["map", "nested"]],
    [["range", 5], ["batch", 2], ["map", "matrix"]],
    [["range", 5], ["batch", 2], ["map", "string"]],
    [["range", 5], ["batch", 2], ["map", "with scalar"]],
    [["range", 5], ["batch", 2], ["map", "with none"]],
    [["range", 5], ["map", "row of its length"], ["padded_batch", 2]],
]


APART: list[list[Steps]] = [  # for each replica its own, which end apart
    [
        [["range", 0, 3], ["batch", 2]],
        [["range", 10, 18], ["batch", 2]],
        [["range", 0], ["batch", 2]],
        [["range", 5], ["batch", 2]],
    ],
    [
        [["range", 100 * i, 100 * i + n], ["batch", 2, "drop_remainder"]]
        for i, n in enumerate((8, 4, 7, 2))
    ],
    [[["range", 100 * i, 100 * i + n]] for i, n in enumerate((3, 5, 4, 1))],
    [[["generator", sizes]] for sizes in ([2, 2], [3, 1, 2], [], [1])],
]


def from_function(replicas: int) -> Iterator[Entry]:
    """`distribute_datasets_from_function`: calls, contexts, elements and ends, for both
    modes of replication.
    """
    for mode in (Mode.PER_WORKER, Mode.PER_REPLICA):
        for steps in FUNCTIONS:
            yield _from_function(replicas, mode, steps)
    for by_replica in APART:
        for fetch in (True, False):
            yield _apart(replicas, by_replica[:replicas], fetch)


def _apart(replicas: int, by_replica: list[Steps], fetch: bool) -> Entry:
    strategy = tf.distribute.MirroredStrategy(
        [f"CPU:{index}" for index in range(replicas)]
    )
    options = tf.distribute.InputOptions(
        experimental_replication_mode=Mode.PER_REPLICA,
        experimental_fetch_to_device=fetch,
    )
    contexts: list[JSON] = []

    def dataset_fn(context: tf.distribute.InputContext) -> tf.data.Dataset:
        contexts.append(attributes(context))
        return build(by_replica[context.input_pipeline_id])

    elements = elements_of(
        lambda: strategy.distribute_datasets_from_function(dataset_fn, options)
    )
    name = " and ".join(map(name_of, by_replica))
    entry: Entry = {
        "name": name,
        "mode": "PER_REPLICA",
        "fetch_to_device": fetch,
        "datasets": by_replica,
    }
    return entry | elements | {"contexts": contexts}


def _from_function(replicas: int, mode: Any, steps: Steps) -> Entry:
    strategy = tf.distribute.MirroredStrategy(
        [f"CPU:{index}" for index in range(replicas)]
    )
    contexts: list[JSON] = []

    def dataset_fn(context: tf.distribute.InputContext) -> tf.data.Dataset:
        contexts.append(attributes(context))
        return build(steps)

    options = tf.distribute.InputOptions(
        experimental_replication_mode=mode,
        experimental_fetch_to_device=mode is Mode.PER_WORKER,  # else it is refused
    )
    whole = build(steps)
    endless = whole.cardinality() == tf.data.INFINITE_CARDINALITY
    entry: Entry = {"name": name_of(steps), "mode": mode.name, "dataset": steps}
    entry["spec"] = spec(whole.element_spec)
    entry["whole"] = plain(whole, ENDLESS * replicas if endless else MOST)
    return entry | said_of(
        lambda: strategy.distribute_datasets_from_function(dataset_fn, options),
        ENDLESS if endless else MOST,
        contexts=contexts,
    )


def function_misuse(replicas: int) -> Iterator[Entry]:
    """What a dataset function may return and do, and what its context answers there."""
    return results(functions.function_misuse(session, mirrored(replicas)))


def input_context(replicas: int) -> Iterator[Entry]:
    """InputContexts made by hand."""
    Context = tf.distribute.InputContext
    for name, arguments in {
        "defaults": {},
        "all": {
            "num_input_pipelines": 4,
            "input_pipeline_id": 2,
            "num_replicas_in_sync": 8,
        },
        "id out of range": {"num_input_pipelines": 2, "input_pipeline_id": 5},
        "negative id": {"input_pipeline_id": -1},
        "no replicas": {"num_replicas_in_sync": 0},
    }.items():
        yield {
            "name": name,
            "arguments": arguments,
            "result": attributes(Context(**arguments)),
        }
    for size in (0, 1, 4, 6, 8, -8, 8.0, True, None, "8"):
        context = Context(num_replicas_in_sync=replicas)
        result = result_of(
            lambda size=size, context=context: context.get_per_replica_batch_size(size)
        )
        yield {"name": "get_per_replica_batch_size", "size": size, "result": result}
    yield {
        "name": "get_per_replica_batch_size of no replicas",
        "result": result_of(
            lambda: Context(num_replicas_in_sync=0).get_per_replica_batch_size(8)
        ),
    }
    yield {"name": "equal", "result": Context() == Context()}
    yield {
        "name": "repr is the default one",
        "result": repr(Context()).startswith("<tensorflow.python.distribute."),
    }
    yield {
        "name": "set",
        "result": result_of(lambda: setattr(Context(), "input_pipeline_id", 1)),
    }
    yield {
        "name": "new attribute",
        "result": result_of(lambda: setattr(Context(), "other", 1)),
    }
    yield {"name": "positional", "result": attributes(Context(3, 1, 6))}
    yield {
        "name": "public",
        "result": [name for name in dir(Context) if not name.startswith("_")],
    }
