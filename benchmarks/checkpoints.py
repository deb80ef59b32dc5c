"""What saving a state of 200 MB every 50 steps costs a training: ours beside Keras's
callbacks.

Each contender is a process of its own that stays alive. They are measured in turn,
round after round, so that whatever else the machine does meets all of them; the median
of the rounds counts. A round is one `fit` of 110 steps, with two saves. "Blocked" is
the time between the end of one step and the beginning of the next, beyond what that is
without a save, as a share of the time of all steps; files that are written in the
background also compete with the steps for the processor and the disk, which the time a
step shows.

    python benchmarks/checkpoints.py             # writes results/checkpoints.md, .json
    python benchmarks/checkpoints.py --rounds 1  # quicker and rougher
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import report

NUM_DEVICES = 2
STEPS, SAVE_EVERY, BATCH = 110, 50, 64
STEPS_FIRST = 55  # Of the round that compiles.
CONTENDERS = {
    "nothing": "no saves",
    "ours": "`kd.callbacks.BackupAndRestore`",
    "orbax": "`keras.callbacks.OrbaxCheckpoint`, in the background",
    "orbax_waiting": "`keras.callbacks.OrbaxCheckpoint`, waiting",
    "keras": "`keras.callbacks.BackupAndRestore`",
}


# The contenders, each in a process of its own.
# -----------------------------------------------------------------------


def prepared(contender: str) -> Callable[[int], dict[str, float]]:
    """A function that runs a round of so many steps.

    It returns the milliseconds a step, the share of the time that was blocked, and the
    milliseconds blocked a save.
    """
    import keras_distribute as kd

    kd.config.set_cpu_devices(NUM_DEVICES)
    import keras
    import numpy as np

    class Clock(keras.callbacks.Callback):
        """The first of the callbacks: when steps begin and end. Asking for `logs` waits
        for the step.
        """

        def __init__(self) -> None:
            super().__init__()
            self.begun: list[float] = []
            self.ended: list[float] = []

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            self.begun.append(time.perf_counter())

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.ended.append(time.perf_counter())

    with kd.MirroredStrategy().scope():
        keras.utils.set_random_seed(0)
        inputs = keras.Input((4096,))
        model = keras.Model(
            inputs, keras.layers.Dense(10)(keras.layers.Dense(4096, "relu")(inputs))
        )
        model.compile(
            keras.optimizers.Adam(1e-4),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    rng = np.random.default_rng(0)
    x = rng.normal(size=(BATCH * STEPS, 4096)).astype("float32")
    y = rng.integers(0, 10, BATCH * STEPS).astype("int32")

    def saver(folder: str) -> list[Any]:
        c = keras.callbacks
        return {
            "nothing": list,
            "ours": lambda: [
                kd.callbacks.BackupAndRestore(folder, save_freq=SAVE_EVERY)
            ],
            "orbax": lambda: [c.OrbaxCheckpoint(folder, save_freq=SAVE_EVERY)],
            "orbax_waiting": lambda: [
                c.OrbaxCheckpoint(
                    folder, save_freq=SAVE_EVERY, save_on_background=False
                )
            ],
            "keras": lambda: [c.BackupAndRestore(folder, save_freq=SAVE_EVERY)],
        }[contender]()

    def round_(steps: int) -> dict[str, float]:
        folder = tempfile.mkdtemp()
        clock = Clock()
        rows = steps * BATCH
        callbacks = [clock, *saver(f"{folder}/saved")]
        model.fit(
            x[:rows],
            y[:rows],
            batch_size=BATCH,
            shuffle=False,
            verbose=0,
            callbacks=callbacks,
        )
        shutil.rmtree(folder)
        gaps = [
            begun - ended
            for begun, ended in zip(clock.begun[1:], clock.ended[:-1], strict=True)
        ]
        usual = statistics.median(gaps)
        blocked = sum(
            gap - usual for i, gap in enumerate(gaps, 1) if i % SAVE_EVERY == 0
        )
        total = clock.ended[-1] - clock.begun[0]
        saves = len(gaps) // SAVE_EVERY
        return {
            "ms": 1000 * total / steps,
            "blocked": blocked / total,
            "ms_blocked_a_save": 1000 * blocked / saves,
        }

    return round_


def work(contender: str) -> None:
    """Runs a round of as many steps as each line that arrives says, and answers with
    what was measured.
    """
    round_ = prepared(contender)
    for line in sys.stdin:
        print("measured", *round_(int(line)).values(), flush=True)


# Measuring.
# --------------------------------------------------------------------------------------


class Contender:
    """A process that runs rounds on demand."""

    def __init__(self, name: str) -> None:
        root = str(Path(__file__).resolve().parents[1])
        environment = os.environ | {
            "KERAS_BACKEND": "jax",
            "JAX_PLATFORMS": "cpu",
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "PYTHONPATH": os.pathsep.join(
                [root, os.environ.get("PYTHONPATH", "")]
            ).rstrip(os.pathsep),
        }
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--contender", name],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def round(self, steps: int) -> list[float]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(steps, file=self._process.stdin, flush=True)
        for line in self._process.stdout:
            if line.startswith("measured "):
                return [float(word) for word in line.split()[1:]]
        raise RuntimeError(
            f"{self._process.args} ended with status {self._process.wait()}."
        )

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def measure(rounds: int) -> dict[str, list[list[float]]]:
    """Every round, by contender; the first of each, which compiles, is left out."""
    measured: dict[str, list[list[float]]] = {name: [] for name in CONTENDERS}
    contenders = {name: Contender(name) for name in CONTENDERS}
    for contender in contenders.values():
        contender.round(STEPS_FIRST)
    for _ in range(rounds):
        for name, contender in contenders.items():
            measured[name].append(contender.round(STEPS))
    for contender in contenders.values():
        contender.close()
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--contender", choices=CONTENDERS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.contender:
        work(arguments.contender)
        return

    measured = measure(arguments.rounds)
    medians = {
        name: [statistics.median(column) for column in zip(*rounds, strict=True)]
        for name, rounds in measured.items()
    }
    rows = []
    for name, title in CONTENDERS.items():
        ms, blocked, a_save = medians[name]
        slower = ms / medians["nothing"][0]
        cells = (
            ["", ""]
            if name == "nothing"
            else [f"{100 * blocked:.1f} %", f"{a_save:.0f}"]
        )
        rows.append([title, *cells, f"{ms:.0f}", f"{slower:.2f} ×"])
    header = ["", "blocked", "ms blocked a save", "ms a step", "beside no saves"]
    markdown = report.table(header, rows, "lrrrr")
    note = (
        f"A dense model whose weights and Adam state are 202 MB, on {NUM_DEVICES} "
        "virtual CPU devices, saved every "
        f"{SAVE_EVERY} steps of {BATCH} rows: medians of {arguments.rounds} rounds of "
        f"{STEPS} steps, all in the same "
        "run, taking turns. Ours saves the position in the data, the other callbacks' "
        "state and checksums as well."
    )
    facts = {
        "devices": NUM_DEVICES,
        "rounds": arguments.rounds,
        "median": medians,
        "all": measured,
    }
    report.write("checkpoints", facts, f"{markdown}\n\n{note}")


if __name__ == "__main__":
    main()
