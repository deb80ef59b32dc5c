"""Keras's own tests of what trains and of what has variables, each in the scope of two
replicas.

Without `EVERY_CASE` a sample of them. They run in a process of their own (`suites`,
`scope_plugin`). What passes without a strategy has to pass with one, and the run has to
prove that it was one: variables, the state of the steps and the halves of batches on
two devices.
"""

from __future__ import annotations

import importlib.util
import os

import pytest

from . import suites

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("keras.src.trainers.trainer_test") is None,
    reason="this Keras ships without its own tests, as its nightlies do",
)

ONE_IN = 1 if os.environ.get("EVERY_CASE") else suites.ONE_IN

OUT_SHARDINGS = "keras.src.trainers.trainer_test::JAXTrainerCorrectnessTest::test_jit_fit_with_out_shardings_logic_distributed"
ORBAX = "keras.src.callbacks.orbax_checkpoint_test::OrbaxCheckpointTest::test_distributed_checkpoint"
OWN_DISTRIBUTION = {OUT_SHARDINGS, f"{ORBAX}_functionality", f"{ORBAX}_resharding"}
"""Tests that open a Keras distribution inside the scope: the inner one places the
variables.
"""

PROOF = {
    "trainer": {
        "variable": 140,
        "train compiled": 50,
        "train eager": 40,
        "test compiled": 30,
        "test eager": 35,
        "predict compiled": 20,
        "predict eager": 35,
        "batch split": 120,
        "batch uneven": 25,
        "batch sparse": 18,
        "output split": 20,
    },
    "callbacks": {
        "variable": 70,
        "train compiled": 45,
        "test compiled": 15,
        "batch split": 35,
    },
    "compile_utils": {"variable": 20},
    "epoch_iterator": {},  # It has no models.
    "optimizers": {"variable": 180},
    "metrics": {"variable": 300},
    "losses": {},  # Nor have these.
    "models": {"variable": 80, "train compiled": 10},
    "saving": {"variable": 80},
}
"""By suite, in how many tests at least each of the counts of `scope_plugin.Watch` has
to occur; of a sample, in a fifth as many.
"""


@pytest.fixture(scope="module")
def in_scope() -> dict[str, dict[str, suites.TestResult]]:
    """What the tests of every suite did in the scope, all in one process."""
    return suites.run_suites(suites.SUITES, "mirrored", one_in=ONE_IN)


@pytest.mark.slow
@pytest.mark.timeout(2 * suites.TIMEOUT + 60)
@pytest.mark.parametrize("name", suites.SUITES)
def test_suite_passes_in_scope_what_it_passes_without(
    name: str, in_scope: dict[str, dict[str, suites.TestResult]]
) -> None:
    check_outcomes(name, in_scope[name])
    check_proof(name, in_scope[name])


@pytest.mark.slow
@pytest.mark.timeout(2 * suites.TIMEOUT + 60)
def test_importing_the_package_changes_nothing_outside_a_scope() -> None:
    found = suites.run_suites(["trainer"], "imported", one_in=ONE_IN)["trainer"]
    check_outcomes("trainer", found)
    trained = {
        test: result.counts
        for test, result in found.items()
        if any("train" in count for count in result.counts)
    }
    assert len(trained) > 90 // ONE_IN - 5
    on_two = {
        test
        for test, counts in trained.items()
        if {"train compiled", "train eager"} & counts.keys()
    }
    # It opens Keras's `DataParallel`; so the watch tells two devices from one.
    assert on_two == {OUT_SHARDINGS}


def check_outcomes(name: str, found: dict[str, suites.TestResult]) -> None:
    """Asserts that the tests of a suite end as in the baseline."""
    expected = suites.baseline(name, found, ONE_IN)
    outcomes = {test: result.outcome for test, result in found.items()}
    print(
        f"{name}: {suites.tally(expected)} without a strategy, {suites.tally(outcomes)} here"
    )
    differences = suites.differences(expected, found)
    assert not differences, "\n\n".join(["", *map(str, differences)])


def check_proof(name: str, found: dict[str, suites.TestResult]) -> None:
    """Asserts that the tests of a suite really ran on all replicas."""
    outside = {
        test
        for test, result in found.items()
        if result.outcome == "passed" and "in scope" not in result.counts
    }
    assert not outside, f"ended outside the scope: {outside}"
    wrong = {
        test: result.counts
        for test, result in found.items()
        if test not in OWN_DISTRIBUTION
        and any(c.endswith(("elsewhere", "not split")) for c in result.counts)
    }
    assert not wrong, "state or batches were not where they belong"
    tests = {
        count: sum(count in result.counts for result in found.values())
        for count in PROOF[name]
    }
    assert all(
        tests[count] >= least // (2 * ONE_IN - 1)
        for count, least in PROOF[name].items()
    ), f"{tests}; at least: {PROOF[name]}"
