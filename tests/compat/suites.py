"""Runs Keras's own test suites in a child process and returns what every test did.

It owns the child's environment, its time limit, the reading of its report, and the
baseline: what the same tests do without a strategy. `python tests/compat/suites.py`
records it for the versions that are installed.
"""

from __future__ import annotations

import collections
import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

if __package__:
    from .scope_plugin import in_sample
else:  # The script that records.
    from scope_plugin import in_sample

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
BASELINE = HERE / "baseline.json"
TIMEOUT = 3600.0
"""Seconds until a child is killed; each of its tests has `TEST_TIMEOUT`."""

TEST_TIMEOUT = 300.0

ONE_IN = 12
"""Of so many of Keras's tests one runs, where not all do."""

SUITES = {
    "trainer": "keras.src.trainers.trainer_test",
    "epoch_iterator": "keras.src.trainers.epoch_iterator_test",
    "compile_utils": "keras.src.trainers.compile_utils_test",
    "callbacks": "keras.src.callbacks",
    "optimizers": "keras.src.optimizers",
    "metrics": "keras.src.metrics",
    "losses": "keras.src.losses",
    "models": "keras.src.models",
    "saving": "keras.src.saving",
}
OPTIONAL = (
    "grain",
    "h5py",
    "orbax",
    "pandas",
    "requests",
    "scipy",
    "tensorboard",
    "tensorflow",
    "torch",
)
"""Libraries whose presence decides whether some of Keras's tests run."""


class SuiteError(RuntimeError):
    """The child did not get to the end: it hung, it was killed or it collected nothing."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TestResult:
    """What one test did. `counts`: those of `scope_plugin.Watch`, under a strategy."""

    __test__ = False

    outcome: str
    error: str = ""
    seconds: float = 0.0
    counts: dict[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
    """A test whose outcome under the strategy is not the one that it has without."""

    test: str
    expected: str
    found: str
    error: str

    def __str__(self) -> str:
        return f"{self.test}: {self.found}, {self.expected} without a strategy\n{self.error}".rstrip()


def run_suites(
    names: Iterable[str], scope: str, *, one_in: int = 1
) -> dict[str, dict[str, TestResult]]:
    """Runs suites with every test under a scope, in one process of their own.

    Args:
        names: Keys of `SUITES`.
        scope: One of `scope_plugin.SCOPES`.
        one_in: Of so many tests one runs, always the same.

    Returns:
        The result of every test, by suite and test id; a module that could not be read
        is a result of all suites.

    Raises:
        SuiteError: The child hung, crashed or collected nothing of a suite. The text
            names the test under way and ends with the child's output.
    """
    modules = {name: SUITES[name] for name in names}
    with tempfile.TemporaryDirectory() as folder:
        report, log = Path(folder, "report.jsonl"), Path(folder, "output.txt")
        command = [
            sys.executable,
            "-m",
            "pytest",
            "--pyargs",
            *modules.values(),
            "--rootdir",
            folder,
            "-c",
            os.devnull,
        ]
        command += [
            "-p",
            "scope_plugin",
            "-p",
            "no:xdist",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:randomly",
        ]
        command += [
            "-q",
            "--tb=short",
            f"--timeout={TEST_TIMEOUT}",
            "-o",
            "python_files=*_test.py",
            "--continue-on-collection-errors",
        ]
        command += ["--scope", scope, "--report", str(report), "--one-in", str(one_in)]
        with log.open("wb") as output:
            code = _run(command, cwd=folder, output=output)
        events = _read(report)
        results = {
            event.pop("test"): TestResult(**event)
            for event in events
            if "outcome" in event
        }
        suites: dict[str, dict[str, TestResult]] = {name: {} for name in modules}
        for test, result in results.items():
            owners = [n for n, module in modules.items() if test.startswith(module)]
            for name in owners or modules:
                suites[name][test] = result
        if code not in (0, 1) or not all(suites.values()):
            last = events[-1]["test"] if events and "test" in events[-1] else "none"
            tail = log.read_text(encoding="utf-8", errors="replace")[-8000:]
            raise SuiteError(
                f"{', '.join(modules.values())} ended with {code}; "
                f"test under way: {last}\n{tail}"
            )
        return suites


def _run(command: list[str], *, cwd: str, output: Any) -> int | str:
    """Runs a command in a new session, so that all children can be killed."""
    dropped = {
        "PYTEST_ADDOPTS",
        "PYTEST_PLUGINS",
        "PYTEST_XDIST_WORKER",
        "XLA_FLAGS",
        "NPROC",
        "JAX_PLATFORMS",
    }
    environment = {
        key: value for key, value in os.environ.items() if key not in dropped
    }
    environment |= {
        "JAX_PLATFORMS": "cpu",
        "KERAS_BACKEND": "jax",
        "KERAS_HOME": cwd,  # no user's configuration file
        "PYTHONPATH": os.pathsep.join(
            [str(HERE), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        ),
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    child = subprocess.Popen(
        command,
        cwd=cwd,
        env=environment,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        return child.wait(TIMEOUT)
    except subprocess.TimeoutExpired:
        return f"a kill after {TIMEOUT:.0f} s"
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def _read(report: Path) -> list[dict[str, Any]]:
    """The events of a report; a last line that was cut off is dropped."""
    lines = (
        report.read_text(encoding="utf-8").splitlines(keepends=True)
        if report.exists()
        else []
    )
    return [json.loads(line) for line in lines if line.endswith("\n")]


def versions() -> dict[str, Any]:
    """What the outcomes depend on: a record of other versions is not used."""
    return {
        "python": ".".join(platform.python_version_tuple()[:2]),
        "keras": importlib.metadata.version("keras"),
        "jax": importlib.metadata.version("jax"),
        "optional": [name for name in OPTIONAL if importlib.util.find_spec(name)],
    }


def baseline(
    name: str, found: dict[str, TestResult], one_in: int = 1
) -> dict[str, str]:
    """The outcome of every test of a sample without a strategy: as recorded, or measured
    now where the versions differ. A record has those that do not pass by name; as many
    as it counts, of all tests or of the sample, have to be `found`.
    """
    for entry in _records():
        if entry["versions"] == versions():
            recorded = entry["suites"][name]
            others = {
                test: outcome
                for test, outcome in recorded["others"].items()
                if in_sample(test, one_in)
            }
            lacking = recorded["tests"][str(one_in)] - len(found.keys() | others)
            unnamed = {f"unnamed {i}": "passed" for i in range(lacking)}
            return dict.fromkeys(found, "passed") | others | unnamed
    return measure(name, one_in)


def measure(name: str, one_in: int = 1) -> dict[str, str]:
    """Runs a suite without a strategy."""
    found = run_suites([name], "none", one_in=one_in)[name]
    return {test: result.outcome for test, result in sorted(found.items())}


def differences(
    expected: dict[str, str], found: dict[str, TestResult]
) -> list[Difference]:
    """Every test with another outcome than the baseline's, missing ones included."""
    result: list[Difference] = []
    absent = TestResult(outcome="missing")
    for test in sorted(expected.keys() | found.keys()):
        before, after = expected.get(test, "missing"), found.get(test, absent)
        if before != after.outcome:
            result.append(
                Difference(
                    test=test, expected=before, found=after.outcome, error=after.error
                )
            )
    return result


def record() -> None:
    """Measures every suite, in the place of the record of the same versions."""
    measured = {name: measure(name) for name in SUITES}
    suites = {name: recorded(outcomes) for name, outcomes in measured.items()}
    others = [entry for entry in _records() if entry["versions"] != versions()]
    text = json.dumps([*others, {"versions": versions(), "suites": suites}], indent=1)
    BASELINE.write_text(text + "\n", encoding="utf-8")
    for name, outcomes in measured.items():
        print(f"{name}: {tally(outcomes)}")


def recorded(outcomes: dict[str, str]) -> dict[str, Any]:
    """What a record keeps of a suite."""
    others = {test: o for test, o in outcomes.items() if o != "passed"}
    counts = {n: sum(in_sample(test, n) for test in outcomes) for n in (1, ONE_IN)}
    return {"tests": {str(n): count for n, count in counts.items()}, "others": others}


def tally(outcomes: dict[str, str]) -> dict[str, int]:
    """How many tests had each outcome."""
    return dict(sorted(collections.Counter(outcomes.values()).items()))


def _records() -> list[dict[str, Any]]:
    return json.loads(BASELINE.read_text(encoding="utf-8")) if BASELINE.exists() else []


if __name__ == "__main__":
    record()
