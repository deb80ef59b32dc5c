"""`python -m keras_distribute.launch --ps 1 --workers 2`: all tasks of a job, and what
becomes of them.
"""

import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from keras_distribute import config
from keras_distribute.launch import roles
from keras_distribute.launch.job import Job
from keras_distribute.launch.roles import Roles, addresses, environment_of

BEGIN = """
    import os, signal, sys
    import keras, numpy as np
    import keras_distribute as kd

    def tasks(job):
        found = []
        for pid in filter(str.isdecimal, os.listdir("/proc")):
            try:
                with open(f"/proc/{pid}/stat") as file:
                    parent = int(file.read().rsplit(")", 1)[1].split()[1])
                with open(f"/proc/{pid}/environ") as file:
                    environment = file.read()
            except OSError:
                continue
            task = '"task": {"type": "%s"' % job
            if parent == os.getppid() and task in environment:
                found.append(int(pid))
        return found

    resolver = kd.cluster_resolver.TFConfigClusterResolver()
    assert resolver.task_type == "chief"
    strategy = kd.ParameterServerStrategy(resolver)
    coordinator = kd.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        v = keras.Variable(0.0)

    def add():
        v.assign_add(1.0)

    coordinator.schedule(add)
    coordinator.join()
"""


def launched(tmp_path, script, *options):
    """The exit code and the output of a script, which the launcher runs as the chief."""
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(BEGIN) + textwrap.dedent(script))
    command = [sys.executable, "-m", "keras_distribute.launch", "--ps", "1"]
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    done = subprocess.run(
        [*command, "--workers", "2", *options, str(path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_a_worker_is_started_again_alone(tmp_path):
    code, output = launched(
        tmp_path,
        """
        os.kill(tasks("worker")[0], signal.SIGKILL)
        for i in range(100):
            coordinator.schedule(add)
        coordinator.join()
        import time
        while not all(worker.is_ready for worker in strategy.cluster.workers):
            time.sleep(0.1)
        for i in range(100):
            coordinator.schedule(add)
        coordinator.join()
        print("counted", v.numpy())
        print({worker.num_devices for worker in strategy.cluster.workers}, "devices")
        """,
        "--cpu-devices",
        "2",
        "--log-dir",
        str(tmp_path),
    )
    assert code == 0, output
    assert "(exit code 137), and is started again" in output
    assert "[ chief:0] counted 201.0" in output
    log = (tmp_path / "process-chief-0.log").read_text()
    assert log.endswith("counted 201.0\n{2} devices\n")


def test_all_tasks_are_started_again_when_a_server_ends(tmp_path):
    code, output = launched(
        tmp_path,
        """
        if os.environ["KERAS_DISTRIBUTE_RESTARTS"] == "0":
            os.kill(tasks("ps")[0], signal.SIGKILL)
        coordinator.schedule(add)
        coordinator.join()
        print("counted", v.numpy())
        """,
        "--max-restarts",
        "1",
    )
    assert code == 0, output
    assert "starts all tasks again (1)" in output
    assert "counted 2.0" in output


@pytest.mark.parametrize(
    ("gpus", "shares"),
    [("0,1,2,3", ["0,1", "2,3"]), ("3", ["3", "3"]), ("", [None, None])],
)
def test_workers_have_the_gpus_of_the_host(monkeypatch, gpus, shares):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    roles = Roles(
        ["true"],
        num_workers=2,
        num_ps=1,
        cpu_devices=None,
        max_restarts=0,
        grace=1.0,
        on_line=lambda name, line: None,
        tell=lambda text: None,
    )
    for index, share in enumerate(shares):
        told = roles._devices_of("worker", index)
        assert told.get("CUDA_VISIBLE_DEVICES", gpus or None) == share
        assert "JAX_PLATFORMS" not in told
    for job in ("ps", "chief"):
        told = roles._devices_of(job, 0)
        assert told["JAX_PLATFORMS"] == "cpu"


@pytest.mark.parametrize(
    ("cores", "asked", "threads"), [(2, "", "1 1"), (16, "", "4 2"), (16, "3", "3 3")]
)
def test_tasks_share_the_cores_of_the_host(monkeypatch, cores, asked, threads):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(cores))
    monkeypatch.setattr(config, "_chosen", config._Chosen())
    monkeypatch.setenv("NPROC", asked)
    monkeypatch.setenv(config.SET_HERE, "3 by another")
    config._size_pool(1)
    jobs = addresses(4, 3, with_chief=True)
    told = {job: environment_of(jobs, job, 0, "token") for job in jobs}
    assert f"{told['worker']['NPROC']} {told['ps']['NPROC']}" == threads
    assert "NPROC" not in told["chief"]
    if not asked:  # What this process takes for itself is none of the tasks' business.
        config._size_pool(500)
        assert environment_of(jobs, "worker", 0, "token") == told["worker"]


def test_the_exit_code_is_the_chiefs(tmp_path):
    code, output = launched(tmp_path, "sys.exit(7)")
    assert code == 7
    assert "chief:0 has failed (exit code 7)" in output


@pytest.mark.parametrize(
    "options", [["--ps", "1"], ["--workers", "2"], ["--ps", "1", "--workers", "-1"]]
)
def test_wrong_options(options, capsys):
    from keras_distribute.launch import command

    with pytest.raises(SystemExit):
        command.main([*options, "train.py"])
    assert "--workers" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_tasks_outlive_the_thread_that_started_them():
    job = Job([sys.executable, "-c", "import time; time.sleep(100)"], 1)
    thread = threading.Thread(target=job.start)
    thread.start()
    thread.join()
    time.sleep(0.3)
    assert job.running()
    job.stop(grace=0)
    assert not job.running()
    with pytest.raises(FileNotFoundError):
        Job(["/no/such/program"], 1).start()


TASK = """
import os, subprocess, sys, time
child = subprocess.Popen(["sleep", "100"])
print("child", child.pid, flush=True)
if '"type": "worker"' in os.environ["TF_CONFIG"]:
    os._exit(3)
time.sleep(100)
"""


def test_what_a_worker_has_started_ends_before_it_is_started_again(monkeypatch):
    monkeypatch.setattr(roles, "SERVER", [sys.executable, "-c", TASK])
    monkeypatch.setattr(roles, "_SECONDS_UNTIL_RESTART", 0.1)
    lines, told = [], []
    chief = [sys.executable, "-c", "import time; time.sleep(4)"]
    launcher = Roles(
        chief,
        1,
        1,
        cpu_devices=1,
        max_restarts=0,
        grace=1.0,
        on_line=lambda _, line: lines.append(line.split()),
        tell=told.append,
    )
    assert launcher.run() == 0
    children = [int(line[1]) for line in lines if line[0] == "child"]
    assert len(children) > 2 and "worker:0 has ended (exit code 3)" in told[0]
    end = time.monotonic() + 10
    while any(map(runs, children)) and time.monotonic() < end:
        time.sleep(0.1)
    assert [process for process in children if runs(process)] == []


def runs(process):
    """Whether it has not ended; one that nobody has asked for may still be listed."""
    try:
        state = pathlib.Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False
    return state.rpartition(")")[2].split()[0] != "Z"
