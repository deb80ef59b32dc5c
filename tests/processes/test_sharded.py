"""Slots, and weights, divided over the devices of several processes: the same numbers,
a part of the memory, and whole files.
"""

import keras
import numpy as np
import pytest

import keras_distribute as kd

from . import sharded

pytestmark = pytest.mark.timeout(200)


SLOTS = {"shard_optimizer_state": True}
WEIGHTS = {"shard_variables": True, "min_shard_bytes": 64}


@pytest.fixture(scope="module", params=[SLOTS, WEIGHTS], ids=["slots", "weights"])
def job(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    results = kd.testing.run_in_processes(
        sharded.training, 2, str(folder), request.param, cpu_devices=2, timeout=170
    )
    assert [(result["processes"], result["replicas"]) for result in results] == [
        (2, 4)
    ] * 2
    return folder, results


def equal(ours, theirs, **tolerance):
    assert len(ours) == len(theirs) > 6
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, **({"rtol": 1e-6, "atol": 1e-6} | tolerance))


# Rows that travel to divided weights are summed in another order than gradients of
# whole ones, and Adam divides a gradient near zero by one near zero.
ATOL = {"slots": 1e-6, "weights": 1e-5}


def test_the_numbers_are_those_of_whole_slots_and_of_one_device(job, request):
    plain = sharded.fitted(sharded.built(kd.get_strategy()))
    atol = ATOL[request.node.callspec.id]
    for result in job[1]:
        equal(result["divided"], result["whole"], atol=atol)
        equal(result["packed"], result["whole"], atol=atol)
        equal(result["divided"], sharded.numbers(plain), rtol=1e-4, atol=1e-5)
        equal(*result["loops"], rtol=1e-5, atol=atol)
    equal(job[1][0]["divided"], job[1][1]["divided"], rtol=0, atol=0)


def test_gradients_travel_in_few_buffers(job):
    """Twenty of 40 KB in one of 4 MiB; one of 8 MiB by itself between two small ones."""
    assert [result["sums"] for result in job[1]] == [(1, 3)] * 2


def test_memory(job):
    """From the beginning, and after training."""
    for result in job[1]:
        assert len(result["shares"]) == 2
        assert all(share <= 1 / 4 + 0.02 for share in result["shares"])


def test_every_process_reads_and_assigns(job):
    for result in job[1]:
        shape, text, least, share = result["slot"]
        assert result["shapes"] == [shape] * 2  # Of its own replicas.
        # To show it would take all processes.
        assert "num_replicas=4" in text and "value=" not in text
        assert least == 1.0 and share <= 1 / 4 + 0.02


def test_one_process_writes_all(job):
    """What it has saved is whole: plain Keras loads it, and so does the strategy, and
    divides it again.
    """
    folder, results = job
    loaded = keras.models.load_model(folder / "model.keras")
    for result in results:
        equal(sharded.numbers(loaded), result["divided"], rtol=0, atol=0)
        equal(result["loaded"], result["divided"], rtol=0, atol=0)
        for numbers, share in (result["read"], result["again"]):
            equal(numbers, result["divided"], rtol=0, atol=0)
            assert share <= 1 / 4 + 0.02


def test_a_fit_goes_on_from_its_backup(job):
    for result in job[1]:
        equal(result["resumed"], result["divided"], rtol=0, atol=0)


def test_few_rows_travel_between_processes():
    results = kd.testing.run_in_processes(
        sharded.of_few_rows, 2, WEIGHTS, cpu_devices=2, timeout=100
    )
    for i, tokens in enumerate((500, 502)):
        expected = sharded.few_rows(kd.get_strategy(), tokens)
        for result in results:
            for a, b in zip(result[i], expected, strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_other_values_in_each_process_are_found_where_nobody_has_the_whole():
    results = kd.testing.run_in_processes(
        sharded.disagreeing, 2, WEIGHTS, cpu_devices=2, timeout=100
    )
    for texts in results:
        for name, text in zip(("apart", "alone"), texts, strict=True):
            assert f"different values to 1 mirrored variable(s): {name}" in text


@pytest.mark.sampled(2)
@pytest.mark.parametrize("options", [{}, WEIGHTS], ids=["whole", "divided"])
def test_what_needs_all_processes_is_an_error_in_one_alone(options, tmp_path):
    results = kd.testing.run_in_processes(
        sharded.alone, 2, str(tmp_path), options, cpu_devices=2, timeout=100
    )
    needs_all = {"save", "trained"}
    if options:
        needs_all |= {"weights", "array", "computed"}
    for found, losses in results:
        assert np.isfinite(losses).all()
        for name, said in found.items():
            if name not in needs_all:
                assert said is True, (name, said)
                continue
            assert "involves all processes, and the others wait for this one" in said
            assert "at run_on_chief(" in said
    if options:
        assert "The reading of '" in results[0][0]["weights"]
