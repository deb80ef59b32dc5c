"""`python -m keras_distribute.launch`: output, failures, restarts, signals."""

import contextlib
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import keras_distribute as kd
from keras_distribute.callbacks.run import Run
from keras_distribute.cluster import signing
from keras_distribute.cluster.ports import free_port
from keras_distribute.launch import LaunchOptions, launch
from keras_distribute.launch import command as launching
from keras_distribute.launch.command import main
from keras_distribute.launch.job import Job

pytestmark = pytest.mark.timeout(150)
TRAINING = Path(__file__).with_name("training.py")


def script(tmp_path, text):
    path = tmp_path / "script.py"
    path.write_text(
        "import os, sys, time\nindex = int(os.environ['KERAS_DISTRIBUTION_PROCESS_ID'])\n"
        + text
    )
    return str(path)


def run(arguments, capsys):
    code = main(arguments)
    return code, capsys.readouterr().out


def test_every_process_has_its_place_and_its_lines(tmp_path, capsys):
    path = script(
        tmp_path,
        "names = ['KERAS_DISTRIBUTION_NUM_PROCESSES', 'KERAS_DISTRIBUTE_LOCAL_PROCESS_ID', 'JAX_NUM_CPU_DEVICES']\n"
        "print(*[os.environ[name] for name in names], *sys.argv[1:])\nprint('to stderr', file=sys.stderr)\n",
    )
    logs = tmp_path / "logs"
    arguments = [
        "--nproc",
        "2",
        "--cpu-devices",
        "3",
        "--log-dir",
        str(logs),
        path,
        "--epochs",
        "2",
    ]
    code, out = run(arguments, capsys)
    assert code == 0
    assert sorted(out.splitlines()) == [
        "[0] 2 0 3 --epochs 2",
        "[0] to stderr",
        "[1] 2 1 3 --epochs 2",
        "[1] to stderr",
    ]
    assert (logs / "process-1.log").read_text().splitlines()[0] == "2 1 3 --epochs 2"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="No full device here.")
def test_where_logs_cannot_be_written_the_lines_are_shown(tmp_path, capsys):
    (tmp_path / "process-1.log").symlink_to("/dev/full")
    path = script(tmp_path, "print('one', flush=True)\nprint('two')\n")
    code, out = run(["--nproc", "2", "--log-dir", str(tmp_path), path], capsys)
    assert code == 0
    lines = out.splitlines()
    assert {"[0] one", "[0] two", "[1] one", "[1] two"} <= {*lines}
    (told,) = [line for line in lines if "No space left" in line]
    assert told.startswith("[launch] writes no logs any more, only here: ")


def test_another_host_goes_on_counting(tmp_path, capsys):
    path = script(tmp_path, "print(os.environ['KERAS_DISTRIBUTION_JOB_ADDRESSES'])\n")
    arguments = [
        "--nproc",
        "2",
        "--nnodes",
        "2",
        "--node-rank",
        "1",
        "--coordinator",
        "host0:1234",
        path,
    ]
    code, out = run(arguments, capsys)
    assert (code, sorted(out.splitlines())) == (0, ["[2] host0:1234", "[3] host0:1234"])


def test_debug_is_two_processes_of_one_cpu_and_modules_run(tmp_path, capsys):
    code, out = run(["debug", "-m", "platform"], capsys)
    assert code == 0
    assert [line[:4] for line in sorted(out.splitlines())] == ["[0] ", "[1] "]


def test_the_first_failure_ends_the_job_with_its_code_and_traceback(tmp_path, capsys):
    path = script(tmp_path, "if index == 1:\n    {}['missing']\ntime.sleep(60)\n")
    start = time.monotonic()
    code, out = run(["--nproc", "3", "--grace", "1", path], capsys)
    assert code == 1 and time.monotonic() - start < 30
    assert (
        "[launch] process 1 failed first (exit code 1); the others, [0, 2], were stopped."
        in out
    )
    assert out.rstrip().endswith("KeyError: 'missing'")


@pytest.mark.parametrize(
    ("exit_code", "shown"), [(7, "7"), (143, "143, SIGTERM"), (170, "170")]
)
def test_restarts_are_counted_and_end(tmp_path, capsys, exit_code, shown):
    path = script(
        tmp_path,
        "print('try', os.environ['KERAS_DISTRIBUTE_RESTARTS'])\n"
        f"sys.exit({exit_code})\n",
    )
    code, out = run(["--nproc", "1", "--max-restarts", "2", path], capsys)
    assert code == exit_code
    assert out.count(f"process 0 failed first (exit code {shown});") == 3
    assert re.findall(r"\[0\] try (\d)", out) == ["0", "1", "2"]
    assert "starts the job again, for the 2nd time of 2" in out
    succeeds = script(
        tmp_path, "sys.exit(os.environ['KERAS_DISTRIBUTE_RESTARTS'] == '0')\n"
    )
    assert run(["--max-restarts", "5", succeeds], capsys)[0] == 0


def signalled(path, number, tmp_path, grace):
    """Runs the launcher and sends it a signal when the processes are ready."""
    command = [
        sys.executable,
        "-m",
        "keras_distribute.launch",
        "--nproc",
        "2",
        "--grace",
        str(grace),
        path,
        str(tmp_path),
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    watchdog = threading.Timer(100, process.kill)
    watchdog.start()
    end = time.monotonic() + 60
    while (
        not all((tmp_path / f"ready{i}").exists() for i in (0, 1))
        and time.monotonic() < end
    ):
        time.sleep(0.1)
    process.send_signal(number)
    out, _ = process.communicate(timeout=90)
    watchdog.cancel()
    return process.returncode, out


def test_a_signal_is_passed_on_and_whoever_ignores_it_is_killed(tmp_path):
    path = script(
        tmp_path,
        "import signal\nsignal.signal(signal.SIGTERM, lambda *_: index == 0 and sys.exit(42))\n"
        "open(sys.argv[1] + f'/ready{index}', 'w').write(str(os.getpid()))\n"
        "for _ in range(600):\n    time.sleep(0.1)\n",
    )
    start = time.monotonic()
    code, out = signalled(path, signal.SIGTERM, tmp_path, 2)
    assert code == 42 and time.monotonic() - start < 60
    assert "passes on SIGTERM" in out
    for i in (0, 1):
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / f"ready{i}").read_text()), 0)


def test_whoever_is_killed_after_a_signal_has_failed(tmp_path):
    path = script(
        tmp_path,
        "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "open(sys.argv[1] + f'/ready{index}', 'w').write('')\ntime.sleep(60)\n",
    )
    code, _ = signalled(path, signal.SIGTERM, tmp_path, 1)
    assert code == 128 + signal.SIGKILL


def test_a_process_writes_to_its_end_where_its_lines_cannot_be_shown(tmp_path):
    path = script(
        tmp_path, "for i in range(20000):\n    print('a line that fills the pipe', i)\n"
    )

    def refused(index, line):
        raise OSError("no space left")

    job = Job([sys.executable, path], 1, on_line=refused)
    job.start()
    try:
        assert job.wait(60) and job.first_failure() is None
    finally:
        job.stop()
    lines = list(job.workers[0].lines)
    assert lines[-1] == "a line that fills the pipe 19999\n"


def test_processes_that_have_ended_leave_no_open_pipe(tmp_path):
    job = Job([sys.executable, script(tmp_path, "print('a line')")], 2)
    job.start()
    assert job.wait(60)
    job.stop()
    assert [list(worker.lines) for worker in job.workers] == [["a line\n"]] * 2
    assert all(worker.process.stdout.closed for worker in job.workers)


def test_a_signal_that_is_ignored_stays_so(tmp_path):
    """Under `nohup` a terminal may be closed."""
    path = script(
        tmp_path,
        "open(sys.argv[1] + f'/ready{index}', 'w').write('')\n"
        "while not os.path.exists(sys.argv[1] + '/end'):\n    time.sleep(0.1)\n",
    )
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # A child inherits it.
    try:

        def ends():
            while not (tmp_path / "ready1").exists():
                time.sleep(0.1)
            time.sleep(1.0)
            (tmp_path / "end").touch()

        end = threading.Thread(target=ends)
        end.start()
        code, out = signalled(path, signal.SIGHUP, tmp_path, 5)
        end.join()
    finally:
        signal.signal(signal.SIGHUP, before)
    assert (code, out) == (0, "")


def replicas_in_sync():
    return kd.MultiWorkerMirroredStrategy().num_replicas_in_sync


def test_no_proxy_is_asked_for_the_way_to_process_0():
    asked = []
    with socket.create_server(("127.0.0.1", 0)) as proxy:

        def accepts():
            with contextlib.suppress(OSError):
                while True:
                    asked.append(proxy.accept())

        threading.Thread(target=accepts, daemon=True).start()
        address = f"http://127.0.0.1:{proxy.getsockname()[1]}"
        environment = {"http_proxy": address, "no_proxy": "example.com"}
        found = kd.testing.run_in_processes(
            replicas_in_sync, 2, environment=environment, timeout=100
        )
    assert (found, asked) == ([2, 2], [])


def test_of_processes_that_cannot_all_be_started_none_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    started, popen = [], subprocess.Popen

    def one_alone(*arguments, **options):
        if started:
            raise BlockingIOError("Resource temporarily unavailable")
        started.append(popen(*arguments, **options))
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", one_alone)
    with pytest.raises(BlockingIOError), kd.testing.MultiProcessRunner(time.sleep, 3):
        pass
    assert started[0].returncode == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []


PROGRAM = """
import dataclasses, math
import keras_distribute as kd
from keras_distribute.errors import StructureTypeError

@dataclasses.dataclass
class Config:
    size: int
    def doubled(self):
        return Config(2 * self.size)

def doubled(config):
    assert type(config) is Config
    return config.doubled()

first = doubled
def doubled(config):
    return Config(20 * config.size)

def refused(function):
    try:
        kd.testing.run_in_processes(function, 1)
    except StructureTypeError as error:
        assert "notebook is run by kd.notebook_launcher" in str(error)
        return True

if __name__ == "__main__":
    (found,) = kd.testing.run_in_processes(doubled, 1, Config(7))
    assert found == Config(140) and type(found) is Config
    assert kd.testing.run_in_processes(math.factorial, 1, 3) == [6]
    assert refused(first) and refused(Config(7).doubled)
    namespace = {"__name__": "elsewhere"}
    exec("def nowhere(): pass", namespace)
    assert refused(namespace["nowhere"])
    print("as they are")
"""


def test_the_classes_of_a_program_and_functions_that_are_not_found(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    for arguments, said in ([str(path)], "as they are"), (["-"], "StructureTypeError"):
        done = subprocess.run(
            [sys.executable, *arguments],
            input="" if arguments != ["-"] else PROGRAM,
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert said in done.stdout + done.stderr, done.stderr


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    return trained("nothing", tmp_path_factory.mktemp("uninterrupted"), 0)


def trained(what, folder, code):
    command = [sys.executable, str(TRAINING), what, str(folder)]
    options = LaunchOptions(nproc=2, cpu_devices=1, max_restarts=1, grace=30)
    assert launch(command, options) == code
    if code:
        assert launch(command, options) == 0
    return [json.loads((folder / f"{i}.json").read_text()) for i in (0, 1)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("what", "code"), [("raise", 0), ("kill", 0), ("terminate", 42)]
)
def test_a_job_goes_on_from_its_checkpoint_with_the_same_result(
    what, code, uninterrupted, tmp_path, monkeypatch
):
    """A worker raises, the chief is killed, the launcher is told to end."""
    # The launcher is this process, whose handler for SIGTERM it replaces for the time.
    if what == "terminate":
        assert launching._SIGNALS[0] == signal.SIGTERM
    first, second = trained(what, tmp_path, code)
    assert first == second
    assert first["history"] == uninterrupted[0]["history"]
    for ours, theirs in zip(first["weights"], uninterrupted[0]["weights"], strict=True):
        np.testing.assert_array_equal(ours, theirs)


def assert_ended_alone(folder, expected):
    """Process 0 alone has written results: up to rounding the expected ones."""
    assert not (folder / "1.json").exists()
    result = json.loads((folder / "0.json").read_text())
    np.testing.assert_allclose(
        result["history"]["loss"], expected["history"]["loss"], rtol=1e-5
    )
    for ours, theirs in zip(result["weights"], expected["weights"], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_job_shrinks_to_the_processes_that_are_left(uninterrupted, tmp_path, capsys):
    """The chief is killed; the other one goes on alone, with the same global batches."""
    command = [sys.executable, str(TRAINING), "kill", str(tmp_path)]
    options = LaunchOptions(nproc=2, cpu_devices=1, max_restarts=1, min_nproc=1)
    assert launch(command, options) == 0
    assert "goes on with 1 of 2 processes" in capsys.readouterr().out
    assert_ended_alone(tmp_path, uninterrupted[0])


def test_a_job_goes_on_without_a_host_that_is_gone(uninterrupted, tmp_path):
    """The launcher of the second host is killed, and with it its process; the first
    host goes on alone.
    """
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "keras_distribute.launch",
        "--nnodes",
        "2",
        "--coordinator",
        f"127.0.0.1:{port}",
    ]
    command += [
        "--min-nnodes",
        "1",
        "--node-timeout",
        "1",
        "--max-restarts",
        "1",
        "--cpu-devices",
        "1",
    ]
    token = tmp_path / "job.token"
    token.touch(0o600)
    token.write_text(signing.new_token())
    command += ["--token-file", str(token)]
    hosts = [
        subprocess.Popen(
            [*command, "--node-rank", str(rank), str(TRAINING), "gone", str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        said = hosts[0].communicate(timeout=120)[0]
    finally:
        for host in hosts:
            host.kill()
            host.communicate()
    assert [host.returncode for host in hosts] == [0, -signal.SIGKILL], said
    assert "process 1 gave its last sign of life" in said
    assert "goes on with the hosts 0 of 2." in said
    assert_ended_alone(tmp_path, uninterrupted[0])


def test_processes_with_data_of_their_own_do_not_shrink():
    states = [
        {"data": {"at": 1}, "callbacks": {}},
        {"data": {"at": 2}, "callbacks": {}},
    ]
    with pytest.raises(
        ValueError, match="Each of 2 processes had read other data, of its own"
    ):
        Run._keras_distribute_state_of_all(None, states)
    states[1]["data"] = {"at": 1}
    assert Run._keras_distribute_state_of_all(None, states) is states[0]


def test_whoever_is_left_out_takes_its_gpus_along_and_a_frozen_process_is_the_one(
    tmp_path, capsys, monkeypatch
):
    """Process 1 freezes, so the others end with the code of those that follow; then
    there are too few to lose one.
    """
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    monkeypatch.setattr(launching, "_CULPRIT_SECONDS", 1.0)
    path = script(
        tmp_path,
        "import signal\nif os.environ['KERAS_DISTRIBUTE_RESTARTS'] == '0':\n"
        "    index == 1 and os.kill(os.getpid(), signal.SIGSTOP)\n    time.sleep(0.5)\n    sys.exit(43)\n"
        "print(index, os.environ['KERAS_DISTRIBUTION_NUM_PROCESSES'], os.environ['CUDA_VISIBLE_DEVICES'])\n"
        "sys.exit(os.environ['KERAS_DISTRIBUTE_RESTARTS'] == '1' and index == 0)\n",
    )
    code, out = run(
        [
            "--nproc",
            "3",
            "--min-nproc",
            "2",
            "--max-restarts",
            "2",
            "--grace",
            "1",
            path,
        ],
        capsys,
    )
    assert code == 0
    second = out[out.rindex("starts the job again, for the 2nd") :]
    assert sorted(
        line for line in second.splitlines() if line.startswith(("[0]", "[1]"))
    ) == [
        "[0] 0 2 4",
        "[1] 1 2 6",
    ]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            ["--nproc", "2", "--min-nproc", "3"],
            "may be started again with fewer processes, at least one",
        ),
        (
            ["--nnodes", "2", "--coordinator", "h:1", "--min-nproc", "1"],
            "min_nproc=1, nproc=1, nnodes=2",
        ),
        (["--nproc", "0"], "nproc is at least 1"),
        (
            ["--nnodes", "2", "--coordinator", "h:1", "--min-nnodes", "3"],
            "Of 2 hosts 1 to 2 may be needed",
        ),
        (
            ["--nnodes", "2", "--coordinator", "h", "--min-nnodes", "1"],
            "address of process 0 is a host and a port",
        ),
        (["--nnodes", "2"], "Several hosts need the address of the first one"),
        (["--node-rank", "1"], "The number of this host is from 0 to 0"),
        (["--cpu-devices", "0"], "cpu_devices is at least 1"),
        (["--max-restarts", "-1"], "max_restarts is at least 0"),
    ],
)
def test_numbers_that_make_no_sense(arguments, text, capsys):
    with pytest.raises(SystemExit):
        main([*arguments, "script.py"])
    assert text in capsys.readouterr().err


def test_hosts_meet_with_a_token_alone(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv(signing.TOKEN, raising=False)
    arguments = ["--nnodes", "2", "--coordinator", "127.0.0.1:9", "--min-nnodes", "1"]
    with pytest.raises(SystemExit):
        main([*arguments, "script.py"])
    said = capsys.readouterr().err
    assert "The launchers of several hosts meet with a token of the job" in said
    assert "> job.token)\n" in said and "--token-file job.token" in said
    monkeypatch.setenv(signing.TOKEN, "far too short")
    with pytest.raises(SystemExit):
        main([*arguments, "script.py"])
    said = capsys.readouterr().err
    assert "32 to 4096 characters" in said and "far too short" not in said


def test_the_token_is_handed_down_in_the_environment_alone(tmp_path, capsys):
    token = tmp_path / "job.token"
    token.touch(0o600)
    token.write_text(signing.new_token() + "\n")
    path = script(
        tmp_path,
        "places = ('self', os.getppid())\n"
        "arguments = [open(f'/proc/{place}/cmdline').read() for place in places]\n"
        "token = os.environ['KERAS_DISTRIBUTE_JOB_TOKEN']\n"
        "print(token in str(arguments), token == open(sys.argv[1]).read().strip())\n",
    )
    hosts = ["--nnodes", "2", "--node-rank", "1", "--coordinator", "host0:1234"]
    code, out = run([*hosts, "--token-file", str(token), path, str(token)], capsys)
    assert (code, out) == (0, "[1] False True\n")
    code, out = run(["--token-file", str(token), path, str(token)], capsys)  # One host.
    assert (code, out) == (0, "[0] False False\n")


def test_gpus_are_shared_evenly(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    path = script(tmp_path, "print(os.environ.get('CUDA_VISIBLE_DEVICES'))\n")
    _, out = run(["--nproc", "2", path], capsys)
    assert sorted(out.splitlines()) == ["[0] 4,5", "[1] 6,7"]


@pytest.mark.parametrize(
    ("platforms", "plugin", "is_said"),
    [("", "jax_cuda13_plugin", True), ("", "", False), ("cpu", "jax_cuda12", False)],
)
def test_of_processes_without_a_gpu_of_their_own_is_told(
    tmp_path, capsys, monkeypatch, platforms, plugin, is_said
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4")
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == plugin)
    path = script(tmp_path, "print('trained')\n")
    code, out = run(["--nproc", "2", path], capsys)
    said = (
        "[launch] 2 processes share 1 GPU(s), which NCCL refuses: --nproc as many as "
        "there are GPUs, or --cpu-devices 1.\n"
    )
    assert code == 0 and (said in out) == is_said
