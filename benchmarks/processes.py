"""What a training step costs over several processes: `fit`, loops by hand on
`jax.distributed`, and `tf.distribute`.

    # Writes results/processes.md and .json:
    python benchmarks/processes.py
    # The rest of the results stays as it was:
    python benchmarks/processes.py --models mlp --processes 2

Weak scaling: each process has the same number of rows. In each round every contender
takes a short and a long turn, in another order each time; the difference is what the
steps cost, and what is left of the short one is the fixed cost of a call. A ratio is
the median of the rounds' own ratios.
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
from process_contenders import MODELS, ROWS, TITLES, Job

COUNTS = (1, 2, 4)
SHORT = 20
LIMIT = 1.05
NOTE = (
    "Milliseconds a step, and of a call beside its steps: medians of at least {rounds} "
    "rounds (fastest–slowest); what "
    "is below nothing is noise. Ratios are medians of the rounds' own ratios. A "
    f"round is a call of {SHORT} steps and one of {MODELS['mlp'].steps}, with the deep "
    f"model {MODELS['small'].steps}, "
    "and half as many with 4 processes, of each contender in turn. "
    "What runs on JAX runs in the same processes, TensorFlow in others, which wait "
    "meanwhile; the slowest process "
    "counts. Each process has one "
    "CPU device and {rows} rows of the global batch, and plain SGD. TensorFlow runs a "
    "loop of `run`, since `fit` of "
    "Keras 3 fails under its strategy. The machine has {cores} cores: of more "
    "processes each has less than one, and "
    "shares the memory's bandwidth with the others. Read the ratios within a table; "
    "how times grow from table to table "
    "says nothing of several hosts."
)


def measured(
    model: str, count: int, names: list[str], rounds: int
) -> dict[str, dict[str, list[float]]]:
    """Milliseconds a step and of a call beside it, by round, of each contender."""
    most = MODELS[model].steps * 2 // max(2, count)
    with tempfile.TemporaryDirectory() as folder:
        jobs: dict[str, Job] = {}
        try:
            for group in (
                [n for n in names if n != "tensorflow"],
                [n for n in names if n == "tensorflow"],
            ):
                if group:
                    jobs |= dict.fromkeys(
                        group,
                        Job(group, model, count, most, Path(folder) / "-".join(group)),
                    )
                # Before the next job starts: that takes all processors.
                for steps in (SHORT, most):
                    for name in group:
                        jobs[name].seconds(name, steps)
            found: dict[str, dict[str, list[float]]] = {
                name: {"step": [], "call": []} for name in names
            }
            for i in range(rounds):
                for name in names if i % 2 else names[::-1]:
                    short, long = (
                        1000 * jobs[name].seconds(name, steps)
                        for steps in (SHORT, most)
                    )
                    step = (long - short) / (most - SHORT)
                    found[name]["step"].append(step)
                    found[name]["call"].append(short - SHORT * step)
            return found
        except RuntimeError:
            for log in sorted(Path(folder).iterdir()):
                print(f"--- {log.name}\n{log.read_text()[-4000:]}", flush=True)
            raise
        finally:
            for job in set(jobs.values()):
                job.close()


def contenders_of(model: str, count: int) -> list[str]:
    """By hand, many gradients are summed singly, too, but by two processes alone: by
    more it takes minutes.
    """
    single = (
        ["by_hand_each"] if MODELS[model].num_gradients > 100 and count == 2 else []
    )
    return ["ours", "by_hand", *single, "tensorflow"]


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}–{max(values):.2f})"


def ratio_of(ours: dict[str, list[float]], theirs: dict[str, list[float]]) -> float:
    return statistics.median(
        a / b for a, b in zip(ours["step"], theirs["step"], strict=True)
    )


def described(model: str, count: int, found: dict[str, dict[str, list[float]]]) -> str:
    """A table of one comparison, and what of it was to be reached."""
    ratios = {name: ratio_of(each, found["by_hand"]) for name, each in found.items()}
    rows = [
        [
            TITLES[name],
            spread(each["step"]),
            f"{ratios[name]:.2f} ×",
            spread(each["call"]),
        ]
        for name, each in found.items()
    ]
    ratio = ratios["ours"]
    verdict = "reached" if ratio <= LIMIT else "**missed**"
    gradients = f"{MODELS[model].num_gradients} gradients"
    title = f"### {MODELS[model].title}: {gradients}, {count} process(es)"
    judged = (
        f"keras_distribute to the loop by hand: {ratio:.2f}, to be at most "
        f"{LIMIT:.2f}: {verdict}. To TensorFlow: "
        f"{ratio_of(found['ours'], found['tensorflow']):.2f}."
    )
    table = report.table(["", "ms a step", "ratio", "ms a call beside"], rows, "lrrr")
    return f"{title}\n\n{table}\n\n{judged}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument(
        "--processes", nargs="+", type=int, choices=COUNTS, default=COUNTS
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--only", nargs="+", choices=TITLES, help="of the contenders; writes nothing"
    )
    chosen = parser.parse_args()
    path = report.RESULTS / "processes.json"
    known: dict[str, Any] = (
        json.loads(path.read_text())["found"] if path.exists() else {}
    )
    for model in chosen.models:
        for count in chosen.processes:
            names = chosen.only or contenders_of(model, count)
            found = measured(model, count, names, chosen.rounds)
            if chosen.only:
                for name, each in found.items():
                    print(
                        model,
                        count,
                        name,
                        spread(each["step"]),
                        spread(each["call"]),
                        flush=True,
                    )
                continue
            known[f"{model} {count}"] = found
            print(described(model, count, found), end="\n\n", flush=True)
            done = [(m, c) for m in MODELS for c in COUNTS if f"{m} {c}" in known]
            fewest = min(
                len(each["step"])
                for m, c in done
                for each in known[f"{m} {c}"].values()
            )
            note = NOTE.format(rounds=fewest, rows=ROWS, cores=os.cpu_count())
            text = "\n\n".join(
                [*(described(m, c, known[f"{m} {c}"]) for m, c in done), note]
            )
            # At once: the whole takes long.
            report.write("processes", {"found": known}, text, quiet=True)


if __name__ == "__main__":
    main()
