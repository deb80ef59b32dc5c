"""Milliseconds a training step: keras_distribute beside plain Keras, `DataParallel` and a loop written by hand.

Each contender is a process of its own that stays alive. They are measured in turn, round after round, so that whatever
else the machine does meets all of them; the median of the rounds counts. A round is one call of `fit` over arrays in
memory (for the hand-written loop: the same number of steps), its wall time divided by its steps.

    python benchmarks/step_time.py             # writes results/step_time.md and .json
    python benchmarks/step_time.py --rounds 3  # quicker and rougher

The devices are virtual CPU devices that share the machine's cores: this measures what distribution costs, not what
more hardware would gain. Read the ratios.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import report

NUM_DEVICES = 4
CONTENDERS = {
    "plain": "Keras `fit`, one device",
    "data_parallel": "`DataParallel`, `fit`",
    "by_hand": "`shard_map` loop by hand",
    "ours": "keras_distribute, `fit`",
}


# The models. ---------------------------------------------------------------------------------------------------------


def mlp() -> tuple[Any, tuple[int, ...], int, int]:
    """A dense model 784-128-10; its input shape, its global batch and the steps of a round."""
    import keras
    from keras import layers

    model = keras.Sequential([keras.Input((784,)), layers.Dense(128, activation="relu"), layers.Dense(10)])
    return model, (784,), 256, 200


def cnn() -> tuple[Any, tuple[int, ...], int, int]:
    """Three blocks of convolution and BatchNormalization on 28 x 28 images."""
    import keras
    from keras import layers

    blocks: list[Any] = []
    for filters in (16, 32, 32):
        blocks += [
            layers.Conv2D(filters, 3, strides=1 if filters == 16 else 2, padding="same", use_bias=False),
            layers.BatchNormalization(),
            layers.ReLU(),
        ]
    model = keras.Sequential([keras.Input((28, 28, 1)), *blocks, layers.GlobalAveragePooling2D(), layers.Dense(10)])
    return model, (28, 28, 1), 128, 25


MODELS = {"mlp": mlp, "cnn": cnn}
TITLES = {"mlp": "MLP 784-128-10, Adam, 256 rows", "cnn": "CNN, 3 × (conv, BatchNorm), Adam, 128 rows"}


# The contenders, each in a process of its own. -----------------------------------------------------------------------


def prepared(contender: str, model_name: str) -> tuple[Callable[[], None], int]:
    """A function that runs one round, and how many steps that is."""
    if contender == "ours":
        import keras_distribute as kd

        kd.config.set_cpu_devices(NUM_DEVICES)
    import jax
    import keras
    import numpy as np

    if contender in ("data_parallel", "by_hand"):
        jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
    assert len(jax.devices()) == (1 if contender == "plain" else NUM_DEVICES)
    if contender == "data_parallel":
        keras.distribution.set_distribution(keras.distribution.DataParallel(devices=keras.distribution.list_devices()))
    keras.utils.set_random_seed(0)
    if contender == "ours":
        import keras_distribute as kd

        with kd.MirroredStrategy().scope():
            model, shape, batch_size, steps = MODELS[model_name]()
            _compile(model)
    else:
        model, shape, batch_size, steps = MODELS[model_name]()
        _compile(model)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(batch_size * steps, *shape)).astype("float32")
    y = rng.integers(0, 10, batch_size * steps).astype("int32")
    if contender == "by_hand":
        return _by_hand(model, x, y, batch_size), steps

    def round_() -> None:
        model.fit(x, y, batch_size=batch_size, shuffle=False, verbose=0)

    return round_, steps


def _compile(model: Any) -> None:
    import keras

    model.compile(keras.optimizers.Adam(1e-3), keras.losses.SparseCategoricalCrossentropy(from_logits=True))


def _by_hand(model: Any, x: Any, y: Any, batch_size: int) -> Callable[[], None]:
    """The loop that one would write in JAX: local statistics in BatchNormalization, gradients averaged, Adam."""
    import jax
    from jax import lax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    optimizer, loss_of = model.optimizer, model.loss
    optimizer.build(model.trainable_variables)
    mesh = Mesh(jax.devices(), ("replica",))
    replicated, split = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("replica"))

    def step(state: Any, x: Any, y: Any) -> Any:
        trainable, others, slots, total = state

        def loss_fn(trainable: Any) -> Any:
            logits, new_others = model.stateless_call(trainable, others, x, training=True)
            return loss_of(y, logits), new_others

        (loss, others), grads = jax.value_and_grad(loss_fn, has_aux=True)(trainable)
        others = [lax.pmean(v, "replica") if v.dtype.name == "float32" else v for v in others]
        loss, grads = lax.pmean((loss, grads), "replica")
        trainable, slots = optimizer.stateless_apply(slots, grads, trainable)
        return trainable, others, slots, total + loss

    specs = PartitionSpec(), PartitionSpec("replica"), PartitionSpec("replica")
    program = jax.jit(
        jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=False), donate_argnums=0
    )
    variables = (model.trainable_variables, model.non_trainable_variables, optimizer.variables)
    state = jax.device_put(([[v.value for v in group] for group in variables], 0.0), replicated)
    held = [(*state[0], state[1])]

    def round_() -> None:
        state = held[0]
        for start in range(0, len(x), batch_size):
            rows = slice(start, start + batch_size)
            state = program(state, *jax.device_put((x[rows], y[rows]), split))
        held[0] = jax.block_until_ready(state)

    return round_


def work(contender: str, model_name: str) -> None:
    """Runs one round for each line that arrives, and answers with its milliseconds a step."""
    round_, steps = prepared(contender, model_name)
    for _ in sys.stdin:
        start = time.perf_counter()
        round_()
        print("ms", 1000 * (time.perf_counter() - start) / steps, flush=True)


# Measuring. ----------------------------------------------------------------------------------------------------------


class Contender:
    """A process that runs rounds on demand."""

    def __init__(self, name: str, model_name: str) -> None:
        root = str(Path(__file__).resolve().parents[1])
        environment = os.environ | {
            "KERAS_BACKEND": "jax",
            "JAX_PLATFORMS": "cpu",
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
        }
        if name in ("data_parallel", "by_hand"):
            environment["NPROC"] = str(8 * NUM_DEVICES)  # keras_distribute does this by itself
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--contender", name, "--model", model_name],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def round(self) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print("go", file=self._process.stdin, flush=True)
        for line in self._process.stdout:
            if line.startswith("ms "):
                return float(line.split()[1])
        raise RuntimeError(f"{self._process.args} ended with status {self._process.wait()}.")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def measure(model_name: str, rounds: int) -> dict[str, list[float]]:
    """Milliseconds a step of every round, by contender; the first round of each, which compiles, is left out."""
    contenders = {name: Contender(name, model_name) for name in CONTENDERS}
    for contender in contenders.values():
        contender.round()
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, contender in contenders.items():
            times[name].append(contender.round())
    for contender in contenders.values():
        contender.close()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--contender", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--model", choices=MODELS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.contender:
        work(arguments.contender, arguments.model)
        return

    times = {model_name: measure(model_name, arguments.rounds) for model_name in MODELS}
    medians = {name: {c: statistics.median(rounds) for c, rounds in by.items()} for name, by in times.items()}
    rows = []
    for contender, title in CONTENDERS.items():
        cells = []
        for model_name in MODELS:
            median, plain = medians[model_name][contender], medians[model_name]["plain"]
            spread = sorted(times[model_name][contender])
            cells.append(f"{median:.1f} ({spread[0]:.1f}–{spread[-1]:.1f}), {median / plain:.2f} ×")
        devices = 1 if contender == "plain" else NUM_DEVICES
        rows.append([title, str(devices), *cells])
    markdown = report.table(["", "devices", *(TITLES[name] for name in MODELS)], rows, "lrrr")
    note = (
        f"Milliseconds a step: the median of {arguments.rounds} rounds (fastest–slowest), and the ratio to Keras on "
        "one device with the same global batch. All in the same run, taking turns. The devices are virtual CPU "
        "devices on the same cores. In BatchNormalization, `DataParallel` uses statistics of the whole batch, "
        "keras_distribute and the loop by hand those of each replica's rows."
    )
    facts = {"devices": NUM_DEVICES, "rounds": arguments.rounds, "median_ms": medians, "all_ms": times}
    report.write("step_time", facts, f"{markdown}\n\n{note}")


if __name__ == "__main__":
    main()
