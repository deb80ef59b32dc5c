"""Records how distributed datasets are iterated, reduced and misused."""

from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from .elements import spec
from .session import Entry, encoded, mirrored, result_of


def iteration(replicas: int) -> Iterator[Entry]:
    """Iterators and their ends, `reduce`, use in functions, and what cannot be
    distributed.
    """
    strategy = mirrored(replicas)

    def dataset(rows: int = 6, *, batch: int = 4) -> Any:
        return strategy.experimental_distribute_dataset(
            tf.data.Dataset.range(rows).batch(batch)
        )

    def after_end(call: Callable[[Any], Any], rows: int = 6) -> Callable[[], Any]:
        def run() -> Any:
            iterator = iter(dataset(rows))
            for _ in iterator:
                pass
            return call(iterator)

        return run

    def total(state: Any, element: Any) -> Any:
        return state + strategy.reduce("SUM", element, axis=0)

    def sizes(x: Any) -> Any:
        return tf.size(x)

    @tf.function
    def in_function(distributed: Any) -> Any:
        state = tf.constant(0, tf.int64)
        for element in distributed:
            state += strategy.reduce("SUM", element, axis=0)
        return state

    def partly() -> Any:
        distributed = dataset(10)
        first = iter(distributed)
        next(first)
        return [encoded(next(first)), encoded(next(iter(distributed)))]

    def interleaved() -> Any:
        distributed = dataset(10)
        first, second = iter(distributed), iter(distributed)
        return [encoded(next(iterator)) for iterator in (first, second, first, second)]

    def scoped(call: Callable[[], Any]) -> Any:
        with strategy.scope():
            return call()

    def optional(rows: int, steps: int) -> list[bool]:
        iterator = iter(dataset(rows))
        return [bool(iterator.get_next_as_optional().has_value()) for _ in range(steps)]

    def class_of(value: Any) -> list[Any]:
        distributed = (
            tf.distribute.DistributedDataset,
            tf.distribute.DistributedIterator,
        )
        return [type(value).__name__, *(isinstance(value, cls) for cls in distributed)]

    whole = tf.data.Dataset.range(8).batch(4)
    zero = tf.constant(0, tf.int64)
    cases: dict[str, Callable[[], Any]] = {
        "class of the dataset": lambda: class_of(dataset()),
        "class of the iterator": lambda: class_of(iter(dataset())),
        "iter of the iterator is itself": lambda: (
            (iterator := iter(dataset())) is iter(iterator)
        ),
        "two iterators of one dataset": interleaved,
        "a new iterator starts over": partly,
        "for twice": lambda: [
            (d := dataset()) and 0,
            sum(1 for _ in d),
            sum(1 for _ in d),
        ],
        "next at the end": after_end(next),
        "next again at the end": after_end(
            lambda iterator: [next(iterator, None), next(iterator, None)]
        ),
        "get_next": lambda: iter(dataset()).get_next(),
        "get_next at the end": after_end(lambda iterator: iterator.get_next()),
        "get_next at the end, full batches": after_end(
            lambda iterator: iterator.get_next(), rows=8
        ),
        "get_next_as_optional": lambda: (
            iter(dataset()).get_next_as_optional().get_value()
        ),
        "get_next_as_optional has_value": lambda: optional(6, 4),
        "get_next_as_optional has_value, empty": lambda: optional(0, 2),
        "get_next_as_optional get_value at the end": after_end(
            lambda iterator: iterator.get_next_as_optional().get_value()
        ),
        "class of the optional": lambda: (
            type(iter(dataset()).get_next_as_optional()).__name__
        ),
        "iterator element_spec": lambda: str(spec(iter(dataset()).element_spec)),
        "next of the dataset": lambda: next(dataset()),
        "len of the dataset": lambda: len(dataset()),
        "len of the iterator": lambda: len(iter(dataset())),
        "truth of the dataset": lambda: bool(dataset(0)),
        "index of the dataset": lambda: dataset()[0],
        "map of the dataset": lambda: dataset().map(lambda x: x),
        "cardinality": lambda: [int(dataset(n).cardinality) for n in (0, 6, 8)],
        "enumerate": lambda: [index for index, _ in enumerate(dataset(10))],
        "reduce": lambda: dataset(10).reduce(zero, total),
        "reduce, empty": lambda: dataset(0).reduce(zero, total),
        "reduce of sizes": lambda: dataset(9).reduce(
            tf.constant(0),
            lambda state, x: (
                state + strategy.reduce("SUM", strategy.run(sizes, (x,)), axis=None)
            ),
        ),
        "loop in a function": lambda: in_function(dataset(10)),
        "loop in a function, full batches": lambda: in_function(dataset(8)),
        "loop in a function over an iterator": lambda: in_function(iter(dataset(10))),
        "run of next": lambda: strategy.run(sizes, (next(iter(dataset())),)),
        "run of the last": lambda: [
            encoded(strategy.run(sizes, (element,))) for element in dataset(9)
        ],
        "in scope": lambda: scoped(lambda: next(iter(dataset()))),
        "distribute in run": lambda: strategy.run(lambda: next(iter(dataset()))),
        "iter in run": lambda: strategy.run(lambda d: next(iter(d)), (dataset(),)),
        "next in run": lambda: strategy.run(
            lambda iterator: next(iterator), (iter(dataset()),)
        ),
        "get_next in run": lambda: strategy.run(
            lambda iterator: iterator.get_next(), (iter(dataset()),)
        ),
        "distribute a distributed dataset": lambda: next(
            iter(strategy.experimental_distribute_dataset(dataset()))
        ),
        "distribute a list": lambda: next(
            iter(strategy.experimental_distribute_dataset([1, 2]))
        ),
        "distribute an array": lambda: next(
            iter(strategy.experimental_distribute_dataset(tf.range(8)))
        ),
        "distribute none": lambda: next(
            iter(strategy.experimental_distribute_dataset(None))
        ),
        "distribute an iterator": lambda: next(
            iter(strategy.experimental_distribute_dataset(iter(whole)))
        ),
        "distribute a function": lambda: next(
            iter(strategy.experimental_distribute_dataset(lambda c: whole))
        ),
        "distribute without a dataset": lambda: (
            strategy.experimental_distribute_dataset()
        ),
        "distribute with a dict as options": lambda: next(
            iter(strategy.experimental_distribute_dataset(whole, {"a": 1}))
        ),
        "text of element_spec": lambda: str(dataset().element_spec),
        "text of element_spec, static": lambda: str(
            strategy.experimental_distribute_dataset(
                whole.map(lambda x: tf.ensure_shape(x, [4]))
            ).element_spec
        ),
        "reduce SUM of a tail": lambda: [
            encoded(strategy.reduce("SUM", element, axis=0)) for element in dataset(9)
        ],
        "reduce MEAN of a tail": lambda: [
            encoded(strategy.reduce("MEAN", element, axis=0)) for element in dataset(9)
        ],
        "gather of a tail": lambda: [
            encoded(strategy.gather(element, axis=0)) for element in dataset(9)
        ],
    }
    for name, call in cases.items():
        yield {"name": name, "result": result_of(call)}
