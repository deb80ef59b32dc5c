"""The program of docs/guide/mpi.md under real `mpirun`s, Open MPI's and MPICH's: the
numbers of one device, on one host and on several; a process that is killed.
"""

import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.timeout(200)
ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs/guide/mpi.md").read_text()
PROGRAM, COMMAND, OUTPUT = re.findall(
    r"^```(?:py title=\"train.py\"|shell|text)\n(.*?)^```", PAGE, re.M | re.S
)[:3]
# Root and more processes than cores are for tests alone.
OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_hwloc_base_binding_policy": "none",
    "OMPI_MCA_rtc": "^hwloc",  # Two daemons of one host would share a file.
}
# Several hosts are several names of this one.
OF_HOSTS = {
    "openmpi": ("--mca", "plm_rsh_agent", "{ssh}", "--host", "hosta:2,hostb:2"),
    "mpich": ("-launcher", "ssh", "-launcher-exec", "{ssh}", "-hosts", "hosta,hostb"),
}
SSH = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
shift
exec sh -c "$*"
"""
# The callback of a program that waits to be killed.
WAITS = """
import os
import pathlib
import time


class Waits(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 3:
            pathlib.Path(f"process-{kd.process_index()}").write_text(str(os.getpid()))
            time.sleep(0 if kd.process_index() == 2 else 0.1)
        if batch > 3:
            time.sleep(1.0)


strategy = ("""


@pytest.fixture(params=["openmpi", "mpich"])
def kind(request):
    if shutil.which(f"mpirun.{request.param}") is None:
        pytest.skip(
            f"needs mpirun.{request.param}: apt-get install openmpi-bin, or mpich"
        )
    return request.param


@pytest.fixture
def environment(light_processes):
    """That of a user who has set nothing, in which programs start fast."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("OMPI_", "PMI", "SLURM_", "KERAS_DISTRIB"))
    }
    places = [str(pathlib.Path(sys.executable).parent), inherited["PATH"]]
    paths = [str(ROOT), inherited.get("PYTHONPATH", "")]
    own = {
        "PATH": os.pathsep.join(places),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "TESTS_WITHOUT": "sklearn matplotlib IPython tensorflow",
        "JAX_PLATFORMS": "cpu",
    }
    return inherited | own | OPEN_MPI


def started(kind, environment, folder, program=PROGRAM, options=()):
    """The page's command, with the `mpirun` of a kind, and its options in front."""
    (folder / "train.py").write_text(program)
    first, *rest = COMMAND.split()
    assert first == "mpirun"
    return subprocess.Popen(
        [f"mpirun.{kind}", *options, *rest],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def said(job, seconds=150):
    try:
        return job.communicate(timeout=seconds)
    finally:
        job.kill()
        job.wait()


def losses(output):
    return [line for line in output.splitlines() if line.startswith("['")]


def test_one_device_gives_what_the_page_says(environment, tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM)
    one = subprocess.run(
        [sys.executable, "train.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert one.stdout == OUTPUT, one.stderr


def test_mpirun_gives_the_numbers_of_one_device(kind, environment, tmp_path):
    job = started(kind, environment, tmp_path)
    output, errors = said(job)
    assert job.returncode == 0, errors
    assert losses(output) == losses(OUTPUT), errors
    name = {"openmpi": "OpenMPI", "mpich": "MPICH"}[kind]
    start = (
        f"4 processes x 1 cpu device(s) = 4 replicas, by {name}ClusterResolver; "
        "coordinator 127.0.0.1:"
    )
    assert start in errors


def test_several_hosts(kind, environment, tmp_path):
    ssh = tmp_path / "ssh"
    ssh.write_text(SSH)
    ssh.chmod(0o755)
    options = [option.format(ssh=ssh) for option in OF_HOSTS[kind]]
    # A shell in between, as in a batch file.
    job = started(kind, environment, tmp_path, options=[*options])
    output, errors = said(job)
    assert job.returncode == 0, errors
    assert losses(output) == losses(OUTPUT), errors
    assert re.search("4 replicas, by .*; coordinator (?!127)", errors), errors


def test_a_process_that_is_killed_ends_the_job(kind, environment, tmp_path):
    program = PROGRAM.replace("strategy = (", WAITS.strip()).replace(
        "verbose=0", "verbose=0, callbacks=[Waits()]"
    )
    job = started(kind, environment, tmp_path, program)
    file = tmp_path / "process-2"
    end = time.monotonic() + 100
    while not (file.exists() and file.read_text()) and time.monotonic() < end:
        time.sleep(0.1)
    time.sleep(1.0)
    os.kill(int(file.read_text()), signal.SIGKILL)
    start = time.monotonic()
    output, errors = said(job, 60)
    assert time.monotonic() - start < 15
    assert job.returncode != 0
    print(output, errors)
    assert losses(output) == []
