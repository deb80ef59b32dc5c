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
import tempfile
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
# The daemons of Open MPI on one host would race for one folder, so each has its own.
SSH = """#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do shift; done
mkdir -p {folder}/$1
export TMPDIR={folder}/$1
shift
exec sh -c "$*"
"""
# A training that saves every second step, and waits after the sixth where it is told.
WAITS = """
import os
import pathlib
import time


class Waits(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        step = int(self.model.optimizer.iterations)
        if step > 6 and os.path.exists("wait"):
            pathlib.Path(f"process-{kd.process_index()}").write_text(f"{os.getpid()} ")
            time.sleep(1.0)


strategy = """
SAVES = 'callbacks=[kd.callbacks.BackupAndRestore("backup", save_freq=2), Waits()]'


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
    # A short path: it becomes a part of sockets' names.
    with tempfile.TemporaryDirectory() as folder:
        ssh.write_text(SSH.format(folder=folder))
        ssh.chmod(0o755)
        options = [option.format(ssh=ssh) for option in OF_HOSTS[kind]]
        job = started(kind, environment, tmp_path, options=options)
        output, errors = said(job)
    assert job.returncode == 0, errors
    assert losses(output) == losses(OUTPUT), errors
    assert re.search("4 replicas, by .*; coordinator (?!127)", errors), errors


def waiting(kind, environment, folder):
    """A training in the midst of its first epoch, and the numbers of its processes."""
    (folder / "wait").touch()
    program = PROGRAM.replace("strategy = ", WAITS.strip(), 1)
    program = program.replace("verbose=0", f"verbose=0, {SAVES}")
    job = started(kind, environment, folder, program)
    files = [folder / f"process-{number}" for number in range(4)]
    end = time.monotonic() + 100
    while not all(file.exists() and file.read_text() for file in files):
        assert time.monotonic() < end and job.poll() is None, said(job)
        time.sleep(0.1)
    (folder / "wait").unlink()
    return job, program, [int(file.read_text()) for file in files]


def test_a_process_that_is_killed_ends_the_job_which_goes_on_when_started_again(
    kind, environment, tmp_path
):
    job, program, processes = waiting(kind, environment, tmp_path)
    os.kill(processes[2], signal.SIGKILL)
    start = time.monotonic()
    output, errors = said(job, 60)
    assert time.monotonic() - start < 15
    assert job.returncode != 0
    assert re.search(r"rank 2 with PID|Killed \(signal 9\)", output + errors)
    assert losses(output) == []
    output, errors = said(started(kind, environment, tmp_path, program))
    assert losses(output) == losses(OUTPUT), errors


def test_sigterm_to_the_mpirun_of_mpich_saves(kind, environment, tmp_path):
    if kind == "openmpi":
        pytest.skip("Open MPI kills the processes at once")
    job, program, _ = waiting(kind, environment, tmp_path)
    job.terminate()
    output, errors = said(job, 60)
    assert errors.count("a checkpoint is saved, and the program exits") == 4, errors
    assert losses(output) == []
    output, errors = said(started(kind, environment, tmp_path, program))
    assert losses(output) == losses(OUTPUT), errors
