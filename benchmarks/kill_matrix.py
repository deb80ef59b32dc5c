"""Kills, freezes and terminates one process of a training job at every stage of it, and
says what became of the job.

    # All 36 cells, as a table: about 15 minutes.
    python -m benchmarks kill_matrix
    # Some of them.
    python benchmarks/kill_matrix.py --victims worker --signals KILL --moments save

Each cell trains `tests/processes/staged.py` in two processes under the launcher with
one restart. It must end with the weights of an uninterrupted run, bit for bit. The
results of cells that were not run stay as they were. The exit status is the number of
cells that are not as they must be.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

import report

from keras_distribute.launch import LaunchOptions, launch

SCRIPT = Path(__file__).resolve().parents[1] / "tests" / "processes" / "staged.py"
MOMENTS = {
    "start": "before anything is imported",
    "compile": "before the first step",
    "epoch": "in the middle of an epoch",
    "save": "while a checkpoint is saved",
    "evaluate": "in the validation",
    "end": "after the last step",
}
VICTIMS = {"worker": 1, "chief": 0}
SIGNALS = ("KILL", "STOP", "TERM")
CELL_SECONDS = 120.0
GOOD = "the same weights"


def job(
    folder: Path, moment: str, victim: int, name: str
) -> tuple[int | None, float, str]:
    """One job: its exit code (`None`: it hung), how long it took, and its output."""
    command = [sys.executable, str(SCRIPT), str(folder), moment, str(victim), name]
    out = io.StringIO()
    begin = time.monotonic()
    # The launcher ends all then.
    timer = threading.Timer(CELL_SECONDS, lambda: os.kill(os.getpid(), signal.SIGTERM))
    timer.start()
    with contextlib.redirect_stdout(out):
        code: int | None = launch(
            command, LaunchOptions(nproc=2, cpu_devices=1, max_restarts=1, grace=20.0)
        )
        # Saved on SIGTERM, and ended: whoever started it starts it again.
        if code == 42:
            command[3] = "never"
            code = launch(command, LaunchOptions(nproc=2, cpu_devices=1, grace=20.0))
    timer.cancel()
    seconds = time.monotonic() - begin
    return (None if seconds >= CELL_SECONDS else code), seconds, out.getvalue()


def weights(folder: Path) -> list[str]:
    """What the processes found at their ends."""
    return [
        path.read_text() if path.exists() else ""
        for path in (folder / f"{i}.json" for i in (0, 1))
    ]


def uninterrupted(folder: Path) -> tuple[list[str], float]:
    """The weights of a job that nobody disturbs, and how long it takes."""
    folder.mkdir()
    code, seconds, out = job(folder, "never", 0, "KILL")
    expected = weights(folder)
    if (
        code != 0
        or expected[0] != expected[1]
        or not json.loads(expected[0])["weights"]
    ):
        raise RuntimeError(f"the uninterrupted job ended with {code}:\n{out}")
    return expected, seconds


def cell(
    folder: Path, moment: str, victim: str, name: str, expected: list[str]
) -> tuple[str, float, str]:
    """What became of a job that one of its processes was taken from: in words, its
    seconds, and its output.
    """
    folder.mkdir()
    code, seconds, out = job(folder, moment, VICTIMS[victim], name)
    if code is None:
        result = "HUNG"
    elif not (folder / "fault").exists():
        result = "NO FAULT CAME"
    elif code != 0:
        result = f"FAILED with exit code {code}"
    else:
        result = GOOD if weights(folder) == expected else "OTHER WEIGHTS"
    return result, seconds, out


def table(cells: dict[str, dict[str, float | str]]) -> str:
    """One row for each moment, one column for each victim and signal."""
    columns = list(itertools.product(VICTIMS, SIGNALS))
    rows: list[list[str]] = []
    for moment, words in MOMENTS.items():
        found = [cells.get(f"{moment} {victim} {name}") for victim, name in columns]
        rows.append(
            [
                words,
                *(
                    "not run" if one is None else f"{one['result']}, {one['seconds']} s"
                    for one in found
                ),
            ]
        )
    header = [
        "killed, frozen or terminated",
        *(f"{victim}, SIG{name}" for victim, name in columns),
    ]
    return report.table(header, rows, "l" * len(header))


def write(cells: dict[str, dict[str, float | str]], seconds: float) -> None:
    """Keeps the results, and the table."""
    text = (
        "# A process that is killed, frozen or terminated\n\n"
        "What became of a job of two processes under the launcher with one restart: it "
        "finished with the weights of an "
        "uninterrupted job, bit for bit, or not; and after how many seconds. "
        f"Uninterrupted it takes {seconds:.0f}.\n\n" + table(cells)
    )
    report.write(
        "kill_matrix",
        {"uninterrupted seconds": round(seconds), "cells": cells},
        text,
        quiet=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--moments", default=",".join(MOMENTS))
    parser.add_argument("--victims", default=",".join(VICTIMS))
    parser.add_argument("--signals", default=",".join(SIGNALS))
    parser.add_argument(
        "--missing", action="store_true", help="only cells without a good result so far"
    )
    parser.add_argument(
        "--show", action="store_true", help="print the output of cells that fail"
    )
    chosen = parser.parse_args()
    known = report.RESULTS / "kill_matrix.json"
    cells = json.loads(known.read_text())["cells"] if known.exists() else {}
    with tempfile.TemporaryDirectory() as directory:
        expected, seconds = uninterrupted(Path(directory) / "plain")
        wanted = itertools.product(
            *(
                getattr(chosen, name).split(",")
                for name in ("moments", "victims", "signals")
            )
        )
        for moment, victim, name in wanted:
            key = f"{moment} {victim} {name}"
            if chosen.missing and cells.get(key, {}).get("result") == GOOD:
                continue
            result, took, out = cell(
                Path(directory) / key.replace(" ", "-"), moment, victim, name, expected
            )
            cells[key] = {"result": result, "seconds": round(took)}
            print(f"{key:24} {result} ({took:.0f} s)", flush=True)
            if chosen.show and result != GOOD:
                print(out)
            write(cells, seconds)  # At once: the whole takes long.
    return sum(one["result"] != GOOD for one in cells.values())


if __name__ == "__main__":
    sys.exit(main())
