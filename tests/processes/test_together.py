"""Two processes of two devices each do what one process does, and see the same."""

import itertools
import json
import os
import pathlib
import random

import numpy as np
import pytest

import keras_distribute as kd

from . import scenarios

pytestmark = pytest.mark.timeout(420)


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    paths = [str(tmp_path_factory.mktemp("shared") / f"{i}.txt") for i in range(4)]
    for i, path in enumerate(paths):
        pathlib.Path(path).write_text(
            "".join(f"{100 * i + j}\n" for j in range(3 + 4 * i))
        )
    calls = {
        "connected": (),
        "shared_files": (paths,),
        "kinds_of_data": (),
        "own_data": (True,),
        "orders": (),
        "values": (),
        "single_batches": (),
        "narrow_sums": ("bfloat16",),
        "a_nan": (),
        "checkpoint": (str(tmp_path_factory.mktemp("checkpoint")), "save"),
        "save_under_way": (str(tmp_path_factory.mktemp("under_way")),),
        "files": (str(tmp_path_factory.mktemp("files")),),
    }
    results = kd.testing.run_in_processes(
        scenarios.several, 2, calls, cpu_devices=2, timeout=400
    )
    assert len(results) == 2
    return calls, results


@pytest.fixture(scope="module")
def plain():
    """What one device makes of each kind of data."""
    return scenarios.kinds_of_data(distributed=False)


def equal(ours, theirs, **tolerance):
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, **({"rtol": 1e-5, "atol": 1e-6} | tolerance))


@pytest.mark.parametrize(
    "kind",
    [
        "arrays, shuffled",
        "fewer rows than replicas",
        "a PyDataset",
        "a generator",
        "steps_per_epoch",
        "groups of 2 steps",
        "groups of auto steps",
        "validation",
    ],
)
def test_fit_and_predict_give_the_numbers_of_one_device(job, plain, kind):
    both = [result["kinds_of_data"][kind] for result in job[1]]
    weights, history, predictions = plain[kind]
    for distributed in both:
        equal(distributed[0], weights)
        assert distributed[1].keys() == history.keys()
        for name, values in history.items():
            np.testing.assert_allclose(distributed[1][name], values, rtol=1e-5)
        np.testing.assert_allclose(distributed[2], predictions, rtol=1e-5, atol=1e-6)
    equal(both[0][0], both[1][0], rtol=0, atol=0)


def test_an_interruption_leaves_the_state_of_a_whole_step():
    first, second = kd.testing.run_in_processes(
        scenarios.interrupted, 2, 8, cpu_devices=2, timeout=400
    )
    assert [outcome[1] for outcome in first] == [outcome[1] for outcome in second]
    for was_interrupted, whole_steps, same_numbers_afterwards, where in (
        *first,
        *second,
    ):
        assert was_interrupted, where
        assert whole_steps is not None, where
        assert same_numbers_afterwards, where
    assert len({outcome[1] for outcome in first}) > 2


def test_processes_are_connected_before_their_first_step(job):
    """Gloo waits 30 seconds for each, and steps may take longer to compile in one."""
    for result in job[1]:
        found, expected = result["connected"]
        assert found.issuperset(expected)


def test_unequal_data_end_together(job):
    """Three batches of five rows in one process, five in the other: no row is lost, and
    no process waits.
    """
    first, second = (result["own_data"] for result in job[1])
    assert (
        first["steps"] == second["steps"] and len(first["steps"]) >= 2 * (15 + 25) // 5
    )
    assert first["history"] == second["history"] and len(first["history"]["loss"]) == 2
    equal(first["weights"], second["weights"], rtol=0, atol=0)
    assert first["loop"] == second["loop"]
    assert sum(rows for rows, _, _ in first["loop"]) == 15 + 25
    total = sum(scenarios.X[side["own"]].sum() for side in (first, second))
    assert sum(total for _, total, _ in first["loop"]) == pytest.approx(total, rel=1e-5)
    assert all(shape == (rows, 5) for rows, _, shape in first["loop"])


def test_what_is_read_ahead_of_a_loop_that_is_broken_off_comes_again():
    broken_off = [2, 4, 6]
    for outcomes in kd.testing.run_in_processes(
        scenarios.loops_broken_off, 2, broken_off, timeout=100
    ):
        for taken, (own, (first, rest)) in zip(broken_off, outcomes, strict=True):
            assert len(first) == taken
            assert list(itertools.chain(*first, *rest)) == own


def test_processes_shuffle_alike_whatever_one_draws(job):
    """And keep the streams that they have seeded, where each has data of its own."""
    (taken, first), (other, second) = (result["orders"] for result in job[1])
    assert taken == other and len(set(map(tuple, taken[1:]))) > 1
    assert first == (random.Random(0).random(), np.random.RandomState(0).rand())
    assert second == (random.Random(1).random(), np.random.RandomState(1).rand())


def test_files_are_shared(job):
    """Each process reads its own files to the end, and together they read all."""
    first, second = (result["shared_files"] for result in job[1])
    numbers = [float(100 * i + j) for i in range(4) for j in range(3 + 4 * i)]
    assert (
        first["everyone"] == second["everyone"] and sorted(first["everyone"]) == numbers
    )
    assert not set(first["own"]) & set(second["own"])
    assert sorted(first["own"] + second["own"]) == numbers
    files = [{int(number) // 100 for number in side["own"]} for side in (first, second)]
    assert files == [{0, 2}, {1, 3}]


def test_values_and_variables(job):
    first, second = (result["values"] for result in job[1])
    assert (first["own"], second["own"]) == ([0, 1], [2, 3])
    assert (first["context"], second["context"]) == ((2, 0), (2, 1))
    for name in (
        "gathered",
        "ragged",
        "on host",
        "ragged sum",
        "mean",
        "mirrored",
        "on_read",
        "eager",
        "unseeded",
        "numpy",
    ):
        assert first[name] == second[name], name
    assert first["gathered"] == [0, 1, 1, 1, 2, 1, 3, 1]
    assert first["joined"] == second["joined"] == [[0, 0, 1, 0, 1, 2]] * 2
    assert first["gradient"] == second["gradient"] == [0, 0, 8, 0, 8, 16]
    assert first["ragged"] == [0, 0, 1, 0, 1, 2] and first["ragged sum"] == 4
    assert first["on host"] == [0, 1, 2, 3, 4, 5, 6]
    assert first["mean"] == [1.5, 1]
    assert (first["local"], second["local"]) == ([[0, 1], [1, 1]], [[2, 1], [3, 1]])
    assert second["texts"] == ["replica 2", "replica 3"]
    assert first["names"] == [[["1"], ["10"]], *[[[], []]] * 3]
    assert second["names"] == [[["1"], ["10"]], [["100"], []]] * 2
    assert second["structures"] == [(3, 1), (4, 1)] and second["ids"] == [2, 3]
    assert (
        first["mirrored"] == [2.5, 3.5, 4.5] and first["on_read"] == 2 + 1 + 2 + 3 + 4
    )
    assert sum(first["components"] + second["components"]) == first["on_read"]
    assert "num_replicas=4" in first["reprs"][1] and "value=12.0" in first["reprs"][2]
    for name in ("reduce", "gather"):
        assert (
            "components of other processes can be had only of arrays of one rank"
            in first["errors"][name]
        )


def test_a_single_batch_is_the_global_one(job):
    for result in job[1]:
        losses, expected, predictions, plain, error = result["single_batches"]
        np.testing.assert_allclose(losses, expected, rtol=1e-5)
        np.testing.assert_allclose(predictions, plain, rtol=1e-5, atol=1e-6)
        assert error.startswith("The processes were given different batches")


def test_gradients_travel_in_the_chosen_dtype(job):
    """The parts of four replicas are rounded to eight bits, and so are their sums,
    which Gloo makes in a ring.
    """
    parts = np.arange(4) + 1 / 3
    for result in job[1]:
        in_run, in_fit = result["narrow_sums"]
        for change, exact in (
            (-in_run[0], parts.sum()),
            (-in_run[1], parts.sum()),
            (1 - in_fit, parts.mean()),
        ):
            assert change == pytest.approx(
                exact, rel=2**-7
            ) and change != pytest.approx(exact, rel=1e-4)
    assert job[1][0]["narrow_sums"] == job[1][1]["narrow_sums"]


def test_a_nan_of_one_process_is_an_error_of_all(job):
    for result in job[1]:
        error, iterations, epochs = result["a_nan"]
        assert error == (
            "The loss is nan since step 2 of epoch 1.\n"
            "  Received: values that are not finite in x of replica 2 (process 1).\n"
            "  Fix: look at those rows, and leave them out of the data."
        )
        assert (iterations, epochs) == (4, 1)


def test_a_checkpoint_goes_on_in_any_number_of_processes(job):
    calls, results = job
    folder = calls["checkpoint"][0]
    before, after, steps, single = results[0]["checkpoint"]
    assert steps == [1, 2] and os.path.isdir(single)
    equal(before, results[1]["checkpoint"][0], rtol=0, atol=0)
    model = scenarios.make_model()
    kd.Checkpoint(model=model).restore(single).assert_consumed()
    equal(scenarios.weights_of(model), before, rtol=0, atol=0)
    for restored, trained, _, _ in kd.testing.run_in_processes(
        scenarios.checkpoint, 1, folder, "go on", cpu_devices=2, timeout=100
    ):
        equal(restored, before)
        equal(trained, after)


def test_a_save_under_way_is_known_to_all_processes(job):
    """At once; they wait for it together, and hear together that it has failed."""
    calls, results = job
    folder = calls["save_under_way"][0]
    failed = f"The checkpoint '{folder}/3' could not be written; earlier ones are as they were."
    for result in results:
        assert result["save_under_way"] == [
            *(([1], f"{folder}/1"), 1.0, ([2], f"{folder}/2"), 2.0),
            *(([3], f"{folder}/3"), failed, ([2], f"{folder}/2"), failed),
            *(([4], f"{folder}/4"), 4),
        ]
    assert os.listdir(folder) == ["4"]


def test_one_process_writes_the_files(job):
    calls, results = job
    folder = calls["files"][0]
    assert [result["files"] for result in results] == [
        (True, True, "FileNotFoundError")
    ] * 2
    assert sorted(os.listdir(f"{folder}/weights")) == ["1.weights.h5", "2.weights.h5"]
    assert os.listdir(f"{folder}/deep") == ["best.keras"]
    folder = pathlib.Path(folder)
    assert len((folder / "log.csv").read_text().splitlines()) == 3
    assert (
        json.loads((folder / "keras_backup" / "training_metadata.json").read_text())[
            "epoch"
        ]
        == 2
    )
    assert sorted(os.listdir(f"{folder}/backup")) == ["0", "1"]
