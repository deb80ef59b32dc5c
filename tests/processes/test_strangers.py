"""Strangers who reach the port of a job: none of their code runs, and what they write
is refused or passed over."""

import contextlib
import json
import os
import pathlib
import pickle
import re
import socket
import subprocess
import sys
import threading
import time

import jax
import keras
import numpy as np
import pytest

import keras_distribute as kd
from keras_distribute._compat import jax_internals
from keras_distribute.cluster import agreement, processes, signing
from keras_distribute.cluster.ports import free_port
from keras_distribute.launch.job import Job
from tests import attacks
from tests.support import dense_model, mirrored, without_tensorflow

pytestmark = pytest.mark.timeout(200)
ROOT = str(pathlib.Path(__file__).parents[2])
FOLDER = "keras_distribute"
WRONG = b"0" * 64 + b" "
ENDED = (b"999|0|0|ended", WRONG + b"999|9|9|ended")
SIGNS = (b"\xff\xfe", b"", b"|||", b"x|y|z|in run", b"[" * 10**5, *ENDED)
VERDICTS = (b"1|has died", b"\xff", b"", b"x|y", b"1", WRONG + b"1|has died", b"-1|")


class Stranger:
    """Writes to JAX's key-value service, as whoever reaches it can: here by the client
    of a process of the job.

    Args:
        folder: Where a pickle of the stranger's would leave a trace.
    """

    def __init__(self, folder):
        self.harm = pickle.dumps(("seeds", attacks.Harm(os.path.join(folder, "harm"))))
        self.over = threading.Event()

    def write(self, key, value, overwrite=True):
        client = jax_internals.coordination_client()
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            client.key_value_set_bytes(
                f"{FOLDER}/{key}", value, allow_overwrite=overwrite
            )

    def beforehand(self):
        """What processes will say, before they do."""
        for number in range(60):
            for process in (0, 1):
                self.write(f"{number}/0/{process}", self.harm, overwrite=False)

    def instead(self):
        """What they have said, replaced; and what they will say."""
        for number in range(10, 60):
            for process in (0, 1):
                self.write(f"{number}/0/{process}", self.harm)

    def alive(self):
        """Signs of life that are none, or of no process; and that both have ended."""
        for process in ("0", "1", "2", "-1", "x", "1/1", "9" * 500):
            for told in SIGNS:
                self.write(f"alive/{process}", told)

    def verdict(self):
        for text in VERDICTS:
            self.write("verdict", text)

    def go_on(self, what):
        """Does all this again and again, until it is over."""
        while not self.over.wait(0.2):
            for name in set(what) - {"beforehand"}:
                getattr(self, name)()


def training(folder, what=(), seconds=0.0):
    """Trains and talks for some seconds, beside a stranger."""
    without_tensorflow()
    address, process = (
        os.environ["KERAS_DISTRIBUTION_JOB_ADDRESSES"],
        int(os.environ["KERAS_DISTRIBUTION_PROCESS_ID"]),
    )
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, 2, process)
    if "instead" in what:
        agreement._REFUSED_SECONDS = 2.0  # Nobody is late.
        processes._LOOK_SECONDS = 1.5  # Nor is there another culprit.
    stranger = Stranger(folder)
    for name in what:
        if name != "instead":
            getattr(stranger, name)()
    strategy = kd.MultiWorkerMirroredStrategy()
    thread = threading.Thread(target=stranger.go_on, args=[what], daemon=True)
    if process == 1 and what:
        thread.start()
    try:
        return trained(strategy, seconds)
    finally:
        stranger.over.set()
        if thread.is_alive():
            thread.join(30)


def trained(strategy, seconds=0.0):
    keras.utils.set_random_seed(3)
    model = dense_model(strategy, 3)
    x = np.arange(24, dtype="float32").reshape(8, 3) / 24
    end, said = time.monotonic() + seconds, []
    for turn in range(8):
        model.fit(x, x[:, :1], batch_size=4, shuffle=False, verbose=0)
        said.append(
            kd.run_on_chief(lambda turn=turn: {"turn": turn, "array": np.arange(turn)})[
                "turn"
            ]
        )
        kd.barrier("a turn")
        time.sleep(max(0.0, (end - time.monotonic()) / (8 - turn)))
    return said, [w.tolist() for w in model.get_weights()]


def attacked(what, tmp_path, *, token=True):
    """The results of a training that is attacked; nothing of the stranger's runs."""
    environment = {} if token else {signing.TOKEN: ""}
    runner = kd.testing.MultiProcessRunner(
        training,
        2,
        args=[str(tmp_path), what.split(","), 3.0],
        timeout=150,
        environment=environment,
    )
    with runner:
        results = runner.join()
    assert not (tmp_path / "harm").exists()
    return results


def test_what_strangers_write_is_passed_over(tmp_path):
    results = attacked("beforehand,alive,verdict", tmp_path)
    assert [result.exit_code for result in results] == [0, 0], results
    said, weights = trained(mirrored(2))
    for result in results:
        assert result.value[0] == said == list(range(8))
        for ours, theirs in zip(result.value[1], weights, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
        assert (
            result.log.count("who is no process of this job has written that it ends; ")
            == 1
        )


def test_what_strangers_say_for_a_process_is_refused_by_name(tmp_path):
    results = attacked("instead", tmp_path)
    assert any(result.exit_code for result in results), results
    errors = [result.error for result in results if result.error]
    assert any(
        "What process" in error and "says was refused: it is not signed" in error
        for error in errors
    ), errors


def test_without_a_token_no_code_of_strangers_runs_either(tmp_path):
    results = attacked("instead", tmp_path, token=False)
    errors = [result.error for result in results if result.error]
    assert any(
        "A message between processes cannot be read" in error for error in errors
    ), results
    assert "without a token of the job" in results[0].log


TWO_TOKENS = """
import keras_distribute as kd
from keras_distribute.cluster import agreement, processes

assert agreement._REFUSED_SECONDS <= 20.0
agreement._REFUSED_SECONDS = 2.0  # Nobody is late.
processes._LOOK_SECONDS = 1.5
kd.MultiWorkerMirroredStrategy()
"""


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("tokens", "reason"),
    [
        (
            ("a" * 32, "b" * 32),
            "What process [01] says was refused: it is not signed with the token of this job",
        ),
        (
            ("a" * 32, ""),
            "(What process 1 says was refused: it is not signed|Process 0 has a token of the job, and process 1)",
        ),
    ],
)
def test_processes_of_different_tokens_say_so_within_seconds(tokens, reason, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(TWO_TOKENS)
    address = f"127.0.0.1:{free_port()}"
    path = os.pathsep.join(filter(None, sys.path))
    jobs = [
        Job(
            [sys.executable, str(script)],
            1,
            first=i,
            num_processes=2,
            coordinator=address,
            environment=lambda _: {"JAX_PLATFORMS": "cpu", "PYTHONPATH": path},
            token=token,
        )
        for i, token in enumerate(tokens)
    ]
    start = time.monotonic()
    try:
        for job in jobs:
            job.start()
        for job in jobs:
            assert job.wait(60)
    finally:
        for job in jobs:
            job.stop(0.0)
    assert time.monotonic() - start < 30  # For users it is some 20 seconds more.
    said = "".join(line for job in jobs for line in job.workers[0].lines)
    assert re.search(reason, said), said
    assert not any(token and token in said for token in tokens)
    assert all(job.first_failure() for job in jobs)


LAUNCHER = """
import sys
from keras_distribute.launch import command, reception

reception.LINE_SECONDS = 1.5  # A byte at a time is one of the attacks.
sys.exit(command.main())
"""
HOSTS = """
import json, os, sys
import keras_distribute as kd
from tests.processes.test_strangers import trained
from tests.support import without_tensorflow

without_tensorflow()
said, weights = trained(kd.MultiWorkerMirroredStrategy())
attempt = os.environ["KERAS_DISTRIBUTE_RESTARTS"]
kd.barrier("all have trained")
if attempt == "0" and kd.process_index() == 1:
    raise RuntimeError("so that the launchers meet again")
with open(f"{sys.argv[1]}/{kd.process_index()}.json", "w") as file:
    json.dump([kd.process_count(), attempt, said, weights], file)
"""


@pytest.mark.timeout(400)
def test_a_job_of_two_hosts_goes_its_way_while_all_attacks_go_on(tmp_path):
    """The launchers meet, train, one fails, they meet again, and end as if alone."""
    script, token = tmp_path / "script.py", tmp_path / "job.token"
    script.write_text(HOSTS)
    token.touch(0o600)
    token.write_text(signing.new_token())
    port = free_port()
    command = [sys.executable, "-c", LAUNCHER, "--nnodes", "2", "--min-nnodes", "2"]
    command += [
        "--coordinator",
        f"127.0.0.1:{port}",
        "--token-file",
        str(token),
        "--max-restarts",
        "1",
    ]
    command += ["--cpu-devices", "1"]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([ROOT, *filter(None, sys.path)]),
    }
    with attacks.attacked(("127.0.0.1", port + 1), seconds=170, pause=1.0) as done:
        hosts = []
        try:
            for rank in (0, 1):
                hosts.append(
                    subprocess.Popen(
                        [
                            *command,
                            "--node-rank",
                            str(rank),
                            str(script),
                            str(tmp_path),
                        ],
                        stdout=subprocess.PIPE,
                        stderr=subprocess.STDOUT,
                        text=True,
                        env=environment,
                    )
                )
                end = time.monotonic() + 60
                while not all(done.values()) and time.monotonic() < end:
                    time.sleep(0.1)  # The first host meets them all, the second some.
            said = [host.communicate(timeout=240)[0] for host in hosts]
        finally:
            for host in hosts:
                host.kill()
                host.communicate()
    assert [host.returncode for host in hosts] == [0, 0], said
    assert all(done.values()), done
    assert (
        said[0].count(
            "has refused a connection from 127.0.0.1: what it says: it is not signed"
        )
        >= 2
    )
    assert not any(
        token.read_text() in text or "without a token" in text for text in said
    )
    turns, weights = trained(mirrored(2))
    for index in (0, 1):
        result = json.loads((tmp_path / f"{index}.json").read_text())
        assert result[:3] == [2, "1", turns]
        for ours, theirs in zip(result[3], weights, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def listening(folder):
    """Where process 0 of a job on one host can be reached."""
    kd.MultiWorkerMirroredStrategy()
    address = os.environ["KERAS_DISTRIBUTION_JOB_ADDRESSES"]
    port = int(address.rsplit(":", 1)[1])
    reached = []
    for host in ("127.0.0.1", "127.0.0.2", "::1"):
        with contextlib.suppress(OSError), socket.create_connection((host, port), 2):
            reached.append(host)
    kd.barrier("both have looked")
    return reached


def test_a_job_of_one_host_listens_on_that_host_alone():
    assert kd.testing.run_in_processes(listening, 2, None) == [["127.0.0.1"]] * 2
