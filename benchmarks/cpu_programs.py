"""Matrix products, convolutions and pooling that are written otherwise on CPUs, beside
what XLA makes of them; and a model of many.

    # Writes results/cpu_programs.md and .json:
    python benchmarks/cpu_programs.py
    # Quicker and rougher, and writes nothing:
    python benchmarks/cpu_programs.py --rounds 3 --dry

Both forms of an operation are in one process and take turns. The gradient of a product
is in an update of the weights, so that how its result lies in memory is the same.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
)

import jax
import jax.numpy as jnp
import keras
import numpy as np
import report
from jax import lax

import keras_distribute as kd
from keras_distribute.devices import on_cpus
from keras_distribute.devices.rewriting import rewritten

SECONDS = 0.05  # Of calls between two looks at the clock.
MODEL_ROWS, MODEL_STEPS, MODEL_SIZE = 64, 2, 96


class Case(NamedTuple):
    title: str
    function: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]


def updated(weights: Any, inputs: Any, back: Any) -> Any:
    """Weights after the gradient of a dense layer between two activations."""
    rows = tuple(range(inputs.ndim - 1))
    sums = ((rows, rows), ((), ()))
    product = lax.dot_general(jnp.tanh(back), jnp.tanh(inputs), sums)
    return weights - 0.1 * product.T


def convolution(stride: int, groups: int = 1) -> Callable[[Any, Any], Any]:
    def convolved(images: Any, kernel: Any) -> Any:
        return lax.conv_general_dilated(
            images,
            kernel,
            (stride, stride),
            "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=groups,
        )

    return convolved


def pooled(images: Any, _: Any, taps: int, padding: str) -> Any:
    return lax.reduce_window(
        images, -np.inf, lax.max, (1, taps, taps, 1), (1, 2, 2, 1), padding
    )


def gradient_of(
    place: int, function: Callable[[Any, Any], Any]
) -> Callable[[Any, Any, Any], Any]:
    """The gradient of the images (0) or of the kernel (1), from what comes back."""

    def gradient(images: Any, kernel: Any, back: Any) -> Any:
        return jax.vjp(function, images, kernel)[1](back)[place]

    return gradient


def cases() -> Iterator[Case]:
    for rows, inputs, outputs in [
        ((16, 32), 64, 128),
        ((16, 32), 256, 1024),
        ((16, 32), 64, 2000),
        ((8, 8), 256, 1024),
        ((64,), 512, 10),
        ((256,), 2048, 10),
    ]:
        title = f"dense {inputs} to {outputs}, {' × '.join(map(str, rows))} rows"
        shapes = ((inputs, outputs), (*rows, inputs), (*rows, outputs))
        yield Case(f"{title}: weights", updated, shapes)
    for rows, size, inputs, outputs in [
        (32, 32, 16, 32),
        (32, 16, 32, 32),
        (128, 32, 16, 32),
    ]:
        title = f"convolution 3 × 3, stride 2, {inputs} to {outputs}, "
        image, back = (rows, size, size), (rows, size // 2, size // 2, outputs)
        shapes = ((*image, inputs), (3, 3, inputs, outputs), back)
        title += f"{' × '.join(map(str, image))}: inputs"
        yield Case(title, gradient_of(0, convolution(2)), shapes)
    for rows, size, channels, taps, padding in [
        (32, 32, 32, 2, "VALID"),
        (16, 57, 64, 3, "VALID"),
        (16, 56, 64, 3, "SAME"),
    ]:
        images, out = (rows, size, size, channels), size // 2
        shapes = (images, (), (rows, out, out, channels))
        title = f"max pooling {taps} × {taps}, stride 2, {padding.lower()} padding, "
        title += f"{' × '.join(map(str, images))}: inputs"
        pooling = functools.partial(pooled, taps=taps, padding=padding)
        yield Case(title, gradient_of(0, pooling), shapes)
    for rows, size, inputs, outputs, groups in [
        (4, 14, 128, 128, 32),
        (8, 28, 48, 48, 2),
        (4, 28, 32, 64, 32),
    ]:
        title = f"convolution 3 × 3, {groups} groups, {inputs} to {outputs}, "
        title += f"{rows} × {size} × {size}"
        function, images = convolution(1, groups), (rows, size, size, inputs)
        kernel, back = (3, 3, inputs // groups, outputs), (rows, size, size, outputs)
        yield from with_gradients(title, function, images, kernel, back)
    for rows, size, channels, stride, taps in [
        (8, 112, 32, 1, 3),
        (8, 56, 96, 2, 3),
        (8, 28, 144, 1, 3),
        (16, 14, 384, 2, 5),
        (8, 56, 96, 1, 7),
    ]:
        title = f"depthwise {taps} × {taps}, stride {stride}, "
        title += f"{rows} × {size} × {size} × {channels}"
        function = convolution(stride, channels)
        images, kernel = (rows, size, size, channels), (taps, taps, 1, channels)
        back = (rows, size // stride, size // stride, channels)
        yield from with_gradients(title, function, images, kernel, back)


def with_gradients(
    title: str, function: Callable[[Any, Any], Any], *shapes: tuple[int, ...]
) -> Iterator[Case]:
    """A function of images and a kernel, and its gradients, from their shapes and that
    of the result.
    """
    yield Case(title, function, shapes[:2])
    for place, what in enumerate(("inputs", "kernel")):
        yield Case(f"{title}: {what}", gradient_of(place, function), shapes)


def measured(case: Case, rounds: int) -> dict[str, list[float]]:
    """Milliseconds, and those of the processors, of both forms."""
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.normal(size=s), "float32") for s in case.shapes]
    again = rewritten(case.function, on_cpus.OF_ONE_DEVICE)
    forms = {"XLA": jax.jit(case.function), "here": jax.jit(again)}
    results = [form(*arrays) for form in forms.values()]
    np.testing.assert_allclose(*results, rtol=1e-2, atol=1e-2)
    started = time.perf_counter()
    jax.block_until_ready(forms["XLA"](*arrays))
    calls = max(1, round(SECONDS / (time.perf_counter() - started)))
    found: dict[str, list[float]] = {}
    for _ in range(rounds):
        for name, form in forms.items():
            started, used = time.perf_counter(), time.process_time()
            for _ in range(calls):
                result = form(*arrays)
            jax.block_until_ready(result)
            seconds = time.perf_counter() - started, time.process_time() - used
            for what, value in zip((name, f"{name}, CPU"), seconds, strict=True):
                found.setdefault(what, []).append(1e3 * value / calls)
    return found


def models(rounds: int) -> dict[str, list[float]]:
    """Milliseconds of a step of MobileNetV2 in `fit`."""
    strategies = {
        "Keras, one device": kd.get_strategy(),
        "keras_distribute, one device": kd.MirroredStrategy(["cpu:0"]),
        "keras_distribute, 4 devices": kd.MirroredStrategy(),
    }
    rows = MODEL_ROWS * MODEL_STEPS
    x = np.random.default_rng(0).random((rows, MODEL_SIZE, MODEL_SIZE, 3), "float32")
    y = np.arange(rows) % 10
    built = {}
    for name, strategy in strategies.items():
        with strategy.scope():
            keras.utils.set_random_seed(0)
            model = keras.applications.MobileNetV2(
                x.shape[1:], alpha=0.35, weights=None, classes=10
            )
            model.compile("sgd", "sparse_categorical_crossentropy")
        model.fit(x, y, batch_size=MODEL_ROWS, verbose=0)
        built[name] = model
    found: dict[str, list[float]] = {name: [] for name in built}
    for _ in range(rounds):
        for name, model in built.items():
            started = time.perf_counter()
            model.fit(x, y, batch_size=MODEL_ROWS, verbose=0)
            found[name].append(1e3 * (time.perf_counter() - started) / MODEL_STEPS)
    return found


def ratio(above: list[float], below: list[float]) -> str:
    each = (a / b for a, b in zip(above, below, strict=True))
    return f"{statistics.median(each):.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--dry", action="store_true")
    arguments = parser.parse_args()
    facts = {case.title: measured(case, arguments.rounds) for case in cases()}
    rows = [
        [
            title,
            f"{statistics.median(found['XLA']):.2f}",
            f"{statistics.median(found['here']):.2f}",
            ratio(found["here"], found["XLA"]),
            ratio(found["here, CPU"], found["XLA, CPU"]),
        ]
        for title, found in facts.items()
    ]
    header = ["", "ms, as JAX has it", "ms, here", "ratio", "processors' ratio"]
    text = report.table(header, rows, "lrrrr")
    whole = models(arguments.rounds)
    facts["MobileNetV2"] = whole
    base = next(iter(whole.values()))
    rows = [
        [name, f"{statistics.median(found):.0f}", ratio(found, base)]
        for name, found in whole.items()
    ]
    title = f"MobileNetV2, width 0.35, {MODEL_SIZE} × {MODEL_SIZE}, {MODEL_ROWS} rows"
    text += "\n\n" + report.table([title, "ms a step", "ratio"], rows, "lrr")
    if arguments.dry:
        print(text)
    else:
        report.write("cpu_programs", facts, text)


if __name__ == "__main__":
    main()
