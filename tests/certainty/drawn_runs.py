"""Trainings drawn by a number, and their bits on several numbers of devices; run by
`python -m tests.certainty.drawn_runs DEVICES SEED...`, which prints a line for each.
`DEVICES` are numbers, or `2x4` for two processes of four devices each: `1,8,2x4`.

Run in a process of its own: the tests' own processes compile without most of XLA's
optimizations, which is where bits may come to differ.
"""

from __future__ import annotations

import hashlib
import os
import random
import sys
from typing import Any

import keras
import numpy as np

import keras_distribute as kd
from tests.support import without_tensorflow

MODELS = ("mlp", "cnn", "lstm", "transformer", "embedding", "subclassed")
POLICIES = ("float32", "float32", "mixed_bfloat16", "mixed_float16")


class Subclassed(keras.Model):
    """A model with its own `call`."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(8, "relu")
        self.norm = keras.layers.BatchNormalization()
        self.head = keras.layers.Dense(4)

    def call(self, x: Any, training: bool = False) -> Any:
        return self.head(self.norm(self.dense(x), training=training))


def model_of(name: str) -> Any:
    layers = keras.layers
    if name == "subclassed":
        return Subclassed()
    if name == "transformer":
        inputs = keras.Input((6, 16))
        x = layers.MultiHeadAttention(2, 8, dropout=0.1)(inputs, inputs)
        x = layers.LayerNormalization()(x + inputs)
        x = layers.GlobalAveragePooling1D()(layers.Dense(32, "gelu")(x))
        return keras.Model(inputs, layers.Dense(4)(x))
    parts: dict[str, list[Any]] = {
        "mlp": [
            keras.Input((20,)),
            layers.Dense(64, "relu", kernel_regularizer="l2"),
            layers.Dropout(0.3),
        ],
        "cnn": [
            keras.Input((10, 10, 3)),
            layers.Conv2D(8, 3, activation="relu"),
            layers.BatchNormalization(),
            layers.MaxPooling2D(),
            layers.Conv2D(8, 3),
            layers.Flatten(),
        ],
        "lstm": [keras.Input((7, 6)), layers.Masking(), layers.LSTM(16)],
        "embedding": [
            keras.Input((9,), dtype="int32"),
            layers.Embedding(50, 8, mask_zero=True),
            layers.GlobalAveragePooling1D(),
        ],
    }
    return keras.Sequential([*parts[name], layers.Dense(4)])


SHAPES = {"cnn": (10, 10, 3), "lstm": (7, 6), "transformer": (6, 16)}


def data_of(name: str, rows: int) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(rows)
    x: Any = rng.standard_normal((rows, *SHAPES.get(name, (20,)))).astype("float32")
    if name == "embedding":
        x = rng.integers(0, 50, (rows, 9))
    if name == "lstm":
        x[::3, 4:] = 0
    return x, rng.integers(0, 4, rows), np.linspace(0.5, 2, rows, dtype="float32")


class Drawn:
    """What is trained, and how.

    Args:
        seed: The draw.
    """

    def __init__(self, seed: int) -> None:
        choice = random.Random(seed)
        self.model = MODELS[seed % len(MODELS)]
        self.policy = choice.choice(POLICIES)
        self.rows, self.batch = choice.randint(3, 70), choice.choice([3, 8, 16, 29])
        self.optimizer = choice.choice(
            ["sgd", "adam", "adamw", "lion", "adafactor", "rmsprop", "clipped"]
        )
        self.accumulation = choice.choice([None, None, 2, 3])
        self.per_execution = choice.choice([1, 1, 2])
        self.options: dict[str, Any] = {}
        if choice.random() < 0.3:
            self.options["shard_optimizer_state"] = True
        if choice.random() < 0.2:
            self.options["communication_dtype"] = choice.choice(["bfloat16", "float16"])

    def __repr__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in vars(self).items())

    def optimizer_now(self) -> Any:
        options: dict[str, Any] = {}
        if self.accumulation:
            options["gradient_accumulation_steps"] = self.accumulation
        if self.optimizer == "clipped":
            options |= {"momentum": 0.9, "global_clipnorm": 0.1}
            return keras.optimizers.SGD(0.1, **options)
        made = keras.optimizers.get(self.optimizer)
        return type(made).from_config(made.get_config() | options)

    def compiled_on(self, strategy: Any) -> Any:
        keras.utils.set_random_seed(7)
        before = keras.mixed_precision.dtype_policy()
        keras.mixed_precision.set_dtype_policy(self.policy)
        try:
            with strategy.scope():
                model = model_of(self.model)
                model.compile(
                    self.optimizer_now(),
                    keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                    metrics=["accuracy"],
                    steps_per_execution=self.per_execution,
                )
        finally:
            keras.mixed_precision.set_dtype_policy(before)
        return model

    def bits_on(self, strategy: Any) -> dict[str, str]:
        """Hashes of what a training leaves and says."""
        model = self.compiled_on(strategy)
        x, y, weight = data_of(self.model, self.rows)
        options: dict[str, Any] = {"batch_size": self.batch, "verbose": 0}
        history = model.fit(x, y, sample_weight=weight, epochs=2, **options).history
        evaluated = model.evaluate(x, y, **options)
        predicted = model.predict(x, **options)
        return {
            "weights": _hash([v.numpy() for v in model.variables]),
            "slots": _hash([v.numpy() for v in model.optimizer.variables]),
            "logs": _hash([list(history.values()), evaluated]),
            "predictions": _hash([predicted]),
        }


def _hash(arrays: list[Any]) -> str:
    whole = b"".join(np.asarray(array).tobytes() for array in arrays)
    return hashlib.sha256(whole).hexdigest()[:16]


def bits_in_processes(seeds: list[int]) -> list[dict[str, str]]:
    """Of each draw, over all processes of a job."""
    without_tensorflow()
    found = []
    for seed in seeds:
        drawn = Drawn(seed)
        options: dict[str, Any] = {"deterministic": True, **drawn.options}
        found.append(drawn.bits_on(kd.MultiWorkerMirroredStrategy(**options)))
    return found


def bits_of(where: str, seeds: list[int]) -> list[dict[str, str]]:
    """Of each draw, on so many devices, or in processes of so many."""
    if "x" not in where:
        found = []
        for drawn in map(Drawn, seeds):
            names = [f"cpu:{i}" for i in range(int(where))]
            options: dict[str, Any] = {"deterministic": True, **drawn.options}
            found.append(drawn.bits_on(kd.MirroredStrategy(names, **options)))
        return found
    processes, devices = map(int, where.split("x"))
    first, *others = kd.testing.run_in_processes(
        bits_in_processes,
        processes,
        seeds,
        cpu_devices=devices,
        timeout=300 + 60 * len(seeds),
        environment={"NPROC": os.environ["NPROC"]},
    )
    assert all(other == first for other in others)
    return first


def main(places: list[str], seeds: list[int]) -> int:
    differing = 0
    found = {where: bits_of(where, seeds) for where in places}
    for i, seed in enumerate(seeds):
        first = found[places[0]][i]
        wrong = {
            where: [kind for kind in first if bits[i][kind] != first[kind]]
            for where, bits in found.items()
            if bits[i] != first
        }
        differing += bool(wrong)
        said = "DIFFERENT" if wrong else "same"
        print(f"{said} {seed}: {Drawn(seed)} {wrong or first}")
        sys.stdout.flush()
    return differing


if __name__ == "__main__":
    without_tensorflow()
    kd.config.set_cpu_devices(8)
    places, *seeds = sys.argv[1:]
    sys.exit(main(places.split(","), list(map(int, seeds))))
