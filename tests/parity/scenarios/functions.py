"""What functions of datasets may return and do, and what their contexts say."""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from ..encoding import JSON
from .side import Calls, Side


def attributes(context: Any) -> dict[str, JSON]:
    """What an InputContext says."""
    names = ("num_input_pipelines", "input_pipeline_id", "num_replicas_in_sync")
    return {name: getattr(context, name) for name in names} | {"str": str(context)}


def function_misuse(side: Side, strategy: Any) -> Calls:
    """What is no function of datasets, or returns none, and how often one is called."""
    whole = tf.data.Dataset.range(8).batch(2)

    def distributed(dataset_fn: Any) -> Any:
        return strategy.distribute_datasets_from_function(dataset_fn)

    def fails(context: Any) -> Any:
        raise KeyError("missing")

    def batched(size: int) -> Callable[[Any], Any]:
        return lambda context: tf.data.Dataset.range(16).batch(
            context.get_per_replica_batch_size(size)
        )

    functions: dict[str, Any] = {
        "returns a list": lambda context: [1, 2, 3],
        "returns none": lambda context: None,
        "returns a tensor": lambda context: side.tensor(range(8)),
        "returns an array": lambda context: np.arange(8),
        "returns an iterator": lambda context: iter(whole),
        "returns a generator": lambda context: ((np.full(2, i),) for i in range(4)),
        "returns a distributed dataset": lambda context: (
            strategy.experimental_distribute_dataset(whole)
        ),
        "raises": fails,
        "takes nothing": lambda: whole,
        "not a function": whole,
        "none": None,
    }
    batches = {f"per replica batch of {size}": batched(size) for size in (8, 6, 0)}

    def first(functions: dict[str, Any]) -> Calls:
        return {
            name: lambda fn=fn: next(iter(distributed(fn)))
            for name, fn in functions.items()
        }

    return {
        **first(functions),
        **_calls(distributed, whole),
        **first(batches),
        **_uses(side, strategy, distributed, whole),
    }


def _calls(distributed: Callable[[Any], Any], whole: Any) -> Calls:
    """How often a function is called."""

    def count(iterate: int) -> int:
        calls: list[int] = []
        dataset = distributed(
            lambda context: calls.append(context.input_pipeline_id) or whole
        )
        for _ in range(iterate):
            next(iter(dataset))
        return len(calls)

    return {
        "calls when distributed": lambda: count(0),
        "calls when iterated once": lambda: count(1),
        "calls when iterated three times": lambda: count(3),
    }


def _uses(
    side: Side, strategy: Any, distributed: Callable[[Any], Any], whole: Any
) -> Calls:
    """Where a function is called, and what its dataset is."""
    distribute = side.distribute

    def dataset() -> Any:
        return distributed(lambda context: whole)

    def places() -> list[Any]:
        noted: list[Any] = []

        def note(context: Any) -> Any:
            own = distribute.get_strategy() is strategy
            noted.extend([distribute.in_cross_replica_context(), own])
            return whole

        distributed(note)
        with strategy.scope():
            distributed(note)
        return noted

    def two_iterators() -> list[Any]:
        found = dataset()
        pair = [next(iter(found)), next(iter(found))]
        return [0, *(side.encoded(value=x, strategy=strategy) for x in pair)]

    return {
        "context in the function, outside scope and in it": places,
        "class": lambda: [
            type(dataset()).__name__,
            isinstance(dataset(), distribute.DistributedDataset),
        ],
        "iterator class": lambda: isinstance(
            iter(dataset()), distribute.DistributedIterator
        ),
        "reduce": lambda: dataset().reduce(
            side.tensor(np.int64(0)),
            lambda state, x: state + strategy.reduce("SUM", x, axis=0),
        ),
        "two iterators": two_iterators,
        "in run": lambda: strategy.run(lambda: next(iter(dataset()))),
    }
