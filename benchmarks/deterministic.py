"""What the same bits on any number of devices cost: a step of `fit` with
`deterministic=True` beside an ordinary one.

For each model, rounds of `fit` in turn on the same devices: ordinary, with the 8
replicas that there are by default, and with as many as there are devices. The median of
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
KINDS: dict[str, dict[str, Any]] = {
    "ordinary": {},
    "deterministic": {"deterministic": True},
    "replica_each": {"deterministic": True, "num_replicas": DEVICES},
}
TITLES = {
    "ordinary": "ordinary",
    "deterministic": "deterministic, 8 replicas",
    "replica_each": f"deterministic, {DEVICES} replicas",
}

kd.config.set_cpu_devices(DEVICES)

import jax
import keras
import operations
import workloads


def measured(
    workload: workloads.Workload, rounds: int
) -> tuple[dict[str, list[float]], dict[str, dict[str, float]]]:
    """The seconds of a step of each kind; the milliseconds of each kind of
    operation.
    """
    x, y = dataclasses.replace(workload, steps=STEPS).data()
    models: dict[str, Any] = {}
    for name, options in KINDS.items():
        with kd.MirroredStrategy(**options).scope():
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
            parts.append([f"{workload.title}, {TITLES[which]}", *cells])
        base = found["ordinary"]
        row = [workload.title, f"{1000 * statistics.median(base):.1f}"]
        for own in (found[kind] for kind in KINDS if kind != "ordinary"):
            pairs = zip(own, base, strict=True)
            ratio = statistics.median(ours / theirs for ours, theirs in pairs)
            row += [f"{1000 * statistics.median(own):.1f}", f"{ratio:.2f} ×"]
        rows.append(row)
    header = ["", "ms a step, ordinary"]
    for kind in KINDS:
        header += [TITLES[kind], "ratio"] if kind != "ordinary" else []
    note = (
        f"{DEVICES} virtual CPU devices, Adam: medians of {rounds} rounds of {STEPS} "
        "steps in turn. A replica is computed as it is on one device; with 8 replicas "
        "there may be 1, 2, 4 or 8 devices, with 4 replicas 1, 2 or 4."
    )
    where = (
        "Where it goes, in milliseconds a step of all devices together, which share "
        "the cores. Products: of matrices, and convolutions. Arithmetic: of each "
        "element, and sums. Moving: copies, slices and fills, mostly where the part of "
        "a replica begins and ends. Communication includes waiting for other devices."
    )
    several = report.table(["", *operations.KINDS], parts, "lrrrr")
    text = f"{report.table(header, rows, 'lrrrrr')}\n\n{note}\n\n{several}\n\n{where}"
    report.write("deterministic", {"rounds": rounds, **facts}, text)


if __name__ == "__main__":
    main()
