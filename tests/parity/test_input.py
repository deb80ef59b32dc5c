"""`experimental_distribute_dataset` on one process against TensorFlow, for tf.data and
for all other kinds of datasets.
"""

import json

import jax
import pytest

import keras_distribute as kd
from keras_distribute import errors

from .differences import because
from .distributing import (
    Entry,
    array_of,
    as_kind,
    as_ours,
    assert_spec,
    by_split,
    elements_of,
    end_of,
    entries,
    in_32_bits,
    leaves,
    mapped,
    pipeline,
    raised_in,
    rows_of,
    with_kinds,
    wrapped,
)
from .encoding import JSON, decode, encode_array
from .ours import encoded, mirrored

# What a kind of dataset changes is decided before its elements are put on devices.
ON_THE_HOST = {
    "experimental_fetch_to_device": False,
    "experimental_per_replica_buffer_size": 0,
}


def refusal(entry: Entry) -> str | None:
    """What our InputError says of an entry, where there must be one."""
    tags = {
        next(iter(leaf))
        for batch in entry.get("whole", [])
        for leaf in leaves(batch)
        if isinstance(leaf, dict)
    }
    dimensions = {
        array_of(leaf).ndim
        for batch in entry.get("whole", [])
        for leaf in leaves(batch)
        if array_of(leaf) is not None
    }
    if "whole" not in entry and entry["policy"] != "HINT":
        assert because("op errors")
        return "which only AutoShardPolicy.HINT fills in"
    if "object" in tags:
        assert because("datasets in elements")
        return "structures of arrays" if entry["replicas"] == 1 else "without rows"
    if "SparseTensor" in tags:
        assert because("sparse tensors")
        return "A sparse tensor cannot be split"
    if any(len(rows_of(batch)) > 1 for batch in entry.get("whole", [])):
        assert because("one number of rows")
        return "different numbers of rows"
    if dimensions == {0} and entry["replicas"] > 1:
        assert because("elements without rows")
        return "without rows"
    return None


def expected_of(entry: Entry) -> list[JSON]:
    """The elements that we must give: TensorFlow's, or what the rule says."""
    theirs = as_ours(entry["elements"])
    if "whole" not in entry:  # a hint
        if entry["replicas"] > 1:
            assert because("incomplete rounds")
            assert theirs == by_split(
                [{"int64": [0, 1, 2, 3]}, {"int64": [4, 5, 6, 7]}], entry["replicas"]
            )
        return by_split(
            [{"int64": [0, 1, 2, 3]}, {"int64": [4, 5, 6, 7]}, {"int64": [8, 9]}],
            entry["replicas"],
        )
    ours = by_split(entry["whole"], entry["replicas"])
    if entry.get("policy") in ("FILE", "HINT", "OFF") and ours != theirs:
        assert because("policies on one process")
    elif "RaggedTensor" in json.dumps(entry["whole"]):
        assert because("ragged tensors")
    elif raised_in(entry):
        assert because("scalars beside rows")
        assert "with scalar" in entry["name"]
    else:
        assert ours == theirs, "the rule is not TensorFlow's"
    return ours


@pytest.mark.sampled(6)
@entries("distribute_dataset", "structures", "policies")
def test_tf_data(entry):
    strategy = mirrored(entry["replicas"])
    options = kd.InputOptions(**ON_THE_HOST) if "policy" in entry else None
    dataset = strategy.experimental_distribute_dataset(
        pipeline(entry["dataset"], entry.get("policy", "AUTO")), options
    )
    refused = refusal(entry)
    if refused:
        with pytest.raises(errors.InputError, match=refused) as raised:
            elements_of(strategy, dataset)
        assert "Fix:" in str(raised.value)
    else:
        elements, end = elements_of(strategy, dataset, end_of(entry))
        elements = as_ours(elements)  # where they stayed on the host
        assert json.dumps(elements) == json.dumps(expected_of(entry)), (
            "also the order of keys"
        )
        assert end == ("StopIteration" if raised_in(entry) else entry["end"])
    if "element_spec" not in entry:
        return
    if refused == "structures of arrays":
        with pytest.raises(errors.InputError, match=refused):
            dataset.element_spec  # noqa: B018
        return
    assert_spec(dataset.element_spec, entry["element_spec"])
    if entry["cardinality"] >= 0:
        assert len(dataset) == entry["cardinality"]
    elif "whole" not in entry and entry["policy"] == "HINT":
        assert because("lengths")
        assert len(dataset) == 3
    else:
        assert because("lengths")
        with pytest.raises(TypeError, match="length of this dataset is not known"):
            len(dataset)


@pytest.mark.sampled(6)
@with_kinds(
    "distribute_dataset",
    "structures",
    "policies",
    where=lambda entry: not raised_in(entry) and not refusal(entry),
)
def test_other_kinds(entry, kind):
    strategy = mirrored(entry["replicas"])
    policy = kd.AutoShardPolicy[entry.get("policy", "AUTO")]
    options = kd.InputOptions(auto_shard_policy=policy, **ON_THE_HOST)
    dataset = strategy.experimental_distribute_dataset(
        as_kind(kind, entry["whole"]), options
    )
    elements, _ = elements_of(strategy, dataset)
    assert elements == by_split(
        wrapped(kind, entry["whole"]), entry["replicas"], on_devices=False
    )
    if kind != "generator" and "policy" not in entry:  # a generator can be read once
        assert len(elements_of(strategy, dataset)[0]) == len(elements)
    if elements:
        spec, first = dataset.element_spec, leaves(elements[0])
        assert (
            len(dataset) == len(elements)
            if kind in ("arrays", "PyDataset", "torch DataLoader")
            else True
        )
        assert sorted(leaf.dtype for leaf in jax.tree.leaves(spec)) == sorted(
            _dtype(leaf) for leaf in first if leaf is not None
        )


def _dtype(leaf):
    return decode(leaf["PerReplica"][0]).dtype.name


@pytest.mark.sampled(4)
@entries(
    "structures",
    where=lambda entry: "error" not in entry["local_results"] and not refusal(entry),
)
def test_local_results(entry):
    strategy = mirrored(entry["replicas"])
    element = next(
        iter(strategy.experimental_distribute_dataset(pipeline(entry["dataset"])))
    )
    results = entry["local_results"]["tuple"]
    if "ragged" in entry["name"]:
        assert because("ragged tensors")
        results = [
            mapped(lambda leaf: encode_array(array_of(leaf)), result)
            for result in results
        ]
        widths = max(len(row) for result in results for row in result["int64"])
        assert strategy.experimental_local_results(element)[0].shape[1] == widths
        return
    ours = encoded(strategy, strategy.experimental_local_results(element))
    assert ours == {
        "tuple": [
            mapped(lambda leaf: leaf and in_32_bits(leaf), result) for result in results
        ]
    }
