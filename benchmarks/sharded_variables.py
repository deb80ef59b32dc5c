"""A decoder of 60 million parameters on 8 devices, its weights divided among them and
not: bytes on a device, and the time of a step.

python benchmarks/sharded_variables.py  # writes results/sharded_variables.md and .json
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import report
from workloads import decoder

import keras_distribute as kd

DEVICES, LENGTH, WIDTH, HEADS, VOCABULARY = 8, 32, 512, 8, 22_000
BATCH, LAYERS, ROUNDS, STEPS = 16, 12, 3, 3
LARGER = 128  # Sequences, for the two that divide alike.
RATE = 1e-3

kd.config.set_cpu_devices(DEVICES)

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from keras_distribute.devices.launches import Executable


def compiled(num_layers: int) -> keras.Model:
    """The model, from the same seed."""
    keras.utils.set_random_seed(0)
    model = decoder(LENGTH, VOCABULARY, WIDTH, HEADS, num_layers)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(RATE), loss)
    return model


def data(steps: int, rows: int) -> tuple[Any, Any]:
    """Tokens, and those that follow them."""
    tokens = np.random.default_rng(0).integers(
        0, VOCABULARY, (steps * rows, LENGTH + 1)
    )
    return tokens[:, :-1].astype("int32"), tokens[:, 1:].astype("int32")


def on_one_device(arrays: list[Any]) -> int:
    """Their bytes on the first device."""
    first = jax.devices()[0]
    return sum(
        shard.data.nbytes
        for array in arrays
        for shard in array.addressable_shards
        if shard.device == first
    )


class Peaks:
    """What compiled programs say of their memory, in order."""

    def __init__(self) -> None:
        self.found: list[Any] = []
        compile_one: Callable[..., Any] = Executable.compile

        def noting(executable: Executable) -> Any:
            program = compile_one(executable)
            self.found.append(program.memory_analysis())
            return program

        Executable.compile = noting


class OfFit:
    """`fit` of a Keras model, with its arrays."""

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self.facts: dict[str, Any] = {}

    def run(self, steps: int, rows: int = BATCH) -> None:
        x, y = data(steps, rows)
        self._model.fit(x, y, batch_size=rows, shuffle=False, verbose=0)
        jax.block_until_ready([v.value for v in self._model.variables])

    def bytes(self) -> int:
        optimizer = self._model.optimizer.variables
        return on_one_device([v.value for v in [*self._model.variables, *optimizer]])


class ByHand:
    """A loop in JAX on the same layers: `jax.jit` with divided parameters and slots."""

    def __init__(self, num_layers: int) -> None:
        model = compiled(num_layers)
        mesh = Mesh(np.asarray(jax.devices()), ("replica",))
        self._rows = NamedSharding(mesh, PartitionSpec("replica"))

        def place(shape: tuple[int, ...]) -> NamedSharding:
            spec: list[Any] = [None] * len(shape)
            sizes = [n if n % DEVICES == 0 else 0 for n in shape]
            if np.prod(shape) >= 32 * 1024:
                spec[int(np.argmax(sizes))] = "replica"
            return NamedSharding(mesh, PartitionSpec(*spec))

        weights = [v.value for v in model.trainable_variables]
        places = [place(weight.shape) for weight in weights]
        put = [jax.device_put(w, p) for w, p in zip(weights, places, strict=True)]
        zeros = [[jnp.zeros_like(w) for w in put] for _ in range(2)]
        self._state: Any = (put, *zeros, jnp.zeros((), "int32"))

        def loss_of(weights: Any, x: Any, y: Any) -> Any:
            logits, _ = model.stateless_call(weights, [], x, training=True)
            own = jax.nn.log_softmax(logits)
            return -jnp.take_along_axis(own, y[..., None], -1).mean()

        def step(state: Any, x: Any, y: Any) -> Any:
            weights, first, second, count = state
            loss, grads = jax.value_and_grad(loss_of)(weights, x, y)
            count = count + 1
            rate = RATE * jnp.sqrt(1 - 0.999**count) / (1 - 0.9**count)
            first = [m + (g - m) * 0.1 for m, g in zip(first, grads, strict=True)]
            second = [
                v + (g * g - v) * 0.001 for v, g in zip(second, grads, strict=True)
            ]
            moved = zip(weights, first, second, strict=True)
            weights = [w - rate * m / (jnp.sqrt(v) + 1e-7) for w, m, v in moved]
            return loss, (weights, first, second, count)

        where = (places, places, places, NamedSharding(mesh, PartitionSpec()))
        self._jitted = jax.jit(step, donate_argnums=0, out_shardings=(None, where))
        x, y = self._batches(1, BATCH)[0]
        program = self._jitted.lower(self._state, x, y).compile()
        self.facts = {"temporary": program.memory_analysis().temp_size_in_bytes}

    def _batches(self, steps: int, rows: int) -> list[tuple[Any, Any]]:
        x, y = data(steps, rows)
        return [
            (
                jax.device_put(x[i : i + rows], self._rows),
                jax.device_put(y[i : i + rows], self._rows),
            )
            for i in range(0, len(x), rows)
        ]

    def run(self, steps: int, rows: int = BATCH) -> None:
        for x, y in self._batches(steps, rows):
            _, self._state = self._jitted(self._state, x, y)
        jax.block_until_ready(self._state)

    def bytes(self) -> int:
        return on_one_device(jax.tree.leaves(self._state))

    def num_weights(self) -> int:
        return sum(np.size(weight) for weight in self._state[0])


def of_strategy(num_layers: int, peaks: Peaks, **options: Any) -> OfFit:
    """`fit` under `MirroredStrategy`."""
    names = [f"cpu:{i}" for i in range(DEVICES)]
    with kd.MirroredStrategy(names, **options).scope():
        contender = OfFit(compiled(num_layers))
    peaks.found.clear()
    contender.run(1)
    analysis = max(peaks.found, key=lambda each: each.temp_size_in_bytes)
    contender.facts["temporary"] = analysis.temp_size_in_bytes
    return contender


def of_model_parallel(num_layers: int) -> OfFit:
    """`fit` under `keras.distribution.ModelParallel`, each weight divided alike."""
    mesh = keras.distribution.DeviceMesh((DEVICES, 1), ["batch", "model"])
    layout = keras.distribution.LayoutMap(mesh)
    layout[".*(attention|multi_head).*kernel"] = ("batch", None, None)
    layout[".*(dense|embedding).*(kernel|embeddings)"] = ("batch", None)
    distribution = keras.distribution.ModelParallel(
        layout_map=layout, batch_dim_name="batch"
    )
    keras.distribution.set_distribution(distribution)
    try:
        contender = OfFit(compiled(num_layers))
        contender.run(1)
        return contender
    finally:
        keras.distribution.set_distribution(None)


def timed(contenders: dict[str, Any], rounds: int, rows: int) -> dict[str, list[float]]:
    """Seconds of a step, in turns."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, contender in contenders.items():
            begin = time.perf_counter()
            contender.run(STEPS, rows)
            times[name].append((time.perf_counter() - begin) / STEPS)
    return times


def median_of_ratios(seconds: list[float], beside: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(seconds, beside, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    peaks = Peaks()
    makers: dict[str, Callable[[], Any]] = {
        "by hand, `jit` with divided parameters": lambda: ByHand(options.layers),
        "`shard_variables=True`": lambda: of_strategy(
            options.layers, peaks, shard_variables=True
        ),
        "the same, replicated": lambda: of_strategy(options.layers, peaks),
        "`keras.distribution.ModelParallel`": lambda: of_model_parallel(options.layers),
    }
    facts: dict[str, dict[str, Any]] = {}
    contenders: dict[str, Any] = {}
    for name, make in makers.items():
        contenders[name] = make()
        facts[name] = dict(contenders[name].facts)
        print(name, facts[name], flush=True)
        contenders[name].run(1)
    times = timed(contenders, options.rounds, BATCH)
    for name, contender in contenders.items():
        facts[name] |= {"bytes": contender.bytes(), "seconds": times[name]}
    hand, ours = list(contenders)[:2]
    divided = {name: contenders[name] for name in (hand, ours)}
    for contender in divided.values():
        contender.run(1, LARGER)
    larger = timed(divided, options.rounds, LARGER)
    whole = facts["the same, replicated"]["bytes"]
    rows: list[list[str]] = []
    for name, own in facts.items():
        own["ratio"] = median_of_ratios(times[name], times[hand])
        temporary, ratio = own.get("temporary"), ""
        if name in larger:
            own["seconds of larger"] = larger[name]
            own["ratio of larger"] = median_of_ratios(larger[name], larger[hand])
            ratio = f"{own['ratio of larger']:.2f}"
        rows.append(
            [
                name,
                f"{own['bytes'] / 1e6:.1f}",
                f"{own['bytes'] / whole:.3f}",
                "" if temporary is None else f"{temporary / 1e6:.1f}",
                f"{own['ratio']:.2f}",
                ratio,
            ]
        )
    table = report.table(
        [
            "",
            "state, MB a device",
            "of replicated",
            "temporary, MB a device",
            "time",
            f"time, {LARGER} sequences",
        ],
        rows,
        "lrrrrr",
    )
    parameters = contenders[hand].num_weights()
    note = (
        f"A decoder of {parameters / 1e6:.0f} million parameters ({options.layers} "
        f"layers, {WIDTH} wide, {VOCABULARY:,} tokens), Adam, float32, {BATCH} "
        f"sequences of {LENGTH} tokens on {DEVICES} virtual CPU devices. State: "
        "weights and slots, of live arrays. Temporary: what XLA says that the step's "
        "program takes beside; activations, gradients, and the weights that are whole. "
        f"Time: of a step, beside the loop by hand; medians of {options.rounds} "
        f"rounds of {STEPS} steps, in turns. With {BATCH} sequences activations are "
        "smaller than the larger weights, and both programs move those instead."
    )
    report.write("sharded_variables", facts, f"{table}\n\n{note}")


if __name__ == "__main__":
    main()
