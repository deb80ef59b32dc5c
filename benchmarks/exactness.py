"""How far training on four devices is from training on one: the largest difference,
case by case.

Every case of `exactness_cases.py` is run three ways, each in a process of its own:
plain Keras on one device, keras_distribute on four replicas,
`keras.distribution.DataParallel` on four devices.

    # Writes results/exactness.md and .json:
    python benchmarks/exactness.py
    # Cases whose name contains the word, printed only:
    python benchmarks/exactness.py --only dropout

The four devices are virtual CPU devices. XLA's thread pool is made large enough for
them in every process, since otherwise `DataParallel` can abort on few cores.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import report
from exactness_cases import CASES, NUM_DEVICES, Layout, Result

LAYOUTS = ("one device", "keras_distribute", "DataParallel")
# Rounding of float32 over a few steps of training stays below this; a wrong number does
# not.
EXACT = 1e-5
# Between the name of a case and its number of samples.
SIZE = ", samples: "


def flat(value: Any) -> Any:
    """All numbers of a result, as one array."""
    import numpy as np

    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return np.concatenate([flat(v) for v in value]) if len(value) else np.zeros(0)
    return np.ravel(np.asarray(value, dtype="float64"))


def work(layout_name: str, names: list[str]) -> None:
    """In a process of its own: runs cases, and prints one line of JSON before and after
    each.
    """
    layout = Layout(layout_name)
    for name in names:
        print(json.dumps({"started": name}), flush=True)
        label, _, n = name.rpartition(SIZE)
        try:
            outcome: Result = {
                "numbers": flat(CASES[label][0](layout, int(n))).tolist()
            }
        except Exception as error:  # Whatever a library says to a case is its outcome.
            outcome = {"error": type(error).__name__, "text": str(error)[:400]}
        print(json.dumps({"ended": name, **outcome}), flush=True)


def outcomes(layout: str, names: list[str]) -> dict[str, Result]:
    """The outcome of each case under one layout. A process that aborts costs the case
    it was in, not the others.
    """
    environment = os.environ | {
        "KERAS_BACKEND": "jax",
        "JAX_PLATFORMS": "cpu",
        "NPROC": str(8 * NUM_DEVICES),
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "PYTHONPATH": os.pathsep.join(
            [str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")]
        ).rstrip(os.pathsep),
    }
    found: dict[str, Result] = {}
    left = list(names)
    while left:
        process = subprocess.Popen(
            [sys.executable, __file__, "--layout", layout, "--cases", json.dumps(left)],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        running = None
        assert process.stdout is not None
        for line in process.stdout:
            if not line.startswith("{"):
                continue
            event = json.loads(line)
            running = event.get("started")
            if "ended" in event:
                found[event.pop("ended")] = event
        status = process.wait()
        if running is not None:
            found[running] = {
                "error": "the process aborted",
                "text": f"exit status {status}",
            }
        if all(name in found for name in names):
            break
        remaining = [name for name in left if name not in found]
        if remaining == left:
            raise RuntimeError(
                f"The worker for {layout!r} ended with status {status} before its "
                "first case."
            )
        left = remaining
    return found


def compare(reference: Result, other: Result) -> Result:
    """The largest absolute difference between two outcomes, or the error."""
    import numpy as np

    if "error" in reference:
        return {
            "error": f"on one device: {reference['error']}",
            "text": reference["text"],
        }
    if "error" in other:
        return other
    expected, got = np.asarray(reference["numbers"]), np.asarray(other["numbers"])
    if expected.shape != got.shape:
        return {"error": f"{got.size} numbers for {expected.size}", "text": ""}
    if not (np.isfinite(expected) == np.isfinite(got)).all():
        return {"error": "NaN or infinity", "text": ""}
    finite = np.isfinite(expected)
    return {"difference": float(np.abs(expected - got)[finite].max())}


def cell(outcome: Result) -> str:
    if "error" in outcome:
        return outcome["error"]
    difference = outcome["difference"]
    text = "0" if difference == 0 else f"{difference:.1e}"
    return text if difference <= EXACT else f"**{text}**"


FOOTNOTES = f"""\
Largest absolute difference to one device over all weights, logs, results of \
`evaluate` and predictions, mostly after three epochs without shuffling. *Even*: every \
batch divides over the devices; *odd tail*: a batch does not (70 samples in batches of \
32 where nothing else is said). Rounding of float32 stays below {EXACT:.0e}; larger \
differences are bold. A name such as `IndivisibleError` is the error that was raised.

[1] Written as each wants it: `BatchNormalization(synchronized=True)` with \
keras_distribute, the plain layer with `DataParallel`. [2] The one device computes the \
definition written out: groups of rows normalised one by one, moving statistics \
averaged, an odd tail as one group. `DataParallel` has only statistics of the whole \
batch, so its difference is by design. [3] The loss scale and the number of steps \
taken: the step with the overflow must be left out everywhere."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only",
        default="",
        help="run the cases whose name contains this, and only print",
    )
    parser.add_argument("--layout", choices=LAYOUTS, help=argparse.SUPPRESS)
    parser.add_argument("--cases", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.layout:
        work(arguments.layout, arguments.cases)
        return

    chosen = {
        name: sizes
        for name, (_, sizes) in CASES.items()
        if arguments.only.lower() in name.lower()
    }
    names = [f"{name}{SIZE}{n}" for name, sizes in chosen.items() for n in sizes]
    results = {layout: outcomes(layout, names) for layout in LAYOUTS}
    reference = results.pop(LAYOUTS[0])
    compared = {
        name: {
            layout: compare(reference[name], found[name])
            for layout, found in results.items()
        }
        for name in names
    }

    def cells(name: str, layout: str) -> list[str]:
        """For a batch that divides over the devices, and for one that does not."""
        by_tail = {
            n % 8 == 0: cell(compared[f"{name}{SIZE}{n}"][layout]) for n in chosen[name]
        }
        return [by_tail.get(True, ""), by_tail.get(False, "")]

    rows = [
        [name, *(text for layout in results for text in cells(name, layout))]
        for name in chosen
    ]
    header = ["case"]
    for title in (
        f"keras_distribute, {NUM_DEVICES} replicas",
        f"`DataParallel`, {NUM_DEVICES} devices",
    ):
        header += [f"{title}: even", "odd tail"]
    markdown = report.table(header, rows, "lrrrr")
    if arguments.only:
        print(markdown)
        for name in names:
            for layout, outcome in compared[name].items():
                if outcome.get("text"):
                    print(f"\n{layout}, {name}: {outcome['text']}")
        return
    report.write(
        "exactness",
        {"devices": NUM_DEVICES, "cases": compared},
        f"{markdown}\n\n{FOOTNOTES}",
    )


if __name__ == "__main__":
    main()
