"""Distributed datasets in use against TensorFlow: iterators, `reduce`, `run`, options,
the other strategies.
"""

import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow as tf

import keras_distribute as kd
from keras_distribute import errors

from .comparing import check_error
from .differences import because
from .distributing import (
    as_ours,
    assert_result,
    assert_spec,
    by_split,
    elements_of,
    entries,
    pipeline,
)
from .encoding import is_error
from .ours import encoded, mirrored

IN_RUN = ("distribute in run", "iter in run", "next in run", "get_next in run")


@pytest.mark.sampled(3)
@entries("iteration")
def test_iteration(entry):
    strategy, name, expected = (
        mirrored(entry["replicas"]),
        entry["name"],
        entry["result"],
    )
    call = iteration(strategy)[name]
    if name in IN_RUN:
        assert because("iterating in run")
        check_error(call, {"error": "RuntimeError"})
    elif name == "len of the dataset":
        assert because("lengths")
        assert call() == 2
    elif name.startswith("get_next at the end"):
        assert because("op errors")
        with pytest.raises(StopIteration) as raised:
            call()
        assert isinstance(raised.value, errors.OutOfRangeError)
        assert "Fix:" in str(raised.value)
    elif name == "distribute with a dict as options":
        assert because("not a dataset")
        check_error(call, {"error": "TypeError"})
    elif name.startswith("distribute ") and name != "distribute without a dataset":
        assert because("not a dataset")
        check_error(call, {"error": "ValueError"})
    elif is_error(expected):  # of Python itself, but for the empty optional
        check_error(call, expected, fix=expected["error"] == "Exception")
    elif name == "class of the optional":
        assert call() == "Optional"
    elif "element_spec" in name:
        assert call() == kd.ElementSpec((None,), "int64")
        if "static" in name and entry["replicas"] < 4:
            assert because("static specs")
            assert "None" not in expected.replace("name=None", "")
    else:
        assert_result(strategy, call(), expected)


def iteration(strategy):
    """The same calls as in the record."""
    whole = tf.data.Dataset.range(8).batch(4)

    def dataset(rows=6):
        return strategy.experimental_distribute_dataset(
            tf.data.Dataset.range(rows).batch(4)
        )

    def after_end(call, rows=6):
        def run():
            iterator = iter(dataset(rows))
            for _ in iterator:
                pass
            return call(iterator)

        return run

    def total(state, element):
        return state + strategy.reduce("SUM", element, axis=0)

    def sizes(x):
        return jnp.asarray(x.size)

    def in_function(elements):
        state = 0
        for element in elements:
            state += strategy.reduce("SUM", element, axis=0)
        return state

    def partly():
        distributed = dataset(10)
        first = iter(distributed)
        next(first)
        return [next(first), next(iter(distributed))]

    def interleaved():
        distributed = dataset(10)
        first, second = iter(distributed), iter(distributed)
        return [next(iterator) for iterator in (first, second, first, second)]

    def optional(rows, steps):
        iterator = iter(dataset(rows))
        return [iterator.get_next_as_optional().has_value() for _ in range(steps)]

    def class_of(value):
        distributed = (kd.DistributedDataset, kd.DistributedIterator)
        return [type(value).__name__, *(isinstance(value, cls) for cls in distributed)]

    def scoped():
        with strategy.scope():
            return next(iter(dataset()))

    def twice():
        distributed = dataset()
        return [0, sum(1 for _ in distributed), sum(1 for _ in distributed)]

    def itself():
        iterator = iter(dataset())
        return iterator is iter(iterator)

    def distributed_of(value):
        return lambda: next(iter(strategy.experimental_distribute_dataset(value())))

    return {
        "class of the dataset": lambda: class_of(dataset()),
        "class of the iterator": lambda: class_of(iter(dataset())),
        "iter of the iterator is itself": itself,
        "two iterators of one dataset": interleaved,
        "a new iterator starts over": partly,
        "for twice": twice,
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
            lambda i: i.get_next_as_optional().get_value()
        ),
        "class of the optional": lambda: (
            type(iter(dataset()).get_next_as_optional()).__name__
        ),
        "iterator element_spec": lambda: iter(dataset()).element_spec,
        "next of the dataset": lambda: next(dataset()),
        "len of the dataset": lambda: len(dataset()),
        "len of the iterator": lambda: len(iter(dataset())),
        "truth of the dataset": lambda: bool(dataset(0)),
        "index of the dataset": lambda: dataset()[0],
        "map of the dataset": lambda: dataset().map(lambda x: x),
        "cardinality": lambda: [len(dataset(rows)) for rows in (0, 6, 8)],
        "enumerate": lambda: [index for index, _ in enumerate(dataset(10))],
        "reduce": lambda: dataset(10).reduce(0, total),
        "reduce, empty": lambda: dataset(0).reduce(0, total),
        "reduce of sizes": lambda: dataset(9).reduce(
            0,
            lambda state, x: (
                state + strategy.reduce("SUM", strategy.run(sizes, (x,)), axis=None)
            ),
        ),
        "loop in a function": lambda: in_function(dataset(10)),
        "loop in a function, full batches": lambda: in_function(dataset(8)),
        "loop in a function over an iterator": lambda: in_function(iter(dataset(10))),
        "run of next": lambda: strategy.run(sizes, (next(iter(dataset())),)),
        "run of the last": lambda: [
            strategy.run(sizes, (element,)) for element in dataset(9)
        ],
        "in scope": scoped,
        "distribute in run": lambda: strategy.run(lambda: next(iter(dataset()))),
        "iter in run": lambda: strategy.run(lambda d: next(iter(d)), (dataset(),)),
        "next in run": lambda: strategy.run(
            lambda iterator: next(iterator), (iter(dataset()),)
        ),
        "get_next in run": lambda: strategy.run(
            lambda iterator: iterator.get_next(), (iter(dataset()),)
        ),
        "distribute a distributed dataset": distributed_of(dataset),
        "distribute a list": distributed_of(lambda: [1, 2]),
        "distribute an array": distributed_of(lambda: np.arange(8)),
        "distribute none": distributed_of(lambda: None),
        "distribute an iterator": distributed_of(lambda: iter(whole)),
        "distribute a function": distributed_of(lambda: lambda context: whole),
        "distribute without a dataset": lambda: (
            strategy.experimental_distribute_dataset()
        ),
        "distribute with a dict as options": lambda: (
            strategy.experimental_distribute_dataset(whole, {"a": 1})
        ),
        "text of element_spec": lambda: dataset().element_spec,
        "text of element_spec, static": lambda: (
            strategy.experimental_distribute_dataset(
                whole.map(lambda x: tf.ensure_shape(x, [4]))
            ).element_spec
        ),
        "reduce SUM of a tail": lambda: [
            strategy.reduce("SUM", element, axis=0) for element in dataset(9)
        ],
        "reduce MEAN of a tail": lambda: [
            strategy.reduce("MEAN", element, axis=0) for element in dataset(9)
        ],
        "gather of a tail": lambda: [
            strategy.gather(element, axis=0) for element in dataset(9)
        ],
    }


@entries("options", where=lambda entry: entry["name"] == "combination")
def test_options(entry):
    strategy, arguments = mirrored(entry["replicas"]), dict(entry["options"])
    mode = arguments.get("experimental_replication_mode", "PER_WORKER")
    if mode is None or (
        mode == "PER_REPLICA" and len(arguments) == 1
    ):  # the text, not the member
        assert because("not a dataset")
        check_error(lambda: kd.InputOptions(**arguments), {"error": "TypeError"})
        return
    arguments["experimental_replication_mode"] = kd.InputReplicationMode[mode]
    if (
        arguments.get("experimental_place_dataset_on_device")
        or arguments.get("experimental_per_replica_buffer_size") == -1
    ):
        assert because("options of our own")
        check_error(lambda: kd.InputOptions(**arguments), {"error": "ValueError"})
        return
    options = kd.InputOptions(**arguments)
    whole = tf.data.Dataset.range(10).batch(4)
    on_devices = arguments.get("experimental_fetch_to_device") is not False

    def check(call, recorded):
        if is_error(recorded["end"]):
            assert recorded["end"]["error"] == "NotImplementedError"
            assert because("op errors")
            check_error(call, {"error": "ValueError"})
            return
        elements, end = elements_of(strategy, call())
        assert (elements, end) == (
            as_ours(recorded["elements"], on_devices),
            recorded["end"],
        )

    check(
        lambda: strategy.experimental_distribute_dataset(whole, options),
        entry["dataset"],
    )
    check(
        lambda: strategy.distribute_datasets_from_function(
            lambda context: whole, options
        ),
        entry["function"],
    )


@entries("options", where=lambda entry: entry["name"] != "combination")
def test_the_options_themselves(entry):
    name, expected = entry["name"], entry["result"]
    default = kd.InputOptions()
    if name == "defaults":
        ours = {
            key: getattr(getattr(default, key), "name", getattr(default, key))
            for key in expected
        }
        assert because("options of our own")
        assert ours == expected | {
            "experimental_fetch_to_device": None,
            "experimental_per_replica_buffer_size": None,
        }
    elif name in ("repr", "is a tuple"):
        assert because("options of our own")
        assert repr(default).startswith("InputOptions(experimental_fetch_to_device=")
        assert default == kd.InputOptions() and not isinstance(default, tuple)
        with pytest.raises(TypeError, match="positional"):
            kd.InputOptions(True)
    elif name == "attributes are set":
        check_error(
            lambda: setattr(default, "experimental_fetch_to_device", False),
            expected,
            fix=False,
        )
    else:
        assert {mode.name: mode.value for mode in kd.InputReplicationMode} == expected


@entries(
    "other_strategies", where=lambda entry: entry["strategy"] == "OneDeviceStrategy"
)
def test_one_device_strategy(entry):
    strategy = kd.OneDeviceStrategy("cpu:1")
    whole = tf.data.Dataset.range(10).batch(4)
    if "call" in entry:
        contexts = []

        def dataset_fn(context):
            contexts.append(context)
            return pipeline(entry["dataset"])

        if entry["call"] == "dataset":
            dataset = strategy.experimental_distribute_dataset(
                pipeline(entry["dataset"])
            )
            assert_spec(dataset.element_spec, entry["element_spec"])
            assert dataset.layout.num_steps == (
                entry["cardinality"] if entry["cardinality"] >= 0 else None
            )
        else:
            dataset = strategy.distribute_datasets_from_function(dataset_fn)
            assert [str(context) for context in contexts] == [
                made["str"][14:] for made in entry["contexts"]
            ]
        most = len(entry["elements"]) if entry["end"] == "more" else 40
        assert elements_of(strategy, dataset, most) == (
            as_ours(entry["elements"]),
            entry["end"],
        )
    elif entry["name"] == "what comes back":
        distributed = strategy.experimental_distribute_dataset(whole)
        from_function = strategy.distribute_datasets_from_function(
            lambda context: whole
        )
        assert (
            isinstance(distributed, kd.DistributedDataset)
            == entry["is_distributed_dataset"]
        )
        assert (
            isinstance(iter(distributed), kd.DistributedIterator)
            == entry["is_distributed_iterator"]
        )
        assert (
            type(distributed).__name__ == type(from_function).__name__ == entry["class"]
        )
    elif entry["name"] == "options":
        check_with_options(strategy, entry, whole)
    else:
        assert because("not a dataset")
        value = {"distribute none": None}.get(entry["name"], [1, 2, 3])
        check_error(
            lambda: strategy.experimental_distribute_dataset(value),
            {"error": "ValueError"},
        )
        check_error(
            lambda: strategy.distribute_datasets_from_function(lambda c: value),
            {"error": "ValueError"},
        )


def check_with_options(strategy, entry, whole):
    arguments = dict(entry["options"])
    mode = arguments["experimental_replication_mode"] = kd.InputReplicationMode[
        arguments["experimental_replication_mode"]
    ]
    if arguments["experimental_place_dataset_on_device"]:
        assert because("options of our own")
        check_error(lambda: kd.InputOptions(**arguments), {"error": "ValueError"})
        return
    options = kd.InputOptions(**arguments)
    from_function = strategy.distribute_datasets_from_function(
        lambda context: whole, options
    )
    if mode is kd.InputReplicationMode.PER_WORKER:
        dataset = strategy.experimental_distribute_dataset(whole, options)
        assert elements_of(strategy, dataset)[0] == as_ours(
            entry["dataset"]["elements"]
        )
        assert elements_of(strategy, from_function)[0] == as_ours(
            entry["function"]["elements"]
        )
        return
    check_error(
        lambda: strategy.experimental_distribute_dataset(whole, options),
        {"error": "ValueError"},
    )
    assert because("replicas of workers")
    batches = [{"int64": [0, 1, 2, 3]}, {"int64": [4, 5, 6, 7]}, {"int64": [8, 9]}]
    assert elements_of(strategy, from_function)[0] == by_split(batches, 1)


@entries("other_strategies", where=lambda entry: entry["strategy"] == "default")
def test_default_strategy(entry):
    strategy = kd.get_strategy()
    whole = pipeline(
        entry["dataset"] if "call" in entry else [["range", 10], ["batch", 4]]
    )
    options = entry.get("options") and kd.InputOptions(
        experimental_replication_mode=kd.InputReplicationMode[
            entry["options"]["experimental_replication_mode"]
        ]
    )
    contexts = []

    def dataset_fn(context):
        contexts.append(str(context))
        return whole

    assert strategy.experimental_distribute_dataset(whole, options) is whole
    assert strategy.distribute_datasets_from_function(dataset_fn, options) is whole
    assert contexts == ["InputContext(input pipeline id 0, total: 1)"]
    if "result" in entry:
        value = {"distribute none": None, "distribute a list": [1, 2, 3]}.get(
            entry["name"], [1, 2]
        )
        assert strategy.experimental_distribute_dataset(value) is value
        assert (
            strategy.distribute_datasets_from_function(lambda context: value) is value
        )
        assert encoded(strategy, value) == entry["result"]
