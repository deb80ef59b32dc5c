"""Processes that do not do the same, and what is said; seeds; and the kit that runs
them.
"""

import os
import signal
import time

import numpy as np
import pytest

import keras_distribute as kd

from . import scenarios

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def errors():
    results = kd.testing.run_in_processes(scenarios.different_programs, 2, timeout=100)
    # The chief's process number.
    assert results[0][1] == results[1][1] == results[0][2] != results[1][2]
    return [result[0] for result in results]


@pytest.mark.parametrize(
    ("what", "text"),
    [
        (
            "other lengths",
            "InputError: The processes read a dataset of their own.*process 0: 2 batches of 5 rows, 10 in all; process 1: 4",
        ),
        (
            "arrays of other rows",
            "0 InputError: The processes read a dataset of their own.*0: 8 batches of 4 rows, 32 in all; .* 4 rows, 30",
        ),
        (
            "arrays of other batches",
            "0 InputError: .* a dataset.*0: 8 batches of 4 rows, 32 in all; process 1: 8 batches of 2 rows, 16",
        ),
        (
            "arrays of another width",
            "0 InputError: .* a dataset.*0: 2 .* 8 in all, of float32.3.; process 1: .* in all, of float32.2.",
        ),
        (
            "arrays in another order",
            r"0 InputError: .* read arrays of their own.*0: 0 in row 0 of the array\[1\]; process 1: 98 in row 0",
        ),
        (
            "arrays of another value",
            r"0 InputError: .*0: 3 in row 8 of the array\['y'\]; process 1: 2 in row 8",
        ),
        ("arrays of another rounding", "15 batches"),
        (
            "batches of another dtype",
            "0 InputError: The processes read data of .*0: a batch of 4 rows of .0. int32.5.; process 1: .* float16.5.",
        ),
        (
            "other policies",
            "InputError: The processes share a dataset in different ways.*0: its rows of each batch; process 1: a dataset of its own.*the same auto_shard_policy",
        ),
        (
            "another shuffle",
            "0 InputError: .* a dataset.*0: 2 .* 8 in all, shuffled by the seed 1; process 1: .* in all, not shuffled",
        ),
        (
            "another seed",
            "0 InputError: .* a dataset.*in all, shuffled by the seed 1; process 1: .*, shuffled by the seed 0.*in the same order",
        ),
        (
            "another first batch",
            "0 InputError: The processes read data of .*0: a batch of 4 rows; process 1: a batch of 2",
        ),
        (
            "another last batch",
            "2 InputError: The processes read data of .*0: a batch of 4 rows; process 1: a batch of 2",
        ),
        (
            "another batch",
            "16 InputError: The processes read data of .*0: a batch of 4 rows; process 1: a batch of 2",
        ),
        (
            "other rows",
            "InputError: The processes read data of their own.*0: a batch of 4 rows; process 1: a batch of 5",
        ),
        (
            "orbax",
            "CheckpointError: keras.callbacks.OrbaxCheckpoint cannot save what several.*a fit in 2 processes",
        ),
        ("eager", "ContextError: Steps over several processes are compiled"),
        ("own function", "ContextError: Steps over several processes are made by"),
        ("chief raises", "ValueError: invalid literal for int"),
        (
            "other places",
            "ClusterError: The processes do different things.*is at barrier 'place [01]'",
        ),
        (
            "own rate",
            "VariableScopeError: The processes have given different values to 1 mirrored.*: sgd.*/learning_rate",
        ),
        (
            "own weights",
            "VariableScopeError: The processes have given different values to 2 mirrored.*kernel.*bias",
        ),
        (
            "own rate between",
            "8 VariableScopeError: The processes have given different.*learning_rate",
        ),
        (
            "own value between",
            "8 VariableScopeError: The processes have given different.*total",
        ),
        (
            "own loss",
            "ClusterError: The processes run different programs in fit.*0: square.*compile_loss./mse; process 1: abs.*compile_loss./mae.*same compile",
        ),
        (
            "own momentum",
            "ClusterError: .* different programs in fit.*0: .* 0.6.* float32.*; process 1: .* 0.5 float32",
        ),
        (
            "own layer",
            "ClusterError: .* different programs in fit.*0: max.*; process 1: tanh.*in jvp.activation",
        ),
        (
            "own number",
            "ClusterError: .* different programs in run.*0: mul.* 3.0 float32.*; process 1: mul.* 2.0 float32.*experimental_distribute_values_from_function",
        ),
        (
            "own array",
            "ClusterError: .* different programs in run.*0: a constant float.*; process 1: a constant",
        ),
        (
            "own branch",
            "ClusterError: .* different programs in run.*0: reduce_sum.*; process 1: results",
        ),
        ("own argument", "ClusterError: .* different programs in run.*0: mul"),
        ("own prints", "none"),
        ("own names", "none"),
        (
            "other values",
            "VariableScopeError: The processes have given different values to 1 mirrored.*wrong",
        ),
    ],
)
def test_every_process_raises_the_same(errors, what, text):
    import re

    for said in errors:
        assert re.search(text, said[what], re.DOTALL), said[what]


def test_every_process_saves(errors):
    chief, other = (said["chief saves"] for said in errors)
    for said in (chief, other):
        assert said.startswith("ClusterError: The processes do different things.")
    assert "1 is at barrier 'it is saved', process 0 at the saving of a" in chief
    assert "Fix: save in every process, not under `if kd.is_chief():`" in chief
    assert "only prints and files of your own may depend on kd.is_chief()" in other


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", [None, 3])
def test_seeds_are_agreed(seed):
    """Without a seed, and with different ones."""
    first, second = kd.testing.run_in_processes(
        scenarios.different_seeds, 2, seed, timeout=60
    )
    assert first == second


def test_a_runtime_that_the_program_has_started_is_taken_over():
    first, second = kd.testing.run_in_processes(
        scenarios.runtime_of_ones_own, 2, 3, timeout=100
    )
    assert first[:3] == second[:3] and first[:2] == (2, "JaxClusterResolver")
    for ours, theirs in zip(first[3], second[3], strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_processes_have_as_many_devices():
    for error in kd.testing.run_in_processes(
        scenarios.different_devices, 2, timeout=60
    ):
        assert error.startswith(
            "The processes have different numbers of devices.\n  Received: 1, 2 devices."
        )


def sleeping():
    print("asleep", flush=True)
    time.sleep(60)


def raising(index):
    if os.environ["KERAS_DISTRIBUTION_PROCESS_ID"] == str(index):
        raise KeyError("the key")


def test_the_runner_kills_freezes_and_gives_up():
    with kd.testing.MultiProcessRunner(sleeping, 2, timeout=60) as runner:
        end = time.monotonic() + 50
        while (
            not all("asleep" in runner.log(i) for i in (0, 1))
            and time.monotonic() < end
        ):
            time.sleep(0.1)
        runner.freeze(0)
        runner.kill(1)
        with pytest.raises(
            kd.errors.ClusterError, match=r"sleeping did not end in time in process 0\."
        ) as caught:
            runner.join(timeout=2)
        assert "2 processes, 2 seconds." in str(caught.value)
        pids = [worker.process.pid for worker in runner._job.workers]
    assert runner.num_running == 0
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_the_runner_says_who_failed():
    with pytest.raises(
        kd.errors.ClusterError,
        match="(?s)1 of 2 processes failed; process 1 with exit code 1.*the key",
    ):
        kd.testing.run_in_processes(raising, 2, 1, timeout=60)
    with kd.testing.MultiProcessRunner(raising, 2, args=[0], timeout=60) as runner:
        results = runner.join()
    assert [result.exit_code for result in results] == [1, 0]
    assert "KeyError: 'the key'" in results[0].error and "KeyError" in results[0].log


def test_a_killed_process_has_the_code_of_its_signal():
    with kd.testing.MultiProcessRunner(sleeping, 1, timeout=60) as runner:
        runner.kill(0, signal.SIGTERM)
        assert runner.join()[0].exit_code == 128 + signal.SIGTERM


def test_a_function_needs_a_name():
    with pytest.raises(TypeError, match="define it with def at the top of a module"):
        kd.testing.run_in_processes(lambda: None)


def test_workers_that_draw_leave_the_orders_alike():
    """What a `PyDataset` draws after a pass is the same in all processes."""
    first, second = kd.testing.run_in_processes(scenarios.orders_of_workers, 2)
    assert first == second
    assert first[0] == [0, 1, 2] != first[1] != first[2]


def test_values_of_all_replicas_are_no_result():
    said = r"(?s)cannot be pickled.*Received: .*strategy.experimental_local_results"
    with pytest.raises(kd.errors.ClusterError, match=said):
        kd.testing.run_in_processes(scenarios.values_of_replicas, 2)
