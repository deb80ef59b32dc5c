"""Runs the benchmarks, one after the other: `python -m benchmarks`, or `python -m
benchmarks step_time exactness`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
NAMES = (
    "why",
    "exactness",
    "step_time",
    "processes",
    "parameter_servers",
    "local_steps",
    "optimizer_memory",
    "sharded_variables",
    "input_pipeline",
    "checkpoints",
    "dry_run",
    "consistency",
    "deterministic",
    "kill_matrix",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "names", nargs="*", choices=[[], *NAMES], help="which; all by default"
    )
    for name in parser.parse_args().names or NAMES:
        print(f"\n== {name}", flush=True)
        subprocess.run([sys.executable, str(FOLDER / f"{name}.py")], check=True)


if __name__ == "__main__":
    main()
