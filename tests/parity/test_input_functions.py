"""`distribute_datasets_from_function` and InputContext against TensorFlow, for tf.data
and all other kinds of datasets.
"""

import json

import pytest

import keras_distribute as kd
from keras_distribute import errors

from . import ours
from .comparing import check_error
from .differences import because
from .distributing import (
    Entry,
    array_of,
    as_kind,
    as_ours,
    assert_result,
    assert_spec,
    batches_of,
    by_rounds,
    dealt,
    elements_of,
    end_of,
    entries,
    expressible,
    identified,
    leaves,
    pipeline,
    raised_in,
    wrapped,
)
from .encoding import JSON, is_error
from .ours import encoded, mirrored
from .scenarios.functions import attributes, function_misuse
from .test_input import ON_THE_HOST


def of_replicas(entry: Entry, kind: str = "") -> list[list[JSON]]:
    """The batches that are meant for each replica."""
    replicas = entry["replicas"]
    if "datasets" in entry:
        return [wrapped(kind, batches_of(steps)) for steps in entry["datasets"]]
    batches = wrapped(kind, entry["whole"])
    return (
        dealt(batches, replicas)
        if entry["mode"] == "PER_WORKER"
        else [batches[: end_of(entry)]] * replicas
    )


def expected_of(entry: Entry) -> list[JSON]:
    """The elements that we must give: TensorFlow's, or what the rule says."""
    ours, theirs = by_rounds(of_replicas(entry)), as_ours(entry["elements"])
    if ours == theirs:
        return ours
    full = theirs == ours[: len(theirs)]
    if raised_in(entry):
        assert because("none in elements")
        assert full and "with none" in entry["name"]
    elif full:
        assert because("incomplete rounds")
        lengths = {len(batches) for batches in of_replicas(entry)}
        assert len(theirs) == min(lengths) < len(ours) == max(lengths)
        assert (
            "element_spec" not in entry
            or None not in _first_shape(entry["element_spec"])[:1]
        )
    elif "with scalar" in entry["name"]:
        assert because("scalars beside rows")
        assert json.dumps(ours) == json.dumps(theirs).replace(
            '{"int32": 0}', '{"int32": 7}'
        )
    else:
        assert because("empty shapes")
        assert ours[:-1] == theirs[:-1]
        parts = zip(ours[-1]["PerReplica"], theirs[-1]["PerReplica"], strict=True)
        assert all(
            mine == other or (mine["shape"], other["shape"]) == ([0, 2], [0, 0])
            for mine, other in parts
        )
    return ours


def _first_shape(spec: JSON) -> list[int | None]:
    return spec["PerReplica"][0]["shape"] if "PerReplica" in spec else spec["shape"]


def scalars_run_out(entry: Entry) -> bool:
    """Whether a replica is left without an element that has no rows, so that nothing
    can stand for it.
    """
    given = of_replicas(entry)
    bare = all(
        array_of(leaf).ndim == 0
        for batches in given
        for batch in batches
        for leaf in leaves(batch)
        if leaf
    )
    return bare and len({len(batches) for batches in given}) > 1


def distributed(entry, make, **options):
    """The distributed dataset, and the contexts that its function was given."""
    contexts = []

    def dataset_fn(context):
        contexts.append(context)
        return make(context.input_pipeline_id)

    options = kd.InputOptions(
        experimental_replication_mode=kd.InputReplicationMode[entry["mode"]], **options
    )
    return mirrored(entry["replicas"]).distribute_datasets_from_function(
        dataset_fn, options
    ), contexts


@pytest.mark.sampled(6)
@entries("from_function")
def test_tf_data(entry):
    strategy = mirrored(entry["replicas"])
    fetch = {
        "experimental_fetch_to_device": entry.get(
            "fetch_to_device", entry["mode"] == "PER_WORKER"
        )
    }
    dataset, contexts = distributed(
        entry,
        lambda pipeline_id: pipeline(
            entry["datasets"][pipeline_id] if "datasets" in entry else entry["dataset"]
        ),
        **fetch,
    )
    assert [attributes(context) for context in contexts] == [
        _without_prefix(made) for made in entry["contexts"]
    ]
    if scalars_run_out(entry):
        assert because("elements without rows")
        with pytest.raises(
            errors.InputError, match=r"without rows(.|\n)*Fix: batch the dataset"
        ):
            elements_of(strategy, dataset)
        return
    expected = expected_of(entry)
    elements, end = elements_of(strategy, dataset, end_of(entry))
    if not fetch["experimental_fetch_to_device"]:
        assert elements == by_rounds(of_replicas(entry), on_devices=False)
    assert json.dumps(as_ours(elements)) == json.dumps(expected), (
        "also the order of keys"
    )
    assert end == ("StopIteration" if raised_in(entry) else entry["end"])
    if "element_spec" in entry:
        assert_spec(dataset.element_spec, entry["element_spec"])
        if entry["cardinality"] >= 0:
            assert because("lengths")
            assert len(dataset) == len(elements)
            assert entry["cardinality"] == len(entry["whole"])


def kinds():
    for entry, name in identified(["from_function"]):
        made = (
            [entry["whole"]]
            if "whole" in entry
            else [batches_of(steps) for steps in entry["datasets"]]
        )
        for kind in (
            "arrays",
            "Grain rows",
            "Grain batches",
            "PyDataset",
            "torch DataLoader",
            "generator",
        ):
            if not scalars_run_out(entry) and all(
                expressible(kind, batches) for batches in made
            ):
                yield pytest.param(entry, kind, made, id=f"{kind}-{name}")


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("entry", "kind", "made"), kinds())
def test_other_kinds(entry, kind, made):
    given = of_replicas(entry, kind)
    endless = entry["end"] == "more" and entry["mode"] == "PER_REPLICA"

    def make(pipeline_id):
        batches = made[pipeline_id if len(made) > 1 else 0]
        return as_kind(kind, batches[: end_of(entry)] if endless else batches)

    dataset, contexts = distributed(entry, make, **ON_THE_HOST)
    assert len(contexts) == (entry["replicas"] if entry["mode"] == "PER_REPLICA" else 1)
    elements, _ = elements_of(mirrored(entry["replicas"]), dataset)
    assert elements == by_rounds(given, on_devices=False)


@entries("function_misuse")
def test_misuse(entry):
    strategy, name, expected = (
        mirrored(entry["replicas"]),
        entry["name"],
        entry["result"],
    )
    call = function_misuse(ours, strategy)[name]
    if name in ("returns a generator", "returns a list of tuples"):
        assert because("every kind")
        assert (
            encoded(strategy, call())
            == by_rounds(
                [[{"tuple": [{"int64": [i] * 2}]}] for i in range(entry["replicas"])]
            )[0]
        )
    elif name == "class":
        assert call() == ["DistributedDataset", True]
    # the user's own errors, as they are
    elif name in ("raises", "takes nothing", "per replica batch of 0"):
        with pytest.raises(Exception) as raised:
            call()
        assert type(raised.value).__name__ == expected.get("class", expected["error"])
    elif name in ("in run",):
        assert because("iterating in run")
        check_error(call, {"error": "RuntimeError"})
    elif name == "none" or (
        is_error(expected) and expected["error"] == "AttributeError"
    ):
        assert because("not a dataset")
        check_error(call, {"error": "TypeError" if name == "none" else "ValueError"})
    elif is_error(expected):
        check_error(call, expected)
    else:
        assert_result(strategy, call(), expected)


@entries("input_context")
def test_input_context(entry):
    name, expected = entry["name"], entry["result"]
    if "arguments" in entry:
        assert attributes(kd.InputContext(**entry["arguments"])) == _without_prefix(
            expected
        )
    elif name == "positional":
        assert attributes(kd.InputContext(3, 1, 6)) == _without_prefix(expected)
    elif name.startswith("get_per_replica_batch_size"):
        context = kd.InputContext(
            num_replicas_in_sync=entry["replicas"] if "size" in entry else 0
        )
        size = entry.get("size", 8)
        if is_error(expected):
            check_error(
                lambda: context.get_per_replica_batch_size(size),
                expected,
                fix=expected["error"] == "ValueError",
            )
        else:
            assert context.get_per_replica_batch_size(size) == expected["python"]
    elif name in ("equal", "repr is the default one"):
        assert because("contexts compare")
        assert (
            kd.InputContext()
            == kd.InputContext()
            != kd.InputContext(input_pipeline_id=1)
        )
        assert repr(kd.InputContext()).startswith("InputContext(num_input_pipelines=1")
    elif name in ("set", "new attribute"):
        attribute = "input_pipeline_id" if name == "set" else "other"
        check_error(
            lambda: setattr(kd.InputContext(), attribute, 1), expected, fix=False
        )
    else:
        assert [
            attribute
            for attribute in dir(kd.InputContext)
            if not attribute.startswith("_")
        ] == expected


def _without_prefix(recorded):
    return {**recorded, "str": recorded["str"].removeprefix("tf.distribute.")}
