"""Runs the benchmarks, one after the other: `python -m benchmarks`, or `python -m
benchmarks step_time exactness`. With `--check`, only looks whether the times of steps
and of a start are what they are to be (`check.py`), in less than 20 minutes, and fails
if not.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
# Not `gpu`, which needs one: `python benchmarks/gpu.py`.
NAMES = (
    "why",
    "exactness",
    "step_time",
    "step_parts",
    "cpu_programs",
    "startup",
    "processes",
    "parameter_servers",
    "local_steps",
    "optimizer_memory",
    "sharded_variables",
    "input_pipeline",
    "checkpoints",
    "dry_run",
    "communication",
    "overlap",
    "published_steps",
    "consistency",
    "deterministic",
    "kill_matrix",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "names", nargs="*", choices=[[], *NAMES], help="which; all by default"
    )
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    if arguments.check:
        command = [sys.executable, str(FOLDER / "check.py")]
        raise SystemExit(subprocess.run(command, check=False).returncode)
    for name in arguments.names or NAMES:
        print(f"\n== {name}", flush=True)
        subprocess.run([sys.executable, str(FOLDER / f"{name}.py")], check=True)


if __name__ == "__main__":
    main()
