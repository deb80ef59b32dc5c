"""What a training step costs over several processes: `fit`, loops by hand on `jax.distributed`, and `tf.distribute`.

    python benchmarks/processes.py                            # writes results/processes.md and .json
    python benchmarks/processes.py --models mlp --processes 2  # the rest of the results stays as it was

Weak scaling: each process has the same number of rows. Every contender takes a short and a long round in turn; the
difference is what the steps cost, and what is left of the short one is the fixed cost of a call.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import report
from process_contenders import MODELS, ROWS, TITLES, Contender

COUNTS = (1, 2, 4)
SHORT = 20
LIMIT = 1.05
NOTE = (
    "Milliseconds a step, and of a call beside its steps: medians of at least {rounds} rounds (fastest–slowest); what "
    "is below nothing is noise. A "
    f"round is a call of {SHORT} steps and one of {MODELS['mlp'].steps}, with the deep model {MODELS['small'].steps}, "
    "and half as many with 4 processes. The "
    "jobs of a table are alive at the same time and take turns, and the slowest process counts. Each process has one "
    "CPU device and {rows} rows of the global batch, and plain SGD. TensorFlow runs a loop of `run`, since `fit` of "
    "Keras 3 fails under its strategy. The machine has {cores} cores: of more processes each has less than one, and "
    "shares the memory's bandwidth with the others. Read the ratios within a table; how times grow from table to table "
    "says nothing of several hosts."
)


def measured(model: str, count: int, names: list[str], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Milliseconds a step and of a call beside it, round by round, of each contender."""
    contenders: list[Contender] = []
    most = MODELS[model].steps * 2 // max(2, count)
    with tempfile.TemporaryDirectory() as folder:
        try:
            for name in names:  # One after the other: to start is what takes the most processors.
                contenders.append(Contender(name, model, count, most, Path(folder) / name))
                contenders[-1].seconds(SHORT)
            for contender in contenders:
                contender.seconds(most)
            found: dict[str, dict[str, list[float]]] = {name: {"step": [], "call": []} for name in names}
            for _ in range(rounds):
                for contender in contenders:
                    short, long = 1000 * contender.seconds(SHORT), 1000 * contender.seconds(most)
                    step = (long - short) / (most - SHORT)
                    found[contender.name]["step"].append(step)
                    found[contender.name]["call"].append(short - SHORT * step)
            return found
        except RuntimeError:
            for log in sorted(Path(folder).iterdir()):
                print(f"--- {log.name}\n{log.read_text()[-4000:]}", flush=True)
            raise
        finally:
            for contender in contenders:
                contender.close()


def contenders_of(model: str, count: int) -> list[str]:
    """By hand, many gradients are summed singly, too, but by two processes alone: by more it takes minutes."""
    single = ["by_hand_each"] if MODELS[model].num_gradients > 100 and count == 2 else []
    return ["by_hand", *single, "ours", "tensorflow"]


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}–{max(values):.2f})"


def described(model: str, count: int, found: dict[str, dict[str, list[float]]]) -> str:
    """A table of one comparison, and what of it was to be reached."""
    steps = {name: statistics.median(each["step"]) for name, each in found.items()}
    base = steps["by_hand"]
    rows = [
        [TITLES[name], spread(each["step"]), f"{steps[name] / base:.2f} ×", spread(each["call"])]
        for name, each in found.items()
    ]
    ratio = steps["ours"] / base
    verdict = "reached" if ratio <= LIMIT else "**missed**"
    title = f"### {MODELS[model].title}: {MODELS[model].num_gradients} gradients, {count} process(es)"
    judged = (
        f"keras_distribute to the loop by hand: {ratio:.2f}, to be at most {LIMIT:.2f}: {verdict}. To TensorFlow: "
        f"{steps['ours'] / steps['tensorflow']:.2f}."
    )
    table = report.table(["", "ms a step", "ratio", "ms a call beside"], rows, "lrrr")
    return f"{title}\n\n{table}\n\n{judged}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--processes", nargs="+", type=int, choices=COUNTS, default=COUNTS)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", nargs="+", choices=TITLES, help="of the contenders; writes nothing")
    chosen = parser.parse_args()
    path = report.RESULTS / "processes.json"
    known: dict[str, Any] = json.loads(path.read_text())["found"] if path.exists() else {}
    for model in chosen.models:
        for count in chosen.processes:
            names = chosen.only or contenders_of(model, count)
            found = measured(model, count, names, chosen.rounds)
            if chosen.only:
                for name, each in found.items():
                    print(model, count, name, spread(each["step"]), spread(each["call"]), flush=True)
                continue
            known[f"{model} {count}"] = found
            print(described(model, count, found), end="\n\n", flush=True)
            done = [(m, c) for m in MODELS for c in COUNTS if f"{m} {c}" in known]
            fewest = min(len(each["step"]) for m, c in done for each in known[f"{m} {c}"].values())
            note = NOTE.format(rounds=fewest, rows=ROWS, cores=os.cpu_count())
            text = "\n\n".join([*(described(m, c, known[f"{m} {c}"]) for m, c in done), note])
            report.write("processes", {"found": known}, text, quiet=True)  # At once: the whole takes long.


if __name__ == "__main__":
    main()
