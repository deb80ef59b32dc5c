"""What a slow input pipeline adds to a training step: nothing, where batches are made
ready while the step runs; and the pace of `fit` on real images (`image_input.py`).

The pipeline waits for each batch as long as 80 % of a step, as one that reads from a
disk or a network does; or it computes as long. A contender is a process of its own. Its
rounds take turns between the pipeline that costs nothing, whose steps say how long a
step is, and the slow ones; the ratio of the medians counts.

    # Writes results/input_pipeline.md and .json:
    python benchmarks/input_pipeline.py
    # Quicker and rougher:
    python benchmarks/input_pipeline.py --rounds 3
    # Writes nothing:
    python benchmarks/input_pipeline.py --dry

The devices are virtual CPU devices that share the machine's cores, so a pipeline that
computes takes their cores from them: its ratio says what this machine can do, not what
reading ahead costs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import image_input
import report

NUM_DEVICES, BATCH_SIZE, STEPS, SHARE = 4, 128, 30, 0.8
CONTENDERS = {
    "plain": "Keras `fit`, one device",
    "data_parallel": "`DataParallel`, `fit`",
    "ours": "keras_distribute, `fit`",
    "ours_due": "keras_distribute, `fit`, nothing read ahead",
    "ours_loop": "keras_distribute, `run` over a distributed dataset",
}
PIPELINES = ("free", "waits", "computes")


def work(contender: str, rounds: int) -> None:
    """Prints the milliseconds of a step with each pipeline, by round."""
    if contender.startswith("ours"):
        import keras_distribute as kd

        kd.config.set_cpu_devices(NUM_DEVICES)
        kd.config.set_prefetch_steps(0 if contender == "ours_due" else 2)
    import jax
    import keras
    import numpy as np
    from keras import layers

    if contender == "data_parallel":
        jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
        keras.distribution.set_distribution(
            keras.distribution.DataParallel(devices=keras.distribution.list_devices())
        )
    keras.utils.set_random_seed(0)

    def build() -> keras.Model:
        blocks: list[Any] = []
        for filters in (16, 32, 32):
            blocks += [
                layers.Conv2D(
                    filters, 3, strides=1 if filters == 16 else 2, padding="same"
                ),
                layers.ReLU(),
            ]
        model = keras.Sequential(
            [
                keras.Input((28, 28, 1)),
                *blocks,
                layers.GlobalAveragePooling2D(),
                layers.Dense(10),
            ]
        )
        model.compile(
            "adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        )
        return model

    rng = np.random.default_rng(0)
    images = rng.normal(size=(BATCH_SIZE, 28, 28, 1)).astype("float32")
    labels = rng.integers(0, 10, BATCH_SIZE).astype("int32")
    noise = rng.normal(size=(64, 64))

    class Pipeline(keras.utils.PyDataset):
        num_batches = STEPS

        def __init__(self, kind: str, seconds: float) -> None:
            super().__init__()
            self.kind, self.seconds = kind, seconds

        def __getitem__(self, index: int) -> Any:
            if self.kind == "waits":
                time.sleep(self.seconds)
            end = time.perf_counter() + self.seconds
            while self.kind == "computes" and time.perf_counter() < end:
                np.linalg.inv(noise)
            return images, labels

    if contender.startswith("ours"):
        strategy = kd.MirroredStrategy()
        with strategy.scope():
            model = build()
    else:
        model = build()

    def train_step(element: Any) -> Any:
        x, y = element

        def loss_of() -> Any:
            return model.compute_loss(x, y, model(x, training=True))

        loss, grads = kd.value_and_grad(loss_of, model.trainable_variables)()
        model.optimizer.apply(grads, model.trainable_variables)
        return loss

    def one_round(kind: str, seconds: float) -> float:
        pipeline = Pipeline(kind, seconds)
        start = time.perf_counter()
        if contender == "ours_loop":
            loss = None
            for element in strategy.experimental_distribute_dataset(pipeline):
                loss = strategy.run(train_step, args=(element,))
            jax.block_until_ready(loss.stacked)
        else:
            model.fit(pipeline, verbose=0, shuffle=False)
        return (time.perf_counter() - start) / STEPS

    for _ in range(2):
        one_round("free", 0.0)
    free = statistics.median(one_round("free", 0.0) for _ in range(3))
    found: dict[str, list[float]] = {kind: [] for kind in PIPELINES}
    for _ in range(rounds):
        for kind in PIPELINES:
            found[kind].append(1000 * one_round(kind, SHARE * free))
    print("FOUND", json.dumps(found), flush=True)


def measured(contender: str, rounds: int) -> dict[str, list[float]]:
    """Runs one contender in a process of its own."""
    root = str(Path(__file__).resolve().parents[1])
    environment = os.environ | {
        "KERAS_BACKEND": "jax",
        "JAX_PLATFORMS": "cpu",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    environment["PYTHONPATH"] = os.pathsep.join(
        [root, os.environ.get("PYTHONPATH", "")]
    ).rstrip(os.pathsep)
    if contender == "data_parallel":
        # keras_distribute does this by itself
        environment["NPROC"] = str(8 * NUM_DEVICES)
    done = subprocess.run(
        [sys.executable, __file__, "--contender", contender, "--rounds", str(rounds)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    line = next(
        (line for line in done.stdout.splitlines() if line.startswith("FOUND ")), None
    )
    if line is None:
        raise RuntimeError(f"{contender} failed:\n{done.stderr[-3000:]}")
    return json.loads(line.removeprefix("FOUND "))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--contender", choices=CONTENDERS)
    parser.add_argument("--dry", action="store_true")
    arguments = parser.parse_args()
    if arguments.contender:
        work(arguments.contender, arguments.rounds)
        return
    times = {name: measured(name, arguments.rounds) for name in CONTENDERS}
    found = image_input.measured(arguments.rounds)
    text = f"""### A pipeline that waits or computes

{described(times, arguments.rounds)}

### Images from files

{image_input.described(found, arguments.rounds)}"""
    if arguments.dry:
        print(text)
        return
    facts = {"milliseconds": times, "steps": STEPS, "share": SHARE, "images": found}
    report.write("input_pipeline", facts, text)


def described(times: dict[str, dict[str, list[float]]], rounds: int) -> str:
    """What was found, as text."""
    rows = []
    for name, title in CONTENDERS.items():
        free, waits, computes = (
            statistics.median(times[name][kind]) for kind in PIPELINES
        )
        rows.append(
            [
                title,
                f"{free:.1f}",
                f"{waits:.1f}, {waits / free:.2f} ×",
                f"{computes:.1f}, {computes / free:.2f} ×",
            ]
        )
    header = [
        "",
        "free pipeline",
        f"waits {SHARE:.0%} of a step",
        f"computes {SHARE:.0%} of a step",
    ]
    return report.table(header, rows, "lrrr") + (
        f"\n\nMilliseconds a step: medians of {rounds} rounds of {STEPS} "
        "steps, and the ratio to the same "
        f"contender's step with a pipeline that costs nothing. A CNN on {BATCH_SIZE} "
        f"images, {NUM_DEVICES} virtual "
        "CPU devices (plain Keras: one), which share the cores with a pipeline that "
        "computes."
    )


if __name__ == "__main__":
    main()
