"""What every result file says of the machine and the versions it was measured with, and
where it goes.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
_LOAD = round(os.getloadavg()[0], 1)  # What else the machine did when this began.
PACKAGES = ("keras_distribute", "keras", "jax", "numpy")


class Target(NamedTuple):
    """What is to be reached: a value that is at most the limit."""

    title: str
    value: float
    limit: float

    @property
    def is_reached(self) -> bool:
        return self.value <= self.limit

    def __str__(self) -> str:
        end = "reached" if self.is_reached else "**missed**"
        return f"{self.title}: {self.value:.2f}, to be at most {self.limit:.2f}: {end}"


def machine() -> dict[str, Any]:
    """The processor, its cores and the versions in use."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            project = tomllib.loads(
                (ROOT / "pyproject.toml").read_text(encoding="utf-8")
            )["project"]
            versions[package] = project["version"]  # run from a source tree
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "load before": _LOAD,
        "python": platform.python_version(),
        **versions,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [
        line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")
    ]
    return names[0] if names else platform.machine()


def write(
    name: str,
    facts: dict[str, Any],
    markdown: str,
    quiet: bool = False,
    how: str = "Measured",
) -> None:
    """Writes `results/<name>.json` and `results/<name>.md`, and prints the latter
    unless `quiet`.

    `how` says at the end what was done: `"Measured"`, or `"Compiled"`.
    """
    RESULTS.mkdir(exist_ok=True)
    about = machine()
    (RESULTS / f"{name}.json").write_text(
        json.dumps({"machine": about, **facts}, indent=1) + "\n", encoding="utf-8"
    )
    versions = ", ".join(f"{package} {about[package]}" for package in PACKAGES)
    processor = f"{about['processor']}, {about['cores']} cores"
    processor += f" (load before: {about['load before']})"
    where = f"{processor}, Python {about['python']}, {versions}"
    text = f"{markdown}\n\n{how} by `benchmarks/{name}.py` on: {where}.\n"
    (RESULTS / f"{name}.md").write_text(text, encoding="utf-8")
    if not quiet:
        print(text)


def known_cases(name: str) -> dict[str, Any]:
    """The cases in `results/<name>.json`; none before it is written."""
    file = RESULTS / f"{name}.json"
    if not file.exists():
        return {}
    cases: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))["cases"]
    return cases


def from_child(script: str, *arguments: str, seconds: float) -> dict[str, Any]:
    """What `script --child *arguments PATH`, a process of its own, writes to the path.

    Raises:
        subprocess.TimeoutExpired: After so many seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        command = [sys.executable, script, "--child", *arguments, str(path)]
        subprocess.run(command, check=True, timeout=seconds)
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def table(header: list[str], rows: list[list[str]], align: str) -> str:
    """A Markdown table; `align` has one of `l` and `r` for each column."""
    rule = ["---:" if side == "r" else "---" for side in align]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [header, rule, *rows])
