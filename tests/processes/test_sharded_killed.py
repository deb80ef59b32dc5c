"""A process dies in the middle of a step, or of a save, while no process has the whole
model: the job ends with the bits of one that nobody disturbs.
"""

import functools
import json
import os
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from keras_distribute.launch import LaunchOptions, launch

from . import sharded_killed

pytestmark = pytest.mark.timeout(300)
REPLICAS = 4
PROCESSES = (4, 2) if os.environ.get("EVERY_CASE") else (2,)
KILLS = [
    (2, "save", 0),
    (2, "save", 1),
    (2, "step", 0),
    (2, "step", 1),
    (4, "save", 2),
    (4, "step", 3),
    (4, "save", 0),
]


def job(folder, processes, moment, victim):
    """The exit code of a job with one restart, and what each process found."""
    script = sharded_killed.__file__
    command = [sys.executable, script, str(folder), moment, str(victim)]
    options = {"cpu_devices": REPLICAS // processes, "max_restarts": 1, "grace": 20.0}
    code = launch(command, LaunchOptions(nproc=processes, **options))
    files = [Path(folder) / f"{i}.json" for i in range(processes)]
    return code, [file.read_text() if file.exists() else "" for file in files]


@functools.cache
def undisturbed(processes):
    with tempfile.TemporaryDirectory() as folder:
        code, found = job(folder, processes, "never", 0)
    assert code == 0 and len(set(found)) == 1
    return found


@functools.cache
def on_one_device():
    return sharded_killed.fit(sharded_killed.built())


@pytest.mark.sampled(7)
@pytest.mark.parametrize(
    ("processes", "moment", "victim"), [kill for kill in KILLS if kill[0] in PROCESSES]
)
def test_a_killed_job_ends_with_the_same_bits(processes, moment, victim, tmp_path):
    code, found = job(tmp_path, processes, moment, victim)
    assert code == 0 and (tmp_path / "fault").read_text() == moment
    assert found == undisturbed(processes)
    steps = {int(file.read_text()) for file in tmp_path.glob("steps-*")}
    assert len(steps) == 1 and 0 < min(steps) < 10  # It did not begin anew.


@pytest.mark.parametrize("processes", PROCESSES)
def test_numbers_of_one_device(processes):
    found = json.loads(undisturbed(processes)[0])
    assert found["replicas"] == REPLICAS and found["parts"] == [4, 1, 4, 1, 1, 1]
    for ours, theirs in zip(found["weights"], on_one_device(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-5)
