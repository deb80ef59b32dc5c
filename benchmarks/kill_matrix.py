"""Kills, freezes and terminates one process of a training job at every stage of it, and says what became of the job.

    python benchmarks/kill_matrix.py                         # All cells, as a table.
    python benchmarks/kill_matrix.py --victims worker --signals KILL --moments epoch,save

Each cell trains `tests/processes/staged.py` in two processes under the launcher with one restart. It must end with the
weights of an uninterrupted run, bit for bit. The exit status is the number of cells that do not.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

from keras_distribute.launch import LaunchOptions, launch

SCRIPT = Path(__file__).resolve().parents[1] / "tests" / "processes" / "staged.py"
MOMENTS = ("start", "compile", "epoch", "save", "evaluate", "end")
VICTIMS = {"worker": 1, "chief": 0}
SIGNALS = ("KILL", "STOP", "TERM")
CELL_SECONDS = 120.0


def run(folder: Path, moment: str, victim: int, name: str) -> tuple[int | None, float, str]:
    """One job: its exit code (`None`: it hung), how long it took, and its output."""
    command = [sys.executable, str(SCRIPT), str(folder), moment, str(victim), name]
    out = io.StringIO()
    begin = time.monotonic()
    timer = threading.Timer(CELL_SECONDS, lambda: os.kill(os.getpid(), signal.SIGTERM))  # The launcher ends all then.
    timer.start()
    with contextlib.redirect_stdout(out):
        code: int | None = launch(command, LaunchOptions(nproc=2, cpu_devices=1, max_restarts=1, grace=20.0))
        if code == 42:  # Saved on SIGTERM, and ended: whoever started it starts it again.
            command[3] = "never"
            code = launch(command, LaunchOptions(nproc=2, cpu_devices=1, grace=20.0))
    timer.cancel()
    seconds = time.monotonic() - begin
    return (None if seconds >= CELL_SECONDS else code), seconds, out.getvalue()


def results(folder: Path) -> list[str]:
    """What the processes found at their ends."""
    return [path.read_text() if path.exists() else "" for path in (folder / f"{i}.json" for i in (0, 1))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moments", default=",".join(MOMENTS))
    parser.add_argument("--victims", default=",".join(VICTIMS))
    parser.add_argument("--signals", default=",".join(SIGNALS))
    parser.add_argument("--show", action="store_true", help="print the output of cells that fail")
    chosen = parser.parse_args()
    bad = 0
    with tempfile.TemporaryDirectory() as directory:
        (plain := Path(directory) / "plain").mkdir()
        code, seconds, out = run(plain, "never", 0, "KILL")
        expected = results(plain)
        if code != 0 or expected[0] != expected[1] or not json.loads(expected[0])["weights"]:
            print(out)
            return 1
        print(f"uninterrupted: {seconds:.0f} s\n")
        print(f"| {'moment':8} | {'victim':6} | {'signal':6} | {'result':36} | seconds |")
        print(f"| {'-' * 8} | {'-' * 6} | {'-' * 6} | {'-' * 36} | ------- |")
        for moment in chosen.moments.split(","):
            for victim in chosen.victims.split(","):
                for name in chosen.signals.split(","):
                    folder = Path(directory) / f"{moment}-{victim}-{name}"
                    folder.mkdir()
                    code, seconds, out = run(folder, moment, VICTIMS[victim], name)
                    came = (folder / "fault").exists()
                    same = results(folder) == expected
                    if code is None:
                        result = "HUNG"
                    elif not came:
                        result = "NO FAULT CAME"
                    elif code == 0:
                        result = "finished, the same weights" if same else "finished, OTHER WEIGHTS"
                    else:
                        result = f"FAILED with exit code {code}"
                    good = result == "finished, the same weights"
                    bad += not good
                    print(f"| {moment:8} | {victim:6} | {name:6} | {result:36} | {seconds:7.0f} |", flush=True)
                    if chosen.show and not good:
                        print(out)
    return bad


if __name__ == "__main__":
    sys.exit(main())
