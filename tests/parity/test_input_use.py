"""Distributed datasets in use against TensorFlow: iterators, `reduce`, `run`, options,
the other strategies.
"""

import pytest
import tensorflow as tf

import keras_distribute as kd
from keras_distribute import errors

from . import ours
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
from .scenarios.iteration import iteration

IN_RUN = ("distribute in run", "iter in run", "next in run", "get_next in run")


@pytest.mark.sampled(3)
@entries("iteration")
def test_iteration(entry):
    strategy, name, expected = (
        mirrored(entry["replicas"]),
        entry["name"],
        entry["result"],
    )
    call = iteration(ours, strategy)[name]
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


@entries("options", where=lambda entry: entry["name"] == "combination")
def test_options(entry):
    strategy, arguments = mirrored(entry["replicas"]), dict(entry["options"])
    mode = arguments.get("experimental_replication_mode", "PER_WORKER")
    # the text, not the member
    if mode is None or (mode == "PER_REPLICA" and len(arguments) == 1):
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
