"""`kill -9` while checkpoints are written or a training runs, and the end of a program
that waits for no checkpoint.

`KILL_TRIES=50 python -m pytest tests/checkpoint/test_killed.py -s` is the long version,
in which every kind of training is killed; by default one with `fit` and one with a
loop. `KILL_SEED` gives others.
"""

from __future__ import annotations

import os
import pathlib
import random
import signal
import subprocess
import sys
import time
from typing import Any

import keras
import numpy as np
import pytest

from keras_distribute.checkpoint import Checkpoint, CheckpointManager

from .processes import KINDS, Script, assert_as_uninterrupted

SCRIPT = pathlib.Path(__file__).parent / "saving_forever.py"
TRIES = int(os.environ.get("KILL_TRIES", "2"))
MOST = 3 * TRIES + 6  # Of those that may come at no moment of interest.
FIRST = ["arrays", "loop"]
ORDER = [*FIRST, *(kind for kind in KINDS if kind not in FIRST)]
SEED = os.environ.get("KILL_SEED", "0")


def started(folder: Any, *args: str) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(SCRIPT.parents[2]), os.environ.get("PYTHONPATH", "")])
    # JAX's plugin for GPUs shows a traceback where there is none.
    skipped = {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
    environment = os.environ | skipped | {"PYTHONPATH": path}
    command = [sys.executable, str(SCRIPT), str(folder), *args]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def latest(folder: Any) -> int:
    """The step of the latest checkpoint, all of which is checked."""
    named = {f"w{i}": keras.Variable(np.zeros(200_000)) for i in range(4)}
    progress: dict[str, Any] = {}
    manager = CheckpointManager(Checkpoint(**named, progress=progress), folder)
    for step in manager.all_steps():
        manager.restore(step)
        assert progress == {"step": step}
        for i, variable in enumerate(named.values()):
            np.testing.assert_array_equal(
                variable.value, np.full(200_000, step * 10 + i, "float32")
            )
    return manager.latest_step or 0


@pytest.mark.timeout(60 + 30 * TRIES)
def test_killed_at_a_random_moment(tmp_path: Any) -> None:
    """What is there is whole; the next start goes on from it, and clears the rest."""
    generator, last, unfinished = random.Random(SEED), 0, 0
    for tried in range(MOST):
        if tried >= TRIES and unfinished:
            break
        process = started(tmp_path)
        assert process.stdout is not None
        first = process.stdout.readline()
        assert first == f"started from {last}\n", (
            process.stderr.read() if process.stderr else ""
        )
        for _ in range(generator.randrange(2, 6)):
            process.stdout.readline()
        time.sleep(generator.random() * 0.05)
        process.kill()
        said = [int(line) for line in process.communicate()[0].split()]
        names = os.listdir(tmp_path)
        unfinished += any("tmp" in name for name in names)
        assert len([name for name in names if "tmp" in name]) <= 1
        last, before = latest(tmp_path), last
        assert last > before
        assert not said or last >= said[-1] - 1
    assert unfinished


def test_a_save_is_completed_when_the_program_ends(tmp_path: Any) -> None:
    process = started(tmp_path, "3")
    errors = process.communicate(timeout=60)[1]
    assert process.returncode == 0 and "Traceback" not in errors, errors
    assert sorted(os.listdir(tmp_path)) == ["2", "3"]
    assert latest(tmp_path) == 3


@pytest.mark.timeout(120 + 30 * TRIES)
def test_a_training_killed_at_random_moments(tmp_path: Any) -> None:
    """Started again until it is done, each kind in turn: its result is that of a
    training that nobody killed.
    """
    generator = random.Random(SEED)
    killed, unfinished, completed = dict.fromkeys(ORDER, 0), 0, 0
    kinds = ORDER[:TRIES]
    for kind in kinds:
        share = len(range(ORDER.index(kind), TRIES, len(ORDER)))
        while killed[kind] < share:
            completed += 1
            folder = tmp_path / str(completed)
            folder.mkdir()
            while not (folder / f"{kind}.pickle").exists():
                with Script(folder, kind) as script:
                    if killed[kind] < share:
                        for _ in range(generator.randrange(1, 9)):
                            script.line()
                        time.sleep(
                            generator.choice([0, 0.02, 0.3]) * generator.random()
                        )
                        script.process.kill()
                    script.rest()
                    assert script.process.returncode in (0, -signal.SIGKILL), (
                        script.errors
                    )
                    killed[kind] += script.process.returncode == -signal.SIGKILL
                unfinished += bool(list(folder.glob("checkpoints/*tmp*")))
            assert_as_uninterrupted(folder, kind, *kinds)
    print(
        f"\nkilled {killed}, inside of a save {unfinished}, trained to the end {completed} times"
    )
    assert unfinished or TRIES < 20
