"""`SIGTERM` at random moments: the program exits with status 42, and started again it
goes on with the very next step.

`PREEMPTIONS=20 python -m pytest tests/checkpoint/test_preemption.py` is the long
version.
"""

from __future__ import annotations

import os
import pathlib
import random
import signal
import time

import pytest

from .processes import KINDS, Script, assert_as_uninterrupted, uninterrupted

pytestmark = pytest.mark.sampled(5)

PREEMPTIONS = int(os.environ.get("PREEMPTIONS", "2"))
SEED = os.environ.get("KILL_SEED", "0")


def preempt(script: Script, steps: int, delay: float) -> list[str]:
    """Signals after so many steps and a moment; the script has leave for a few steps
    more until the signal is out.
    """
    script.allow(steps + 3)
    lines = [script.line() for _ in range(1 + steps)]
    time.sleep(delay)
    script.process.send_signal(signal.SIGTERM)
    script.allow(1000)
    lines += script.rest()
    assert script.process.returncode == 42, script.errors
    return steps_in(lines)


def steps_in(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith("step")]


@pytest.mark.timeout(120 + 30 * PREEMPTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_at_random_moments(kind: str, tmp_path: pathlib.Path) -> None:
    """No step is done twice, none is left out, and the result is that of a training
    without interruption.
    """
    generator = random.Random(SEED + kind)
    steps: list[str] = []
    expected = uninterrupted(kind)[1][kind]
    longest = len(expected) // (PREEMPTIONS + 1) - 3
    for _ in range(PREEMPTIONS):
        with Script(tmp_path, "--gated", kind) as script:
            steps += preempt(
                script,
                generator.randint(1, max(1, longest)),
                generator.choice([0, 0.02]),
            )
        if len(expected) - len(steps) < 5:
            break  # A signal would come after the end.
    with Script(tmp_path, kind) as script:
        steps += steps_in(script.rest())
        assert script.process.returncode == 0, script.errors
    assert steps == expected
    assert_as_uninterrupted(tmp_path, kind, kind)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("kind", ["arrays", "loop"])
def test_a_grace_period_is_used_for_training(kind: str, tmp_path: pathlib.Path) -> None:
    """A checkpoint at once, another one shortly before the end, and the steps between
    them are not lost.
    """
    grace, expected = 4.0, uninterrupted(kind)[1][kind]
    with Script(tmp_path, "--grace", str(grace), "--pause", "0.3", kind) as script:
        begun = [script.line() for _ in range(3)]
        script.process.send_signal(signal.SIGTERM)
        notified = time.monotonic()
        steps = steps_in([*begun, *script.rest()])
        assert script.process.returncode == 42, script.errors
        # The end of a process takes time on a busy machine.
        assert time.monotonic() - notified < grace + 4.0
    # A busy machine may need all the time to save.
    assert len(steps_in(begun)) <= len(steps) < len(expected)
    with Script(tmp_path, kind) as script:
        steps += steps_in(script.rest())
        assert script.process.returncode == 0, script.errors
    assert steps == expected
    assert_as_uninterrupted(tmp_path, kind, kind)
