"""Records what InputOptions change, and what OneDeviceStrategy and the default strategy
make of a dataset.
"""

from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from ..encoding import JSON
from ..pipelines import Steps, build, name_of
from ..scenarios.functions import attributes
from .datasets import distributed
from .elements import ENDLESS, elements_of
from .session import Entry, result_of

Mode = tf.distribute.InputReplicationMode


def options(replicas: int) -> Iterator[Entry]:
    """Every combination of InputOptions, for a dataset and for a function, each on a
    strategy of its own.
    """
    for replication in (Mode.PER_WORKER, Mode.PER_REPLICA):
        for fetch in (None, True, False):
            for place in (False, True):
                yield _with_options(
                    replicas,
                    experimental_replication_mode=replication,
                    experimental_fetch_to_device=fetch,
                    experimental_place_dataset_on_device=place,
                )
    for size in (0, 1, 2, 100, -1):
        for fetch in (True, False):
            yield _with_options(
                replicas,
                experimental_per_replica_buffer_size=size,
                experimental_fetch_to_device=fetch,
            )
    for wrong in (
        {"experimental_replication_mode": "PER_REPLICA"},
        {"experimental_replication_mode": None},
    ):
        yield _with_options(replicas, **wrong)
    default = tf.distribute.InputOptions()
    yield {
        "name": "defaults",
        "result": {name: _text(value) for name, value in default._asdict().items()},
    }
    yield {"name": "repr", "result": repr(default)}
    yield {
        "name": "is a tuple",
        "result": [isinstance(default, tuple), default == tf.distribute.InputOptions()],
    }
    yield {
        "name": "attributes are set",
        "result": result_of(
            lambda: setattr(default, "experimental_fetch_to_device", False)
        ),
    }
    yield {"name": "modes", "result": {mode.name: mode.value for mode in Mode}}


def _with_options(replicas: int, **arguments: Any) -> Entry:
    def distributed(from_function: bool) -> Any:
        strategy = tf.distribute.MirroredStrategy(
            [f"CPU:{index}" for index in range(replicas)]
        )
        options = tf.distribute.InputOptions(**arguments)
        whole = tf.data.Dataset.range(10).batch(4)
        if from_function:
            return strategy.distribute_datasets_from_function(
                lambda context: whole, options
            )
        return strategy.experimental_distribute_dataset(whole, options)

    return {
        "name": "combination",
        "options": {name: _text(value) for name, value in arguments.items()},
        "dataset": elements_of(lambda: distributed(False)),
        "function": elements_of(lambda: distributed(True)),
    }


def _text(value: Any) -> JSON:
    return value.name if isinstance(value, Mode) else value


def other_strategies(replicas: int) -> Iterator[Entry]:
    """OneDeviceStrategy and the default strategy, once."""
    if replicas > 1:
        return
    whole = tf.data.Dataset.range(10).batch(4)
    for name, strategy in {
        "OneDeviceStrategy": tf.distribute.OneDeviceStrategy("CPU:0"),
        "default": tf.distribute.get_strategy(),
    }.items():
        for steps in (
            [["range", 10], ["batch", 4]],
            [["range", 5]],
            [["range", 0], ["batch", 4]],
            [["range", 5], ["batch", 4], ["map", "dict"]],
            [["range", 5], ["batch", 4], ["map", "with scalar"]],
            [["range", 10], ["batch", 4], ["repeat"]],
        ):
            yield {"strategy": name, "call": "dataset"} | distributed(strategy, steps)
            yield {"strategy": name, "call": "function"} | _function_of(strategy, steps)
        returned = strategy.experimental_distribute_dataset(whole)
        yield {
            "strategy": name,
            "name": "what comes back",
            "is_the_dataset": returned is whole,
            "class": type(returned).__name__,
            "is_distributed_dataset": isinstance(
                returned, tf.distribute.DistributedDataset
            ),
            "class_of_iterator": type(iter(returned)).__name__,
            "is_distributed_iterator": isinstance(
                iter(returned), tf.distribute.DistributedIterator
            ),
            "class_of_function": type(
                strategy.distribute_datasets_from_function(lambda context: whole)
            ).__name__,
        }
        for value_name, value in {"a list": [1, 2, 3], "none": None}.items():
            yield {
                "strategy": name,
                "name": f"distribute {value_name}",
                "result": result_of(
                    lambda value=value, strategy=strategy: (
                        strategy.experimental_distribute_dataset(value)
                    )
                ),
            }
        yield {
            "strategy": name,
            "name": "a function that returns a list",
            "result": result_of(
                lambda strategy=strategy: strategy.distribute_datasets_from_function(
                    lambda c: [1, 2]
                )
            ),
        }
        for mode in (Mode.PER_WORKER, Mode.PER_REPLICA):
            for place in (False, True):
                options = tf.distribute.InputOptions(
                    experimental_replication_mode=mode,
                    experimental_place_dataset_on_device=place,
                )
                yield {
                    "strategy": name,
                    "name": "options",
                    "options": {
                        "experimental_replication_mode": mode.name,
                        "experimental_place_dataset_on_device": place,
                    },
                    "dataset": elements_of(
                        lambda options=options, strategy=strategy: (
                            strategy.experimental_distribute_dataset(whole, options)
                        )
                    ),
                    "function": elements_of(
                        lambda options=options, strategy=strategy: (
                            strategy.distribute_datasets_from_function(
                                lambda context: whole, options
                            )
                        )
                    ),
                }


def _function_of(strategy: tf.distribute.Strategy, steps: Steps) -> Entry:
    contexts: list[JSON] = []

    def dataset_fn(context: tf.distribute.InputContext) -> tf.data.Dataset:
        contexts.append(attributes(context))
        return build(steps)

    most = ENDLESS if build(steps).cardinality() == tf.data.INFINITE_CARDINALITY else 40
    elements = elements_of(
        lambda: strategy.distribute_datasets_from_function(dataset_fn), most
    )
    return {"name": name_of(steps), "dataset": steps, **elements, "contexts": contexts}
