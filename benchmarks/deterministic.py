"""What the same bits on any number of devices cost: a step of `fit` with
`deterministic=True` beside an ordinary one.

For each model, rounds of `fit` in turn with both, on the same devices. The median of
the rounds' ratios counts; the first round, which compiles, is left out.

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
import workloads


def measured(workload: workloads.Workload, rounds: int) -> dict[str, Any]:
    """The seconds of a step, ordinary and deterministic."""
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
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for number in range(rounds + 1):
        for name in sorted(models, reverse=bool(number % 2)):
            begin = time.perf_counter()
            options: dict[str, Any] = {"shuffle": False, "verbose": 0}
            models[name].fit(x, y, batch_size=workload.batch, **options)
            jax.block_until_ready(models[name].trainable_variables[0].value)
            if number:
                seconds[name].append((time.perf_counter() - begin) / STEPS)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    facts, rows = dict[str, Any](), list[list[str]]()
    for name, workload in workloads.PLAIN.items():
        facts[name] = found = measured(workload, rounds)
        pairs = zip(found["deterministic"], found["ordinary"], strict=True)
        ratio = statistics.median(ours / theirs for ours, theirs in pairs)
        times = [1000 * statistics.median(found[key]) for key in sorted(found)[::-1]]
        rows.append([workload.title, *(f"{t:.1f}" for t in times), f"{ratio:.2f} ×"])
    header = ["", "ms a step, ordinary", "deterministic", "ratio"]
    note = (
        f"{DEVICES} virtual CPU devices, 8 replicas where deterministic, Adam: medians "
        f"of {rounds} rounds of {STEPS} steps in turn."
    )
    text = f"{report.table(header, rows, 'lrrr')}\n\n{note}"
    report.write("deterministic", {"rounds": rounds, **facts}, text)


if __name__ == "__main__":
    main()
