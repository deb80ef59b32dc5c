"""Milliseconds a step on the GPUs of this machine: keras_distribute beside plain Keras
and loops by hand.

    # Writes results/gpu.md and .json:
    python benchmarks/gpu.py
    # Some of it, which takes its place among the others' results:
    python benchmarks/gpu.py --only mlp_long bert
    # Quicker and rougher, writing nothing:
    python benchmarks/gpu.py --rounds 3 --dry

Plain Keras has one GPU, all others have those that JAX finds. Small models show what
the Python code around a step costs, large ones what the step itself does.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from typing import Any

import report
from contenders import TITLES, Measured, Task, measure
from workloads import WORKLOADS

SMALL = (
    "plain",
    "plain_fused",
    "by_hand",
    "by_hand_scan",
    "ours",
    "ours_fused",
    "ours_deterministic",
)
LARGE = ("plain", "by_hand", "ours", "ours_central", "ours_deterministic")
CASES = {
    "mlp_long": SMALL,
    "cnn_long": SMALL,
    "transformer_long": SMALL,
    "lstm_long": SMALL,
    "resnet50": LARGE,
    "bert": LARGE,
}
_LIST = """
import json, jax
print(json.dumps([device.device_kind for device in jax.devices("gpu")]))
"""


def gpus() -> list[str]:
    """What JAX calls the GPUs, in a process of its own, which leaves them free."""
    command = [sys.executable, "-c", _LIST]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    names: list[str] = json.loads(said.splitlines()[-1])
    return names


def described(name: str, found: dict[str, Measured], devices: int) -> str:
    """A table of one workload."""
    workload = WORKLOADS[name]
    base = found["plain"]
    rows = [
        [
            TITLES[contender],
            f"{each.median:.2f} ({min(each.all_ms):.2f}–{max(each.all_ms):.2f})",
            f"{each.over(base):.2f} ×",
            f"{each.first_ms / 1000:.1f} s",
            f"{each.peak_mib:.0f} MiB",
        ]
        for contender, each in found.items()
    ]
    title = f"### {workload.title}, {workload.batch} rows, {devices} GPU(s)"
    header = ["`fit`", "ms a step", "ratio", "first round", "peak on a GPU"]
    return "\n\n".join([title, report.table(header, rows, "lrrrr")])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", choices=CASES, nargs="+", default=list(CASES))
    parser.add_argument("--dry", action="store_true")
    given = parser.parse_args()
    names = gpus()
    every: dict[str, Any] = report.known_cases("gpu")
    for name in given.only:
        tasks = [Task(each, name, len(names), platform="cuda") for each in CASES[name]]
        found = measure(tasks, given.rounds)
        print(described(name, found, len(names)), end="\n\n", flush=True)
        every[name] = {each: what._asdict() for each, what in found.items()}
        if not given.dry:
            write({case: every[case] for case in CASES if case in every}, names)


def write(cases: dict[str, Any], names: list[str]) -> None:
    """What has been measured, so far."""
    texts = [
        described(case, {each: Measured(**m) for each, m in found.items()}, len(names))
        for case, found in cases.items()
    ]
    note = (
        "The median of several rounds (fastest–slowest); the ratio is the median of "
        "the rounds' own to the first row. The contenders of a table are processes of "
        "the same run and take turns, in another order each round. The first round "
        f"compiles. GPU(s): {', '.join(names)}."
    )
    facts = {"gpus": names, "cases": cases}
    report.write("gpu", facts, "\n\n".join([*texts, note]), quiet=True)


if __name__ == "__main__":
    main()
