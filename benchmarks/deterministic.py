"""What the same bits on any number of devices cost: a step of `fit` with
`deterministic=True` beside an ordinary one.

For each model, rounds of `fit` in turn with both, on the same devices. The median of
the rounds' ratios counts; the first round, which compiles, is left out. Then one round
of each is traced, to say which operations the difference consists of.

    python benchmarks/deterministic.py             # writes results/deterministic.*
    python benchmarks/deterministic.py --rounds 1  # quicker and rougher
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from typing import Any

import report

import keras_distribute as kd

DEVICES, STEPS = 4, 30

kd.config.set_cpu_devices(DEVICES)

import jax
import keras
import operations
import workloads


def measured(
    workload: workloads.Workload, rounds: int
) -> tuple[dict[str, list[float]], dict[str, dict[str, float]]]:
    """The seconds of a step, ordinary and deterministic; the milliseconds of each kind
    of operation.
    """
    x, y = dataclasses.replace(workload, steps=STEPS).data()
    models: dict[str, Any] = {}
    for name in ("ordinary", "deterministic"):
        strategy = kd.MirroredStrategy(deterministic=name == "deterministic")
        with strategy.scope():
            keras.utils.set_random_seed(0)
            models[name] = workload.build()
            models[name].compile(
                keras.optimizers.Adam(1e-4),
                keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            )

    def trained(name: str) -> None:
        options: dict[str, Any] = {"shuffle": False, "verbose": 0}
        models[name].fit(x, y, batch_size=workload.batch, **options)
        jax.block_until_ready(models[name].trainable_variables[0].value)

    seconds: dict[str, list[float]] = {name: [] for name in models}
    for number in range(rounds + 1):
        for name in sorted(models, reverse=bool(number % 2)):
            begin = time.perf_counter()
            trained(name)
            if number:
                seconds[name].append((time.perf_counter() - begin) / STEPS)
    kinds = {
        name: operations.milliseconds(lambda name=name: trained(name), STEPS)
        for name in models
    }
    return seconds, kinds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    facts, rows, parts = dict[str, Any](), list[list[str]](), list[list[str]]()
    for name, workload in workloads.PLAIN.items():
        found, kinds = measured(workload, rounds)
        facts[name] = {**found, "operations": kinds}
        for which, of_kind in kinds.items():
            cells = (f"{of_kind[kind]:.1f}" for kind in operations.KINDS)
            parts.append([f"{workload.title}, {which}", *cells])
        pairs = zip(found["deterministic"], found["ordinary"], strict=True)
        ratio = statistics.median(ours / theirs for ours, theirs in pairs)
        times = [1000 * statistics.median(found[key]) for key in sorted(found)[::-1]]
        rows.append([workload.title, *(f"{t:.1f}" for t in times), f"{ratio:.2f} ×"])
    header = ["", "ms a step, ordinary", "deterministic", "ratio"]
    note = (
        f"{DEVICES} virtual CPU devices, 8 replicas where deterministic, Adam: medians "
        f"of {rounds} rounds of {STEPS} steps in turn."
    )
    where = (
        "Where it goes, in milliseconds a step of all devices together, which share "
        "the cores. Products: of matrices, and convolutions. Arithmetic: of each "
        "element, and sums. Moving: copies, slices and fills, mostly where the part of "
        "a replica begins and ends. Communication includes waiting for other devices."
    )
    several = report.table(["", *operations.KINDS], parts, "lrrrr")
    text = f"{report.table(header, rows, 'lrrr')}\n\n{note}\n\n{several}\n\n{where}"
    report.write("deterministic", {"rounds": rounds, **facts}, text)


if __name__ == "__main__":
    main()
