"""Convolutions and pooling that are written otherwise on CPUs, against JAX's own."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from jax import lax
from keras import layers

import keras_distribute as kd
from keras_distribute.devices import (
    depthwise,
    dilated_inputs,
    grouped,
    jaxprs,
    on_cpus,
    pool_gradients,
)
from keras_distribute.devices.convolutions import is_convolution
from keras_distribute.devices.rewriting import rewritten
from tests.support import (
    assert_close,
    assert_the_same_bits_in_series,
    mirrored,
    mirrored_or_default,
    numbers_of,
    traced_programs,
)

DEPTHWISE = (depthwise.IN_ONE_LOOP, depthwise.KERNELS_BY_ROWS)


class Drawn:
    """A convolution drawn at random, with its inputs."""

    def __init__(self, seed: int, channels: int, taps: tuple[int, int]) -> None:
        self.rng = np.random.default_rng(seed)
        self.rank = int(self.rng.integers(1, 4))
        space = "DHW"[3 - self.rank :]
        self.is_last = bool(self.rng.random() < 0.5)
        self.dims = (
            (f"N{space}C", f"{space}IO", f"N{space}C")
            if self.is_last
            else (f"NC{space}", f"OI{space}", f"NC{space}")
        )
        self.channels = channels
        self.taps = self.whole(*taps)
        self.sizes = self.whole(3, 8)
        self.padding = [tuple(self.rng.integers(-1, 3, 2)) for _ in self.sizes]

    def whole(self, least: int, end: int) -> list[int]:
        return [int(n) for n in self.rng.integers(least, end, self.rank)]

    def array(self, first: int, last: int, space: list[int], is_kernel: bool) -> Any:
        if is_kernel:
            shape = [*space, first, last] if self.is_last else [last, first, *space]
        else:
            shape = [first, *space, last] if self.is_last else [first, last, *space]
        return jnp.asarray(self.rng.normal(size=shape), "float32")

    def convolved(self, array: Any, kernel: Any, **options: Any) -> Any:
        given = {"window_strides": [1] * self.rank, "padding": self.padding, **options}
        return lax.conv_general_dilated(
            array, kernel, dimension_numbers=self.dims, **given
        )


def assert_equal_to_jax(function: Any, rewritings: Any, *arrays: Any) -> None:
    again = rewritten(function, rewritings)
    program = jax.make_jaxpr(again)(*arrays)
    assert not any(each.is_in(program) for each in rewritings)
    expected, found = jax.jit(function)(*arrays), jax.jit(again)(*arrays)
    jax.tree.map(assert_alike, found, expected)


def assert_alike(found: Any, expected: Any) -> None:
    assert found.dtype == expected.dtype
    error = 1e-2 if found.dtype == jnp.bfloat16 else 1e-4
    np.testing.assert_allclose(
        found.astype("float32"), expected.astype("float32"), rtol=error, atol=error
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("seed", range(24))
def test_inputs_with_zeros_between(seed: int, dtype: str) -> None:
    drawn = Drawn(seed, 16, (3, 5))
    dilations = [2, *drawn.whole(1, 3)][: drawn.rank]
    array = drawn.array(2, 4, [size + 2 for size in drawn.sizes], False).astype(dtype)
    kernel = drawn.array(4, 16, drawn.taps, True).astype(dtype)

    def function(array: Any, kernel: Any) -> Any:
        return drawn.convolved(array, kernel, lhs_dilation=dilations)

    assert dilated_inputs.IN_PARTS.is_in(jax.make_jaxpr(function)(array, kernel))
    assert_equal_to_jax(function, [dilated_inputs.IN_PARTS], array, kernel)


@pytest.mark.parametrize("seed", range(24))
def test_depthwise(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(depthwise, "_LEAST_ROW", 1)
    drawn = Drawn(seed, 3, (1, 4))
    options = {"window_strides": drawn.whole(1, 4), "rhs_dilation": drawn.whole(1, 3)}
    array = drawn.array(2, 3, [size + 4 for size in drawn.sizes], False)
    kernel = drawn.array(1, 3, drawn.taps, True)

    def forward(array: Any, kernel: Any) -> Any:
        return drawn.convolved(array, kernel, feature_group_count=3, **options)

    def function(array: Any, kernel: Any) -> Any:
        result, gradients = jax.vjp(forward, array, kernel)
        return result, gradients(jnp.cos(result))

    program = jax.make_jaxpr(function)(array, kernel)
    assert all(each.is_in(program) for each in DEPTHWISE)
    assert_equal_to_jax(function, DEPTHWISE, array, kernel)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("seed", range(24))
def test_groups(seed: int, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one channel and of several, one by one and some together."""
    rng = np.random.default_rng(seed)
    count = int(rng.choice([2, 3, 4, 6]))
    own, made = [(1, 2), (2, 1), (1, 3), (2, 3), (3, 2), (5, 5)][seed % 6]
    monkeypatch.setattr(grouped, "_CHANNELS", int(rng.choice([2, 4, 12])))
    monkeypatch.setattr(grouped, "_MOST_EACH", 2)
    drawn = Drawn(seed, count * made, (1, 4))
    options = {"window_strides": drawn.whole(1, 3), "rhs_dilation": drawn.whole(1, 3)}
    space = [size + 4 for size in drawn.sizes]
    drawn.padding = [(max(first, 0), last) for first, last in drawn.padding]
    array = drawn.array(2, count * own, space, False).astype(dtype)
    kernel = drawn.array(own, count * made, drawn.taps, True).astype(dtype)

    def forward(array: Any, kernel: Any) -> Any:
        return drawn.convolved(array, kernel, feature_group_count=count, **options)

    def function(array: Any, kernel: Any) -> Any:
        result, gradients = jax.vjp(forward, array, kernel)
        return result, gradients(jnp.cos(result))

    program = jax.make_jaxpr(function)(array, kernel)
    assert grouped.APART.is_in(program)
    assert_equal_to_jax(function, [grouped.APART], array, kernel)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("seed", range(24))
def test_gradients_of_pooling(seed: int, dtype: str) -> None:
    """Also where several are the largest, some are no numbers, windows overlap or leave
    some out, and elements are added around: the same bits.
    """
    rng = np.random.default_rng(seed)
    rank = int(rng.integers(1, 4))
    window, strides = ((1, *rng.integers(1, 4, rank).tolist(), 1) for _ in range(2))
    shape = (2, *rng.integers(3, 9, rank).tolist(), 3)
    array = jnp.asarray(rng.integers(0, 4, shape), dtype)
    if seed % 2:
        array = array.at[0, ..., 0].set(jnp.nan)
        array = array.at[0, ..., 1].set(jnp.inf).at[1, ..., 1].set(-jnp.inf)
    reduction, first = [(lax.max, -np.inf), (lax.min, np.inf)][seed % 3 == 0]
    start = np.asarray(first, array.dtype)

    around = [tuple(rng.integers(0, 3, 2) if w > 1 else (0, 0)) for w in window]
    padding = "VALID" if seed % 4 == 0 else "SAME" if seed % 4 == 1 else around

    def pooled(array: Any) -> Any:
        return lax.reduce_window(array, start, reduction, window, strides, padding)

    def function(array: Any, back: Any) -> Any:
        return jax.vjp(pooled, array)[1](back)[0]

    back = jnp.asarray(rng.integers(-3, 4, pooled(array).shape), dtype)
    again = rewritten(function, [pool_gradients.BY_INDEX])
    assert pool_gradients.BY_INDEX.is_in(jax.make_jaxpr(function)(array, back))
    assert not pool_gradients.BY_INDEX.is_in(jax.make_jaxpr(again)(array, back))
    found, expected = jax.jit(again)(array, back), jax.jit(function)(array, back)
    np.testing.assert_array_equal(found, expected)


def strided(x: Any, k: Any, **options: Any) -> Any:
    return lax.conv_general_dilated(
        x, k, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), **options
    )


def gradients(x: Any, k: Any, **options: Any) -> Any:
    result, back = jax.vjp(lambda x, k: strided(x, k, **options), x, k)
    return back(result)


@pytest.mark.parametrize(
    ("image", "kernel", "groups", "dtype"),
    [
        ((2, 8, 8, 8), (3, 3, 8, 16), 1, "float32"),  # Few channels.
        ((2, 8, 8, 32), (3, 3, 32, 48), 1, "float32"),  # Many.
        ((2, 8, 8, 16), (2, 2, 16, 16), 1, "float32"),  # Few elements.
        ((2, 8, 8, 16), (3, 3, 1, 16), 16, "bfloat16"),
    ],
)
def test_what_is_left_alone(image: Any, kernel: Any, groups: int, dtype: str) -> None:
    arrays = jnp.ones(image, dtype), jnp.ones(kernel, dtype)
    program = jax.make_jaxpr(lambda x, k: gradients(x, k, feature_group_count=groups))(
        *arrays
    )
    assert not any(each.is_in(program) for each in on_cpus.OF_ONE_DEVICE)


@pytest.mark.parametrize("groups", [1, 16])
def test_results_of_another_dtype_are_left_alone(groups: int) -> None:
    with jax.enable_x64(True):
        image = jnp.ones((2, 8, 8, 16), "float32")
        kernel = jnp.ones((3, 3, 16 // groups, 16), "float32")
        program = jax.make_jaxpr(
            lambda x, k: lax.conv_general_dilated(
                x,
                k,
                (1, 1),
                [(1, 1), (1, 1)],
                lhs_dilation=(2, 2),
                dimension_numbers=("NHWC", "HWIO", "NHWC"),
                feature_group_count=groups,
                preferred_element_type="float64",
            )
        )(image, kernel)
    assert program.out_avals[0].dtype == "float64"
    assert not any(each.is_in(program) for each in on_cpus.OF_ONE_DEVICE)


def test_gradients_of_kernels_with_short_rows_are_left_alone() -> None:
    def function(x: Any, k: Any) -> Any:
        return gradients(x, k, feature_group_count=16)

    def program(width: int) -> Any:
        arrays = jnp.ones((2, 4, width, 16)), jnp.ones((3, 3, 1, 16))
        return jax.make_jaxpr(function)(*arrays)

    assert not depthwise.KERNELS_BY_ROWS.is_in(program(2 * 63))
    assert depthwise.KERNELS_BY_ROWS.is_in(program(2 * 64))


def model_of(strategy: kd.Strategy, fused: int = 1) -> keras.Model:
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((9, 9, 3)),
                layers.Conv2D(16, 3, padding="same", activation="relu"),
                layers.MaxPooling2D(3, 1),
                layers.Conv2D(32, 3, strides=2, padding="same", activation="relu"),
                layers.Conv2D(64, 3, groups=32, padding="same", activation="relu"),
                layers.DepthwiseConv2D(3, strides=2, activation="relu"),
                layers.DepthwiseConv2D(2, depth_multiplier=2, padding="same"),
                layers.Conv2DTranspose(16, 3, strides=2),
                layers.SeparableConv2D(8, 3, dilation_rate=2, padding="same"),
                layers.MaxPooling2D(2),
                layers.GlobalAveragePooling2D(),
                layers.Dense(4),
            ]
        )
        model.compile("sgd", "mse", steps_per_execution=fused)
    return model


X = np.random.default_rng(0).normal(size=(40, 9, 9, 3)).astype("float32")
Y = np.random.default_rng(1).normal(size=(40, 4)).astype("float32")


@pytest.mark.parametrize("replicas", [1, 2, 4, 8])
def test_models_have_the_numbers_of_one_device(
    replicas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(depthwise, "_LEAST_ROW", 1)
    programs = traced_programs(monkeypatch)
    expected = numbers_of(model_of(mirrored_or_default(0)), X, Y)
    before = len(programs)
    assert_close(numbers_of(model_of(mirrored(replicas)), X, Y), expected)
    steps = [p for p in programs[before:] if jaxprs.has(p, is_convolution)]
    assert steps
    for rewriting in on_cpus.OF_ONE_DEVICE:
        assert not any(jaxprs.has(each, rewriting.is_one) for each in steps)


def test_replicas_in_series() -> None:
    assert_the_same_bits_in_series(model_of, X, Y, batch_size=32)
