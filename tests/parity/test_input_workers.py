"""What each of two processes gets of a dataset, against what TensorFlow's two workers
got.

The processes are played one after the other, each with a strategy on the devices of one
worker.
"""

import numpy as np
import pytest
import tensorflow as tf

import keras_distribute as kd
from keras_distribute import errors
from keras_distribute.input.sharing import distribute, distribute_from_function

from .comparing import check_error
from .differences import because
from .distributing import (
    KINDS,
    Entry,
    as_kind,
    as_ours,
    assert_spec,
    elements_of,
    entries,
    even,
    expressible,
    identified,
    leaves,
    per_replica,
    pipeline,
    split,
    structure,
    wrapped,
)
from .encoding import JSON, is_error
from .ours import mirrored
from .pipelines import write_files
from .test_input import ON_THE_HOST

WORKERS = (0, 1)


def process(worker: int, devices: int) -> kd.InputContext:
    """The place of one of the two processes."""
    return kd.InputContext(len(WORKERS), worker, len(WORKERS) * devices)


def distributed(dataset, worker: int, devices: int, **options):
    """The dataset as one process distributes it."""
    given = kd.InputOptions(**options) if options else None
    return distribute(
        dataset, mirrored(devices).replica_mesh, process(worker, devices), given
    )


def played(dataset, worker: int, entry: Entry, **options) -> list[JSON]:
    """The elements of one process."""
    devices = entry["devices"]
    most = 5 if ["repeat"] in entry["dataset"] else 40
    options = options if entry["policy"] == "DATA" else {**ON_THE_HOST, **options}
    return as_ours(
        elements_of(
            mirrored(devices), distributed(dataset, worker, devices, **options), most
        )[0]
    )


def by_data(entry: Entry, worker: int) -> list[JSON]:
    """A process's elements where each keeps its rows of every batch: ours are
    consecutive, TensorFlow's dealt in turn.
    """
    devices = entry["devices"]
    pieces = [split(batch, len(WORKERS) * devices) for batch in entry["whole"]]
    theirs = [per_replica(parts[worker :: len(WORKERS)]) for parts in pieces]
    ours = [
        per_replica(parts[worker * devices : (worker + 1) * devices])
        for parts in pieces
    ]
    if entry["workers"][worker] != "hangs" and not is_error(
        entry["workers"][worker]["end"]
    ):
        assert theirs == as_ours(entry["workers"][worker]["elements"]), (
            "the rule is not TensorFlow's"
        )
    if theirs != ours:
        assert because("order of processes")
        assert devices > 1
    return ours


def without_empty_end(elements: list[JSON]) -> list[JSON]:
    """The elements up to the last with a row in it."""
    while elements and not any(
        part[next(iter(part))]
        for leaf in leaves(elements[-1])
        for part in leaf["PerReplica"]
    ):
        elements = elements[:-1]
    return elements


def assert_same_but_for_the_end(ours: list[JSON], theirs: list[JSON]) -> None:
    """Asserts that the elements are the same, until those of TensorFlow's worker have
    no rows any more.
    """
    if ours != theirs:
        assert because("own ends")
        assert without_empty_end(ours) == without_empty_end(theirs)
        assert len(ours) <= len(theirs)


def goes_by_files(entry: Entry) -> bool:
    return entry["policy"] == "FILE" or (
        entry["policy"] == "AUTO" and len(entry.get("files", [])) > 1
    )


@pytest.mark.sampled(6)
@entries("workers_dataset", "workers_files")
@pytest.mark.parametrize("worker", WORKERS)
def test_tf_data(entry, worker, tmp_path):
    policy, recorded = entry["policy"], entry["workers"][worker]
    files = write_files(entry.get("files", {}), entry["dataset"][0][0], tmp_path)
    dataset = pipeline(entry["dataset"], policy, files)
    hinted = ["shard_hint"] in entry["dataset"]
    if entry["dataset"] == [["range", 10]]:
        assert because("elements without rows")
        check_error(lambda: played(dataset, worker, entry), {"error": "ValueError"})
    elif policy == "FILE" and len(entry.get("files", [])) < len(WORKERS):
        assert because("op errors")
        assert recorded == "hangs" or is_error(recorded["end"])
        check_error(lambda: played(dataset, worker, entry), {"error": "ValueError"})
        return
    elif hinted and policy != "HINT":
        assert because("op errors")
        check_error(lambda: played(dataset, worker, entry), recorded["end"])
    elif policy == "HINT" and hinted:
        elements, theirs = played(dataset, worker, entry), as_ours(recorded["elements"])
        if elements != theirs:
            assert because("incomplete rounds")
            assert elements[: len(theirs)] == theirs
        rows = np.concatenate(
            [part["int32"] for element in elements for part in element["PerReplica"]]
        )
        batched_first = entry["dataset"][-1] == ["shard_hint"]
        expected = range(16) if batched_first else range(entry["dataset"][0][1])
        expected = [
            row
            for row in expected
            if (row // 4 if batched_first else row) % 2 == worker
        ]
        assert rows.tolist() == expected, "each process has its shard, and all of it"
    elif policy in ("HINT", "OFF") or goes_by_files(entry):
        assert_same_but_for_the_end(
            played(dataset, worker, entry), as_ours(recorded["elements"])
        )
    else:
        if recorded == "hangs" or is_error(recorded["end"]):
            assert because("too few files")
        assert played(dataset, worker, entry) == by_data(entry, worker)
    if recorded != "hangs" and "element_spec" in recorded:
        assert_spec(
            distributed(dataset, worker, entry["devices"]).element_spec,
            recorded["element_spec"],
        )


@entries(
    "workers_dataset", where=lambda entry: entry["policy"] == "OFF" and "whole" in entry
)
def test_lengths(entry):
    dataset = distributed(pipeline(entry["dataset"], "OFF"), 0, entry["devices"])
    assert because("lengths")
    with pytest.raises(TypeError):
        len(dataset)


def cases(*policies):
    """The entries that other kinds can express, for each kind."""
    for entry, name in identified(["workers_dataset"]):
        if (
            not entry.get("whole")
            or entry["policy"] not in policies
            or entry["dataset"] == [["range", 10]]
        ):
            continue
        for kind in KINDS:
            if expressible(kind, entry["whole"]):
                yield pytest.param(entry, kind, id=f"{kind}-{name}")


def as_wrapped(kind: str, entry: Entry, elements: list[JSON]) -> list[JSON]:
    """TensorFlow's elements in the tuples of a kind."""
    first = entry["whole"][:1]
    return (
        [{"tuple": [element]} for element in elements]
        if wrapped(kind, first) != first
        else elements
    )


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("entry", "kind"), cases("AUTO", "DATA"))
def test_other_kinds_by_data(entry, kind):
    for worker in WORKERS:
        policy = kd.AutoShardPolicy[entry["policy"]]
        dataset = as_kind(kind, entry["whole"])
        if kind == "generator" and entry["policy"] == "AUTO":
            with pytest.raises(errors.InputError, match="cannot share a generator"):
                distributed(dataset, worker, entry["devices"], auto_shard_policy=policy)
            continue
        elements = played(dataset, worker, entry, auto_shard_policy=policy)
        assert elements == as_wrapped(kind, entry, by_data(entry, worker))


def knows_its_size(entry: Entry, kind: str) -> bool:
    """Whether a kind knows the size of a full batch just where TensorFlow does, which
    decides how batches are cut.
    """
    full = next((step[1] for step in entry["dataset"] if step[0] == "batch"), None)
    if full is None:
        return (
            kind
            in ("PyDataset", "generator", "Grain batches")[
                : 2 if entry["name"] == "generator([4, 4, 2])" else 3
            ]
        )
    return (
        kind in ("arrays", "torch DataLoader")
        and even([structure(batch) for batch in entry["whole"]]) == full
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("entry", "kind"),
    [case for case in cases("OFF") if knows_its_size(case.values[0], case.values[1])],
)
def test_other_kinds_with_data_of_their_own(entry, kind):
    for worker in WORKERS:
        dataset = as_kind(kind, entry["whole"])
        elements = played(
            dataset, worker, entry, auto_shard_policy=kd.AutoShardPolicy.OFF
        )
        theirs = as_wrapped(kind, entry, as_ours(entry["workers"][worker]["elements"]))
        assert without_empty_end(elements) == without_empty_end(theirs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", ["FILE", "HINT"])
def test_policies_of_tf_data_alone(kind, policy):
    dataset = as_kind(kind, [{"int64": [0, 1, 2, 3]}])
    with pytest.raises(errors.InputError, match="is for tf.data pipelines"):
        distributed(dataset, 0, 1, auto_shard_policy=kd.AutoShardPolicy[policy])


@entries("workers_function")
@pytest.mark.parametrize("worker", WORKERS)
def test_functions(entry, worker):
    strategy, recorded = mirrored(entry["devices"]), entry["workers"][worker]
    contexts = []

    def dataset_fn(context):
        contexts.append(context)
        if "datasets" in entry:
            return pipeline(entry["datasets"][context.input_pipeline_id])
        part = tf.data.Dataset.range(10).shard(
            context.num_input_pipelines, context.input_pipeline_id
        )
        return part.batch(context.get_per_replica_batch_size(8))

    dataset = distribute_from_function(
        dataset_fn, strategy.replica_mesh, process(worker, entry["devices"]), None
    )
    theirs = as_ours(recorded["elements"])
    assert [str(context) for context in contexts] == [
        made["str"].removeprefix("tf.distribute.")
        for made in recorded.get("contexts", [{"str": str(contexts[0])}])
    ]
    if "element_spec" in recorded:
        assert_spec(dataset.element_spec, recorded["element_spec"])
    scalars = entry["name"] == "range(5) and range(3)"
    if scalars and entry["devices"] == 2:
        assert because("elements without rows")
        check_error(lambda: elements_of(strategy, dataset), {"error": "ValueError"})
        return
    ours, end = elements_of(
        strategy, dataset, len(theirs) if recorded["end"] == "more" else 40
    )
    assert end == recorded["end"]
    if scalars:
        assert because("own ends")
        assert ours == theirs[: len(ours)]
        assert all(
            element == {"PerReplica": [{"int32": 0}]} for element in theirs[len(ours) :]
        )
    else:
        assert_same_but_for_the_end(ours, theirs)


@entries("workers_misc")
def test_misc(entry):
    name, devices = entry["name"], entry["devices"]
    strategy, whole = mirrored(devices), tf.data.Dataset.range(10).batch(4)

    def datasets():
        return [distributed(whole, worker, devices) for worker in WORKERS]

    def steps():
        return zip(*datasets(), strict=True)

    def total(elements):
        return sum(int(strategy.reduce("SUM", element, axis=0)) for element in elements)

    recorded = entry["workers"]
    if name == "reduce SUM of each element":
        assert (
            [{"int64": total(elements)} for elements in steps()]
            == recorded[0]
            == recorded[1]
        )
    elif name == "reduce MEAN of each element":
        rows = [
            sum(len(part) for element in elements for part in element.values)
            for elements in steps()
        ]
        means = [
            total(elements) / count
            for elements, count in zip(steps(), rows, strict=True)
        ]
        assert [{"float64": mean} for mean in means] == recorded[0] == recorded[1]
    elif name == "gather of each element":
        joined = [
            np.concatenate([strategy.gather(element, axis=0) for element in elements])
            for elements in steps()
        ]
        if devices > 1:
            assert because("order of processes")
            recorded = [
                [{"int64": sorted(element["int64"])} for element in worker]
                for worker in recorded
            ]
        assert (
            [{"int64": element.tolist()} for element in joined]
            == recorded[0]
            == recorded[1]
        )
    elif name == "get_next_as_optional has_value":
        for iterator, expected in zip(map(iter, datasets()), recorded, strict=True):
            assert [
                iterator.get_next_as_optional().has_value() for _ in expected
            ] == expected
    elif name == "get_next at the end":
        assert because("op errors")
        for dataset in datasets():
            iterator = iter(dataset)
            assert len(list(iterator)) == 3
            with pytest.raises(errors.OutOfRangeError):
                iterator.get_next()
    elif name == "dataset.reduce":
        sums = [
            d.reduce(0, lambda state, x: state + strategy.reduce("SUM", x, axis=0))
            for d in datasets()
        ]
        assert {"int64": int(sum(sums))} == recorded[0] == recorded[1]
    elif name.startswith("place on device"):
        assert because("options of our own")
        check_error(
            lambda: kd.InputOptions(experimental_place_dataset_on_device=True),
            {"error": "ValueError"},
        )
    elif name == "num_replicas_in_sync":
        assert [
            process(worker, devices).num_replicas_in_sync for worker in WORKERS
        ] == recorded
    else:
        for worker in WORKERS:
            check_with_options(name, strategy, whole, worker, recorded[worker])


def check_with_options(name, strategy, whole, worker, recorded):
    """One process, with elements that stay on the host, or a dataset for each replica."""
    devices = strategy.num_replicas_in_sync
    mode = (
        kd.InputReplicationMode.PER_REPLICA
        if "PER_REPLICA" in name
        else kd.InputReplicationMode.PER_WORKER
    )
    options = {
        "experimental_fetch_to_device": False,
        "experimental_replication_mode": mode,
    }
    contexts = []

    def dataset_fn(context):
        contexts.append(context)
        return whole

    def from_function():
        mesh = strategy.replica_mesh
        return distribute_from_function(
            dataset_fn, mesh, process(worker, devices), kd.InputOptions(**options)
        )

    if name == "PER_REPLICA, dataset":
        assert because("op errors")
        check_error(
            lambda: distributed(whole, worker, devices, **options),
            {"error": "ValueError"},
        )
    elif name == "PER_REPLICA, function":
        assert because("replicas of workers")
        assert is_error(recorded["end"])
        elements, _ = elements_of(strategy, from_function())
        batches = [{"int64": [0, 1, 2, 3]}, {"int64": [4, 5, 6, 7]}, {"int64": [8, 9]}]
        assert elements == [
            per_replica([batch] * devices, on_devices=False) for batch in batches
        ]
        assert [context.input_pipeline_id for context in contexts] == [
            worker * devices + i for i in range(devices)
        ]
        assert {context.num_input_pipelines for context in contexts} == {
            len(WORKERS) * devices
        }
    elif name == "fetch to host, dataset":
        elements, _ = elements_of(
            strategy, distributed(whole, worker, devices, **options)
        )
        batches = [{"int64": [0, 1, 2, 3]}, {"int64": [4, 5, 6, 7]}, {"int64": [8, 9]}]
        pieces = [split(batch, len(WORKERS) * devices) for batch in batches]
        assert [
            per_replica(p[worker :: len(WORKERS)], on_devices=False) for p in pieces
        ] == recorded["elements"]
        own = slice(worker * devices, (worker + 1) * devices)
        assert because("order of processes")
        assert elements == [
            per_replica(parts[own], on_devices=False) for parts in pieces
        ]
    else:
        elements, end = elements_of(strategy, from_function())
        assert (elements, end) == (recorded["elements"], recorded["end"])
