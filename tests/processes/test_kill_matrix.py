"""One cell of `benchmarks/kill_matrix.py`; `python -m benchmarks kill_matrix` runs all
of them.
"""

import importlib
import pathlib
import sys

import pytest

BENCHMARKS = str(pathlib.Path(__file__).parents[2] / "benchmarks")


@pytest.fixture(scope="module")
def matrix():
    sys.path.insert(0, BENCHMARKS)
    try:
        return importlib.import_module("kill_matrix")
    finally:
        sys.path.remove(BENCHMARKS)


@pytest.mark.timeout(300)
def test_a_job_ends_with_the_same_weights_whatever_befalls_it(matrix, tmp_path):
    """The chief freezes in an epoch; `test_launch` kills it, and lets a worker raise."""
    expected, _ = matrix.uninterrupted(tmp_path / "plain")
    result, _, out = matrix.cell(tmp_path / "cell", "epoch", "chief", "STOP", expected)
    assert result == matrix.GOOD, out


def test_the_table_says_what_was_not_run(matrix):
    table = matrix.table({"epoch worker KILL": {"result": "HUNG", "seconds": 120}})
    lines = table.splitlines()
    assert len(lines) == 2 + len(matrix.MOMENTS)
    assert lines[0].startswith(
        "| killed, frozen or terminated | worker, SIGKILL | worker, SIGSTOP |"
    )
    assert lines[4] == "| in the middle of an epoch | HUNG, 120 s |" + " not run |" * 5
