"""The pace of `fit` on real images: each pipeline of `images.py`, feeding plain Keras
on one device and `kd.MirroredStrategy` on four.

A contender is a process of its own. In each round it reads all files without a model,
trains on as many rows in memory, and trains on the pipeline. While `fit` goes on, the
pipeline and the step want the same cores, so it can be no faster than the slowest of
three: the step alone, the pipeline alone, and what both take of the cores together,
divided by the number of cores.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import images
import report

NUM_DEVICES = 4
TRAINERS = {"plain": "Keras, one device", "ours": "keras_distribute, 4 devices"}
KINDS = ("pipeline", "step", "fit")
Rows = dict[str, list[float]]


def work(pipeline: str, trainer: str, folder: str, rounds: int) -> None:
    """Prints the milliseconds of a step, by kind and round: by the clock, and of the
    cores.
    """
    import contextlib

    import numpy as np

    scope: Any = contextlib.nullcontext()
    if trainer == "ours":
        import keras_distribute as kd

        kd.config.set_cpu_devices(NUM_DEVICES)
        scope = kd.MirroredStrategy().scope()
    data: Any = images.pipeline_of(pipeline, Path(folder))
    with scope:
        model = _compiled()
    batches = [tuple(map(np.asarray, batch)) for batch in data]
    x, y = (np.concatenate(arrays) for arrays in zip(*batches, strict=True))
    options: Any = {"batch_size": images.BATCH_SIZE, "shuffle": False, "verbose": 0}
    kinds: dict[str, Callable[[], Any]] = {
        "pipeline": lambda: sum(1 for _ in data),
        "step": lambda: model.fit(x, y, **options),
        "fit": lambda: model.fit(data, verbose=0),
    }
    found: Rows = {f"{kind} {what}": [] for kind in KINDS for what in ("ms", "cores")}
    for number in range(1 + rounds):  # The first one compiles.
        for kind, run in kinds.items():
            begun, used = time.perf_counter(), _core_seconds()
            run()
            elapsed, used = time.perf_counter() - begun, _core_seconds() - used
            if number:
                found[f"{kind} ms"].append(1000 * elapsed / images.STEPS)
                found[f"{kind} cores"].append(1000 * used / images.STEPS)
    if trainer == "ours":
        found |= _waits(model, data, rounds)
    print("FOUND", json.dumps(found), flush=True)


def _compiled() -> Any:
    import keras
    from keras import layers

    keras.utils.set_random_seed(0)
    blocks: list[Any] = []
    for filters in (16, 32, 64):
        blocks += [layers.Conv2D(filters, 3, strides=2, padding="same"), layers.ReLU()]
    shape = (images.SIZE, images.SIZE, 3)
    head = [layers.GlobalAveragePooling2D(), layers.Dense(images.CLASSES)]
    model = keras.Sequential([keras.Input(shape), *blocks, *head])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-3), loss)
    return model


def _waits(model: Any, data: Any, rounds: int) -> Rows:
    """The shares of a step in which the training thread waits for a batch, and the
    reading thread until a step takes one.
    """
    import keras_distribute as kd

    found: Rows = {"steps wait": [], "reader waits": []}
    for _ in range(rounds):
        watch = kd.callbacks.StepTimeReport(images.STEPS - 4, skip=2, verbose=0)
        model.fit(data, verbose=0, callbacks=[watch])
        took = watch.milliseconds
        found["steps wait"].append(took["input"] / took["step"])
        found["reader waits"].append(took["room"] / took["step"])
    return found


def _core_seconds() -> float:
    """What this process and its workers have taken of the cores so far."""
    own = [time.process_time()]
    for child in multiprocessing.active_children():
        path = Path(f"/proc/{child.pid}/stat")
        if path.exists():
            fields = path.read_text(encoding="utf-8").rsplit(")", 1)[1].split()
            ticks = int(fields[11]) + int(fields[12])
            own.append(ticks / os.sysconf("SC_CLK_TCK"))
    return sum(own)


def measured(rounds: int) -> dict[str, dict[str, Rows]]:
    """What each process has found, by pipeline and trainer."""
    with tempfile.TemporaryDirectory() as folder:
        images.make_files(Path(folder))
        return {
            pipeline: {
                trainer: _in_a_process(pipeline, trainer, folder, rounds)
                for trainer in TRAINERS
            }
            for pipeline in images.PIPELINES
        }


def _in_a_process(pipeline: str, trainer: str, folder: str, rounds: int) -> Rows:
    root = str(report.ROOT)
    environment = os.environ | {
        "KERAS_BACKEND": "jax",
        "JAX_PLATFORMS": "cpu",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]).rstrip(
            os.pathsep
        ),
    }
    command = [sys.executable, __file__, pipeline, trainer, folder, str(rounds)]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False
    )
    for line in done.stdout.splitlines():
        if line.startswith("FOUND "):
            return json.loads(line.removeprefix("FOUND "))
    raise RuntimeError(f"{pipeline}, {trainer} failed:\n{done.stderr[-3000:]}")


def bound(rows: Rows) -> float:
    """The milliseconds of a step that `fit` cannot go below on these cores."""
    pipeline, step = (statistics.median(rows[f"{k} ms"]) for k in KINDS[:2])
    return max(pipeline, step, cores_bound(rows))


def cores_bound(rows: Rows) -> float:
    """The core milliseconds of a step and of its batch, divided by the cores."""
    both = [statistics.median(rows[f"{kind} cores"]) for kind in KINDS[:2]]
    return sum(both) / (os.cpu_count() or 1)


def _cores_of_fit(rows: Rows) -> float:
    """What `fit` takes of the cores, beside the pipeline and the step alone."""
    pipeline, step, fit = (statistics.median(rows[f"{kind} cores"]) for kind in KINDS)
    return fit / (pipeline + step)


def described(found: dict[str, dict[str, Rows]], rounds: int) -> str:
    """What was found, as text."""
    lines = []
    for pipeline, title in images.PIPELINES.items():
        for trainer, own in TRAINERS.items():
            rows = found[pipeline][trainer]
            times = [statistics.median(rows[f"{kind} ms"]) for kind in KINDS]
            waits = [
                f"{statistics.median(rows[who]):.0%}" if who in rows else ""
                for who in ("steps wait", "reader waits")
            ]
            lines.append(
                [
                    f"{title}; {own}",
                    *(f"{value:.1f}" for value in times[:2]),
                    f"{cores_bound(rows):.1f}",
                    f"{times[2]:.1f}",
                    f"{times[2] / bound(rows):.2f} ×",
                    f"{_cores_of_fit(rows):.2f} ×",
                    *waits,
                ]
            )
    header = [
        "",
        "pipeline alone",
        "step alone",
        "both, by cores",
        "`fit`",
        "to the largest of these",
        "cores, to both alone",
        "steps wait for input",
        "the reader waits for steps",
    ]
    note = (
        f"Milliseconds a step of {images.BATCH_SIZE} images; medians of {rounds} "
        f"rounds of {images.STEPS} steps. {images.FILES} JPEG files of {images.SIDE} × "
        f"{images.SIDE} pixels are decoded, cut, flipped and resized to {images.SIZE} "
        f"× {images.SIZE}, for a small CNN. Each pass begins with an empty queue. The "
        "pipeline alone has no model, the step alone the rows in memory. Both, by "
        "cores: the time of the cores that the two take, divided by "
        f"{os.cpu_count()} cores. `fit` cannot be faster than the largest of the "
        "three. Cores, to both alone: what `fit` takes of the cores, beside the "
        "pipeline and the step alone; Keras reads two batches of Grain before a pass, "
        "which counts here. The last two columns are from "
        "`kd.callbacks.StepTimeReport`: the part of a step in which the training "
        "thread waits for a batch, and in which the reading thread has enough batches "
        "ready."
    )
    return f"{report.table(header, lines, 'lrrrrrrrr')}\n\n{note}"


if __name__ == "__main__":
    work(*sys.argv[1:4], rounds=int(sys.argv[4]))
