"""The training script as a process of its own, and what it left."""

from __future__ import annotations

import functools
import os
import pathlib
import pickle
import subprocess
import sys
import tempfile
from typing import Any

from .support import assert_same_bits

ROOT = pathlib.Path(__file__).parents[2]
KINDS = ["arrays", "tf.data", "Grain", "arrays, four steps an execution", "loop"]


class Script:
    """A start of `training.py`, which has begun.

    Args:
        folder: Where it keeps its checkpoints and what came out.
        arguments: Options and kinds.
    """

    def __init__(self, folder: pathlib.Path, *arguments: str) -> None:
        command = [
            sys.executable,
            "-m",
            "tests.checkpoint.training",
            str(folder),
            *arguments,
        ]
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=os.environ | {"PYTHONPATH": path, "TF_CPP_MIN_LOG_LEVEL": "3"},
        )

    def __enter__(self) -> Script:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.process.kill()
        self.process.communicate()
        self._log.close()

    @property
    def errors(self) -> str:
        """What it wrote to its other output."""
        return os.pread(self._log.fileno(), 1_000_000, 0).decode()

    def line(self) -> str:
        """The next line; nothing after the end."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def allow(self, steps: int) -> None:
        """Lets a gated script do so many steps more."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{steps}\n")
        self.process.stdin.flush()

    def rest(self) -> list[str]:
        """All lines until the end."""
        assert self.process.stdout is not None
        # `communicate` would forget what `readline` has read ahead.
        output = self.process.stdout.read()
        self.process.wait()
        return output.splitlines()


def result(folder: pathlib.Path, kind: str) -> dict[str, Any]:
    """What came out of a training."""
    return pickle.loads((folder / f"{kind}.pickle").read_bytes())


@functools.cache
def uninterrupted(
    *kinds: str,
) -> tuple[dict[str, dict[str, Any]], dict[str, list[str]]]:
    """What comes out of these kinds, by default all, without checkpoints and
    interruptions; the lines of their steps.
    """
    names = kinds or tuple(KINDS)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        with Script(folder, "--whole", *names) as script:
            lines = script.rest()
            assert script.process.returncode == 0, script.errors
        results = {kind: result(folder, kind) for kind in names}
    begun = [index for index, line in enumerate(lines) if line.startswith("begun")] + [
        len(lines)
    ]
    return results, {
        k: lines[a + 1 : b]
        for k, a, b in zip(names, begun[:-1], begun[1:], strict=True)
    }


def assert_as_uninterrupted(folder: pathlib.Path, kind: str, *kinds: str) -> None:
    """Weights, history, and what was seen of every step: bit for bit as
    `uninterrupted(*kinds)` has them.
    """
    actual, expected = result(folder, kind), uninterrupted(*kinds)[0][kind]
    assert_same_bits(actual.pop("bits"), expected["bits"])
    for name, value in actual.items():
        assert value == expected[name], name
