"""Two network namespaces stand for two hosts, and the link between them is cut in the
middle of a training.

Needs root, `ip` and a kernel with namespaces; skipped where one is missing.
"""

import json
import pathlib
import re
import runpy
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from tests.namespaces import hosts, ip

__all__ = ["hosts"]
TRAINING = pathlib.Path(__file__).with_name("training.py")
SECONDS = 130


class Host:
    """The launcher in one namespace, and what it has written."""

    def __init__(self, rank, name, folder):
        command = [
            "ip",
            "netns",
            "exec",
            name,
            sys.executable,
            "-u",
            "-m",
            "keras_distribute.launch",
            "--nproc",
            "1",
        ]
        command += [
            "--nnodes",
            "2",
            "--node-rank",
            str(rank),
            "--coordinator",
            "10.213.0.1:7654",
            "--cpu-devices",
            "1",
        ]
        command += [
            "--max-restarts",
            "1",
            "--grace",
            "5",
            str(TRAINING),
            "cut",
            str(folder),
        ]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.said = ""
        self.thread = threading.Thread(target=self.read, daemon=True)
        self.thread.start()

    def read(self):
        for line in self.process.stdout:
            self.said += line


def until(condition, hosts):
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, [host.said for host in hosts]
        time.sleep(0.05)


@pytest.mark.timeout(400)
def test_hosts_that_cannot_reach_each_other_say_so_and_go_on_from_the_checkpoint(
    hosts, tmp_path, monkeypatch
):
    folder, plain = tmp_path / "cut", tmp_path / "plain"
    folder.mkdir()
    plain.mkdir()
    launched = [Host(rank, name, folder) for rank, name in enumerate(hosts)]
    try:
        until(
            lambda: all((folder / f"at-the-cut-{i}").exists() for i in (0, 1)), launched
        )
        ip("-n", hosts[1], "link", "set", "link1", "down")
        (folder / "is-cut").touch()
        start = time.monotonic()
        until(
            lambda: all("starts the job again" in host.said for host in launched),
            launched,
        )
        assert time.monotonic() - start < 60  # And not after JAX's 100 seconds.
        ip("-n", hosts[1], "link", "set", "link1", "up")
        until(
            lambda: all(host.process.poll() is not None for host in launched), launched
        )
        for host in launched:
            host.thread.join(10)
    finally:
        for host in launched:
            host.process.kill()
    assert [host.process.returncode for host in launched] == [0, 0], [
        host.said for host in launched
    ]
    for host, other in zip(
        launched,
        ("process 1 gave its last sign", "process 0, by which all find"),
        strict=True,
    ):
        assert re.search(rf"keras_distribute: {other}.* seconds", host.said), host.said
    monkeypatch.setattr(sys, "argv", [str(TRAINING), "nothing", str(plain)])
    monkeypatch.setenv("KERAS_DISTRIBUTE_RESTARTS", "0")
    # The script hides it from its process, which is that of other tests here.
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    runpy.run_path(str(TRAINING))  # In this process, on all its devices.
    expected = json.loads((plain / "0.json").read_text())
    first, second = (json.loads((folder / f"{i}.json").read_text()) for i in (0, 1))
    assert first == second
    np.testing.assert_allclose(
        first["history"]["loss"], expected["history"]["loss"], rtol=1e-5
    )
    for ours, theirs in zip(first["weights"], expected["weights"], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
