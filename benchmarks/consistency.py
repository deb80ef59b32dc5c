"""What a check of consistency costs, and running a step again: beside a step of the
same model, and every 100 steps.

For each model, rounds of 100 steps of `fit` in turn: without the callback, and with
`kd.callbacks.ReplicaConsistency(every=100)`, which checks once in a round. Then checks
by themselves. The fastest round of each counts, since whatever else the machine does
only adds to it; the first, which compiles, is left out. Last, a round with
`kd.callbacks.StepReplay(every=10)`, each of whose steps is waited for: what the median
of those that run again takes more than the median of the others.

    python benchmarks/consistency.py             # writes results/consistency.md, .json
    python benchmarks/consistency.py --rounds 1  # quicker and rougher
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import statistics
import time
from typing import Any

import report

import keras_distribute as kd

DEVICES, STEPS, CHECKS, REPLAY_EVERY = 4, 100, 10, 10

kd.config.set_cpu_devices(DEVICES)

import jax
import keras
import workloads


class Times(keras.callbacks.Callback):
    """How long each step takes, with its callbacks."""

    def __init__(self) -> None:
        super().__init__()
        self._begins: list[float] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Waits for the step before."""
        model: Any = self.model
        jax.block_until_ready(model.trainable_variables[0].value)
        self._begins.append(time.perf_counter())

    @property
    def seconds(self) -> list[float]:
        """Of all steps but the last."""
        pairs = itertools.pairwise(self._begins)
        return [after - before for before, after in pairs]


def measured(workload: workloads.Workload, rounds: int) -> dict[str, Any]:
    """The seconds of a step without and with the callback, and of a check; how many
    variables and bytes it compares.
    """
    strategy = kd.MirroredStrategy()
    with strategy.scope():
        keras.utils.set_random_seed(0)
        model = workload.build()
        model.compile(
            keras.optimizers.Adam(1e-4),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    x, y = dataclasses.replace(workload, steps=STEPS).data()
    options: dict[str, Any] = {"batch_size": workload.batch, "shuffle": False}

    def fit(every: int | None) -> float:
        check = [] if every is None else [kd.callbacks.ReplicaConsistency(every)]
        begin = time.perf_counter()
        model.fit(x, y, verbose=0, callbacks=check, **options)
        jax.block_until_ready(model.trainable_variables[0].value)
        return (time.perf_counter() - begin) / STEPS

    seconds: dict[str, list[float]] = {"without": [], "every": [], "check": []}
    for number in range(rounds + 1):
        if number % 2:
            without, every = fit(None), fit(STEPS)
        else:
            every, without = fit(STEPS), fit(None)
        strategy.check_consistency(model)
        begin = time.perf_counter()
        for _ in range(CHECKS):
            strategy.check_consistency(model)
        check = (time.perf_counter() - begin) / CHECKS
        if number:
            for name, value in zip(seconds, (without, every, check), strict=True):
                seconds[name].append(value)
    replay, times = kd.callbacks.StepReplay(REPLAY_EVERY), Times()
    for _ in range(2):  # Of a second `fit` the pipeline of the input is warm, too.
        times = Times()
        model.fit(x, y, verbose=0, callbacks=[times, replay], **options)
    again = set(range(REPLAY_EVERY - 1, STEPS, REPLAY_EVERY))
    once = [t for i, t in enumerate(times.seconds) if i not in again]
    twice = [t for i, t in enumerate(times.seconds) if i in again][1:]  # It compiles.
    variables = [*model.variables, *model.optimizer.variables]
    return {
        "variables": strategy.check_consistency(model).num_variables,
        "bytes": sum(v.value.nbytes for v in variables),
        "replay": statistics.median(twice) - statistics.median(once),
        "alone": statistics.median(once),
        "fastest": {name: min(all_) for name, all_ in seconds.items()},
        "all": seconds,
    }


def written(facts: dict[str, Any], rounds: int) -> None:
    """Writes the results of all models."""
    rows: list[list[str]] = []
    for name, workload in workloads.PLAIN.items():
        found = facts[name]
        step, every, check = (
            found["fastest"][key] for key in ("without", "every", "check")
        )
        rows.append(
            [
                workload.title,
                str(found["variables"]),
                f"{found['bytes'] / 2**20:.1f}",
                f"{1000 * step:.1f}",
                f"{1000 * check:.1f}",
                f"{check / step:.2f} ×",
                f"{100 * check / step / STEPS:.2f} %",
                f"{every / step:.2f} ×",
                f"{found['replay'] / found['alone']:.1f} ×",
            ]
        )
    header = [
        "",
        "variables",
        "MiB a replica",
        "ms a step",
        "ms a check",
        "a check beside a step",
        "beside 100 steps",
        "steps with every=100, beside none",
        "a replay beside a step",
    ]
    note = (
        f"{DEVICES} replicas on virtual CPU devices, Adam: the fastest of {rounds} "
        f"rounds of {STEPS} steps, with and without the callback in turn, and of "
        f"{CHECKS} checks after each. The replicas share the cores, so a check takes "
        "as long as all copies together; on devices of their own, as one copy. The "
        "last column but one is two measurements of `fit` beside each other, which are "
        "apart by a tenth or two where nothing differs. A replay (`StepReplay`) runs "
        "the step with hashes of what each replica gives to the gradients, copies the "
        "state and the batch, and runs it again."
    )
    table = report.table(header, rows, "lrrrrrrrr")
    report.write("consistency", {"rounds": rounds, **facts}, f"{table}\n\n{note}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    facts = {k: measured(w, rounds) for k, w in workloads.PLAIN.items()}
    written(facts, rounds)


if __name__ == "__main__":
    main()
