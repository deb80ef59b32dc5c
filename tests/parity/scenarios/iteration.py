"""How distributed datasets are iterated, reduced and misused."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from .side import Calls, Side, scoped

Dataset = Callable[..., Any]
"""Distributes a range of so many rows, in batches of 4."""


def iteration(side: Side, strategy: Any) -> Calls:
    """Iterators, their ends, `reduce`, use in functions; what cannot be distributed."""

    def dataset(rows: int = 6) -> Any:
        return strategy.experimental_distribute_dataset(
            tf.data.Dataset.range(rows).batch(4)
        )

    def encoded(values: Iterable[Any]) -> list[Any]:
        return [side.encoded(value=value, strategy=strategy) for value in values]

    return {
        **_iterators(side, dataset, encoded),
        **_optionals(dataset),
        **_as_a_collection(side, dataset),
        **_reductions(side, strategy, dataset),
        **_runs(side, strategy, dataset, encoded),
        **_distributed(side, strategy, dataset),
        "reduce SUM of a tail": lambda: encoded(
            strategy.reduce("SUM", element, axis=0) for element in dataset(9)
        ),
        "reduce MEAN of a tail": lambda: encoded(
            strategy.reduce("MEAN", element, axis=0) for element in dataset(9)
        ),
        "gather of a tail": lambda: encoded(
            strategy.gather(element, axis=0) for element in dataset(9)
        ),
    }


def _iterators(side: Side, dataset: Dataset, encoded: Any) -> Calls:
    def class_of(value: Any) -> list[Any]:
        classes = (
            side.distribute.DistributedDataset,
            side.distribute.DistributedIterator,
        )
        return [type(value).__name__, *(isinstance(value, cls) for cls in classes)]

    def itself() -> bool:
        iterator = iter(dataset())
        return iterator is iter(iterator)

    def interleaved() -> Any:
        distributed = dataset(10)
        first, second = iter(distributed), iter(distributed)
        return encoded(next(iterator) for iterator in (first, second, first, second))

    def partly() -> Any:
        distributed = dataset(10)
        first = iter(distributed)
        next(first)
        return encoded(next(it) for it in (first, iter(distributed)))

    def twice() -> list[int]:
        distributed = dataset()
        return [0, sum(1 for _ in distributed), sum(1 for _ in distributed)]

    return {
        "class of the dataset": lambda: class_of(dataset()),
        "class of the iterator": lambda: class_of(iter(dataset())),
        "iter of the iterator is itself": itself,
        "two iterators of one dataset": interleaved,
        "a new iterator starts over": partly,
        "for twice": twice,
        "next at the end": lambda: next(_at_the_end(dataset)),
        "next again at the end": lambda: [
            next(iterator := _at_the_end(dataset), None),
            next(iterator, None),
        ],
    }


def _at_the_end(dataset: Dataset, rows: int = 6) -> Any:
    """An iterator that has no more elements."""
    iterator = iter(dataset(rows))
    for _ in iterator:
        pass
    return iterator


def _optionals(dataset: Dataset) -> Calls:
    def optional() -> Any:
        return iter(dataset()).get_next_as_optional()

    def has_value(rows: int, steps: int) -> list[bool]:
        iterator = iter(dataset(rows))
        return [bool(iterator.get_next_as_optional().has_value()) for _ in range(steps)]

    return {
        "get_next": lambda: iter(dataset()).get_next(),
        "get_next at the end": lambda: _at_the_end(dataset).get_next(),
        "get_next at the end, full batches": lambda: _at_the_end(
            dataset, rows=8
        ).get_next(),
        "get_next_as_optional": lambda: optional().get_value(),
        "get_next_as_optional has_value": lambda: has_value(6, 4),
        "get_next_as_optional has_value, empty": lambda: has_value(0, 2),
        "get_next_as_optional get_value at the end": lambda: (
            _at_the_end(dataset).get_next_as_optional().get_value()
        ),
        "class of the optional": lambda: type(optional()).__name__,
    }


def _as_a_collection(side: Side, dataset: Dataset) -> Calls:
    return {
        "iterator element_spec": lambda: iter(dataset()).element_spec,
        "next of the dataset": lambda: next(dataset()),
        "len of the dataset": lambda: len(dataset()),
        "len of the iterator": lambda: len(iter(dataset())),
        "truth of the dataset": lambda: bool(dataset(0)),
        "index of the dataset": lambda: dataset()[0],
        "map of the dataset": lambda: dataset().map(lambda x: x),
        "cardinality": lambda: [side.cardinality(dataset(n)) for n in (0, 6, 8)],
        "enumerate": lambda: [index for index, _ in enumerate(dataset(10))],
    }


def _reductions(side: Side, strategy: Any, dataset: Dataset) -> Calls:
    zero = side.tensor(np.int64(0))

    def total(state: Any, element: Any) -> Any:
        return state + strategy.reduce("SUM", element, axis=0)

    def sizes(state: Any, element: Any) -> Any:
        return state + strategy.reduce(
            "SUM", strategy.run(side.size, (element,)), axis=None
        )

    @side.function
    def loop(elements: Any) -> Any:
        state = zero
        for element in elements:
            state = total(state, element)
        return state

    return {
        "reduce": lambda: dataset(10).reduce(zero, total),
        "reduce, empty": lambda: dataset(0).reduce(zero, total),
        "reduce of sizes": lambda: dataset(9).reduce(side.tensor(0), sizes),
        "loop in a function": lambda: loop(dataset(10)),
        "loop in a function, full batches": lambda: loop(dataset(8)),
        "loop in a function over an iterator": lambda: loop(iter(dataset(10))),
    }


def _runs(side: Side, strategy: Any, dataset: Dataset, encoded: Any) -> Calls:
    return {
        "run of next": lambda: strategy.run(side.size, (next(iter(dataset())),)),
        "run of the last": lambda: encoded(
            strategy.run(side.size, (element,)) for element in dataset(9)
        ),
        "in scope": lambda: scoped(strategy, lambda: next(iter(dataset()))),
        "distribute in run": lambda: strategy.run(lambda: next(iter(dataset()))),
        "iter in run": lambda: strategy.run(lambda d: next(iter(d)), (dataset(),)),
        "next in run": lambda: strategy.run(next, (iter(dataset()),)),
        "get_next in run": lambda: strategy.run(
            lambda iterator: iterator.get_next(), (iter(dataset()),)
        ),
    }


def _distributed(side: Side, strategy: Any, dataset: Dataset) -> Calls:
    distribute = strategy.experimental_distribute_dataset
    whole = tf.data.Dataset.range(8).batch(4)
    static = whole.map(lambda x: tf.ensure_shape(x, [4]))
    values: Calls = {
        "a distributed dataset": dataset,
        "a list": lambda: [1, 2],
        "an array": lambda: side.tensor(range(8)),
        "none": lambda: None,
        "an iterator": lambda: iter(whole),
        "a function": lambda: lambda context: whole,
    }
    return {
        **{
            f"distribute {name}": lambda value=value: next(iter(distribute(value())))
            for name, value in values.items()
        },
        "distribute without a dataset": lambda: distribute(),
        "distribute with a dict as options": lambda: next(
            iter(distribute(whole, {"a": 1}))
        ),
        "text of element_spec": lambda: dataset().element_spec,
        "text of element_spec, static": lambda: distribute(static).element_spec,
    }
