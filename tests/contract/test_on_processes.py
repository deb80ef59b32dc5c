"""The contracts of every strategy, on several processes."""

import os
import pathlib

import pytest

import keras_distribute as kd
from tests.processes import scenarios

FORMS = [(2, 2), (4, 1)] if os.environ.get("EVERY_CASE") else [(2, 2)]


@pytest.fixture(
    scope="module", params=FORMS, ids=lambda form: f"{form[0]} processes x {form[1]}"
)
def job(request, tmp_path_factory):
    num_processes, devices = request.param
    folder = pathlib.Path(tmp_path_factory.mktemp("contracts"))
    results = kd.testing.run_in_processes(
        scenarios.contracts, num_processes, folder, cpu_devices=devices, timeout=150
    )
    return request.param, results


@pytest.mark.timeout(200)
def test_there_are_as_many_processes_and_devices(job):
    (num_processes, devices), results = job
    assert len(results) == num_processes
    assert [result[:3] for result in results] == [
        (4, num_processes, devices)
    ] * num_processes


@pytest.mark.parametrize("contract", ["training", "custom loop", "contexts"])
def test_the_contract_holds_in_every_process(job, contract):
    for process, result in enumerate(job[1]):
        assert result[3][contract] is None, f"process {process}: {result[3][contract]}"
