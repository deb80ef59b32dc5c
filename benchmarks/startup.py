"""What happens once in a program, beside plain Keras on one device: the import, the way
from there to the end of the first training step, and a `fit` of one batch later.

Each measurement is a process of its own; plain Keras and keras_distribute take turns,
and the median of the rounds counts. What is compared is the time of the processors,
which what else the machine does disturbs least; `fit` calls of one batch, by the clock.

    python benchmarks/startup.py             # writes results/startup.md, .json
    python benchmarks/startup.py --rounds 1  # quicker and rougher
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # Not in the processes that are measured.
    import report

NAMES = ("mlp", "cnn", "transformer", "resnet50_small")
CALLS = 30
LIMITS = {"import": 0.15, "first": 1.1, "again": 1.3}
Found = dict[str, dict[str, list[dict[str, float]]]]
"""Measurements, by model and kind."""


def measure(kind: str, name: str, calls: int = CALLS) -> dict[str, float]:
    """In this process: the seconds of the import, from there to the end of the first
    step, and of a later `fit` of one batch.

    Args:
        kind: `"plain"`, or `"ours"`.
        name: Of the model.
        calls: How many later calls of `fit`; their median counts.
    """
    import keras

    scope: Callable[[], Any] = contextlib.nullcontext
    begin = time.process_time()
    if kind == "ours":
        import keras_distribute as kd

        def scope() -> Any:
            return kd.OneDeviceStrategy("cpu:0").scope()

    imported = time.process_time() - begin
    import jax
    from workloads import WORKLOADS

    workload = WORKLOADS[name]

    def built() -> Any:
        keras.utils.set_random_seed(0)
        model = workload.build()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(1e-4), loss, metrics=["accuracy"])
        return model

    x, y = (array[: workload.batch] for array in workload.data())
    jax.block_until_ready(jax.numpy.zeros(1))  # JAX itself has begun.
    begin = time.process_time()
    with scope():
        model = built()
    options: dict[str, Any] = {"batch_size": len(x), "shuffle": False, "verbose": 0}
    model.fit(x, y, **options)
    first = time.process_time() - begin
    again = []
    for _ in range(calls):
        started = time.perf_counter()
        model.fit(x, y, **options)
        again.append(time.perf_counter() - started)
    return {"import": imported, "first": first, "again": statistics.median(again)}


def measured(rounds: int, names: Sequence[str] = NAMES, calls: int = CALLS) -> Found:
    """All measurements, by model and kind; the kinds in turn, each in a process."""
    # `import keras` is before the clock, and takes JAX with it.
    environment = {**os.environ, "KERAS_BACKEND": "jax"}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)  # All is compiled.
    found: Found = {name: {"plain": [], "ours": []} for name in names}
    for name in names:
        for number in range(rounds):
            kinds = ("plain", "ours") if number % 2 else ("ours", "plain")
            for kind in kinds:
                command = [sys.executable, __file__, "--measure", kind, name]
                command += ["--calls", str(calls)]
                done = subprocess.run(
                    command, env=environment, check=True, capture_output=True, text=True
                )
                found[name][kind].append(json.loads(done.stdout.splitlines()[-1]))
    return found


def _median(facts: Found, name: str, kind: str, what: str) -> float:
    return statistics.median(each[what] for each in facts[name][kind])


def targets(facts: Found) -> list[report.Target]:
    """What is to be reached, of the models that were measured."""
    import report

    imports = [each["import"] for name in facts for each in facts[name]["ours"]]
    taken = statistics.median(imports)
    title = "`import keras_distribute`, seconds"
    found = [report.Target(title, taken, LIMITS["import"])]
    for what, title in (
        ("first", "first step, keras_distribute / Keras, at most"),
        ("again", "`fit` of one batch, keras_distribute / Keras, at most"),
    ):
        ratios = [
            _median(facts, name, "ours", what) / _median(facts, name, "plain", what)
            for name in facts
        ]
        found.append(report.Target(title, max(ratios), LIMITS[what]))
    return found


def written(facts: Found, rounds: int) -> None:
    """Writes the results of all models."""
    import report
    from workloads import WORKLOADS

    rows: list[list[str]] = []
    for name in NAMES:
        cells = [WORKLOADS[name].title]
        for what, scale, unit in (("first", 1.0, "s"), ("again", 1000.0, "ms")):
            plain, ours = (
                _median(facts, name, kind, what) for kind in ("plain", "ours")
            )
            cells += [
                f"{scale * plain:.1f} {unit}",
                f"{scale * ours:.1f} {unit}",
                f"{ours / plain:.2f} ×",
            ]
        rows.append(cells)
    header = [
        "",
        "first step, Keras",
        "keras_distribute",
        "ratio",
        "`fit` of a batch, Keras",
        "keras_distribute",
        "ratio",
    ]
    table = report.table(header, rows, "lrrrrrr")
    note = (
        f"One CPU device; the medians of {rounds} rounds, each in processes of its "
        "own, plain Keras and `OneDeviceStrategy` in turn. The import is what "
        "`import keras_distribute` takes after `import keras`. The first step is all "
        "from building the model to the end of a `fit` of one batch, compiled without "
        "JAX's cache, in seconds of "
        f"the processors; `fit` of a batch, the median of {CALLS} such calls after "
        "that, by the clock."
    )
    limits = "\n".join(f"- {target}" for target in targets(facts))
    text = f"{table}\n\n{limits}\n\n{note}"
    report.write("startup", {"rounds": rounds, "found": facts}, text)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--measure", nargs=2, metavar=("KIND", "MODEL"))
    parser.add_argument("--calls", type=int, default=CALLS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(*arguments.measure, arguments.calls)))
    else:
        written(measured(arguments.rounds), arguments.rounds)


if __name__ == "__main__":
    main()
