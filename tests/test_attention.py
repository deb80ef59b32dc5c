"""Attention where the devices are TPUs, which are CPUs here that run JAX's kernel by
XLA's operations, or GPUs, with a kernel that nobody can look into: the numbers of Keras
on one CPU, whatever the program.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from keras import layers

from keras_distribute._compat import attention as compat
from keras_distribute._compat.building import seen_as
from keras_distribute._compat.names import jax_nn
from keras_distribute.devices.by_rows import values
from keras_distribute.training import attention
from tests.support import assert_close, mirrored, numbers_of

pytestmark = pytest.mark.timeout(200)
RNG = np.random.default_rng(0)
X = RNG.standard_normal((37, 128, 8)).astype("float32")
Y = RNG.integers(0, 3, 37)
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


class MixesRows(keras.Layer):
    """Runs the step over the global batch."""

    def call(self, inputs: Any) -> Any:
        return inputs + 0.1 * keras.ops.flip(inputs, axis=0)


def model_of(*, causal: bool = False, mixes: bool = False) -> keras.Model:
    keras.utils.set_random_seed(1)
    inputs = keras.Input(X.shape[1:])
    x = layers.MultiHeadAttention(2, 16)(inputs, inputs, use_causal_mask=causal)
    x = layers.GlobalAveragePooling1D()(layers.LayerNormalization()(x + inputs))
    x = MixesRows()(x) if mixes else x
    model = keras.Model(inputs, layers.Dense(3)(x))
    model.compile(keras.optimizers.SGD(0.5), LOSS)
    return model


@functools.cache
def of_one_device(**options: bool) -> list[Any]:
    return numbers_of(model_of(**options), X, Y)


class Kernels:
    """Which arrays were given to the kernel, each as often as it was traced."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.given: list[tuple[int, ...]] = []
        kernel = compat.splash_attention

        def counted(query: Any, *args: Any, **options: Any) -> Any:
            self.given.append(query.shape)
            return kernel(query, *args, **options)

        monkeypatch.setattr(compat, "splash_attention", counted)
        monkeypatch.setattr(attention, "_is_of_tpus", lambda mesh: True)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """From here on the devices count as TPUs."""
    return Kernels(monkeypatch)


STRATEGIES = {
    "1 replica": lambda: mirrored(1),
    "2 replicas": lambda: mirrored(2),
    "4 replicas": lambda: mirrored(4),
    "8 replicas": lambda: mirrored(8),
    "weights divided": lambda: mirrored(4, shard_variables=True, min_shard_bytes=1),
    "slots divided": lambda: mirrored(4, shard_optimizer_state=True),
    "the same bits": lambda: mirrored(4, deterministic=True),
}


@pytest.mark.sampled(7)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("make", STRATEGIES.values(), ids=STRATEGIES)
def test_steps_have_the_numbers_of_one_device(
    make: Any, causal: bool, kernels: Kernels
) -> None:
    expected = of_one_device(causal=causal)
    with make().scope():
        model = model_of(causal=causal)
    assert_close(numbers_of(model, X, Y), expected)
    assert kernels.given  # By the kernel.


@pytest.mark.sampled(2)
@pytest.mark.parametrize("replicas", [2, 4])
def test_a_step_over_the_global_batch_maps_the_kernel(
    replicas: int, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of the tail that do not divide are filled up."""
    monkeypatch.setattr(values, "SMALL", 0)  # Nothing is gathered.
    expected = of_one_device(mixes=True)
    strategy = mirrored(replicas)
    with strategy.scope():
        model = model_of(mixes=True)
    assert_close(numbers_of(model, X, Y), expected)
    assert "mixes rows" in str(strategy.summary(model))
    assert (16 // replicas, 2, 128, 16) in kernels.given
    assert (-(-5 // replicas), 2, 128, 16) in kernels.given


def test_the_step_stays_local(kernels: Kernels) -> None:
    """The kernel treats each row alone, which the program of one replica knows."""
    strategy = mirrored(4)
    with strategy.scope():
        model = model_of()
    model.fit(X[:32], Y[:32], batch_size=16, verbose=0)
    assert "gradients of each replica's rows" in str(strategy.summary(model))
    assert kernels.given


def test_accumulated_gradients(kernels: Kernels) -> None:
    def accumulating() -> keras.Model:
        model = model_of()
        optimizer = keras.optimizers.SGD(0.5, gradient_accumulation_steps=2)
        model.compile(optimizer, LOSS)
        return model

    with mirrored(4).scope():
        model = accumulating()
    actual = numbers_of(model, X, Y)
    assert kernels.given
    kernels.given.clear()
    assert_close(actual, numbers_of(accumulating(), X, Y))
    assert not kernels.given  # Plain Keras was left alone.


def test_custom_loops(kernels: Kernels) -> None:
    strategy = mirrored(4)
    with strategy.scope():
        model = model_of(causal=True)
    rows = strategy.experimental_distribute_values_from_function(
        lambda replica: X[4 * replica.replica_id_in_sync_group :][:4]
    )
    outputs = strategy.gather(strategy.run(model, args=(rows,)), axis=0)
    assert set(kernels.given) == {(4, 2, 128, 16)}
    np.testing.assert_allclose(outputs, model_of(causal=True)(X[:16]), atol=2e-6)


def of_step(*arrays: Any, attend: Any = None, **options: Any) -> Any:
    """`keras.ops.dot_product_attention`, in a prediction of a model."""
    own = attend or (lambda given: keras.ops.dot_product_attention(*given, **options))
    with mirrored(2).scope():
        inputs = [keras.Input(batch_shape=array.shape) for array in arrays]
        layer = layers.Lambda(own, output_shape=arrays[0].shape[1:])
        model = keras.Model(inputs, layer(inputs))
    return model.predict(list(arrays), batch_size=4, verbose=0)


def arrays_of(length: int = 128, keys: int = 128, heads: int = 2, of_keys: int = 2):
    shapes = (4, length, heads, 16), (4, keys, of_keys, 16), (4, keys, of_keys, 16)
    return [RNG.standard_normal(shape).astype("float32") for shape in shapes]


def test_shapes_and_scales_of_the_kernel(kernels: Kernels) -> None:
    cases: list[tuple[dict[str, int], dict[str, Any]]] = [
        ({}, {"scale": 0.7}),
        ({"length": 384, "keys": 384}, {"is_causal": True}),
        ({"length": 512, "keys": 256}, {}),
        ({"heads": 4}, {}),
    ]
    for shapes, options in cases:
        kernels.given.clear()
        arrays = arrays_of(**shapes)
        expected = keras.ops.dot_product_attention(*arrays, **options)
        np.testing.assert_allclose(of_step(*arrays, **options), expected, atol=1e-5)
        assert kernels.given, shapes


@pytest.mark.parametrize("kind", ["kernel", "length", "mask", "causal", "heads"])
def test_logits_kept_below_a_cap(kind: str, kernels: Kernels) -> None:
    """Also where the kernel does not fit: there Keras leaves the cap away."""
    heads = 4 if kind == "heads" else 2
    query, key, value = arrays_of(100 if kind == "length" else 128, heads=heads)
    mask = np.tile(np.arange(128) < 100, (4, 1, 128, 1)) if kind == "mask" else None
    of_heads = [np.repeat(a, heads // 2, axis=2) for a in (key, value)]
    logits = np.einsum("btnh,bsnh->bnts", query, of_heads[0]) / math.sqrt(16)
    capped = 0.5 * np.tanh(logits / 0.5)
    if kind == "causal":
        capped = np.where(np.tri(128, dtype=bool), capped, -np.inf)
    weights = jax.nn.softmax(capped if mask is None else np.where(mask, capped, -1e9))
    expected = np.einsum("bnts,bsnh->btnh", weights, of_heads[1])

    def attend(arrays: Any) -> Any:
        # `keras.ops` refuses a cap where JAX has no TPU.
        options = {"mask": mask, "is_causal": kind == "causal"}
        return jax_nn.dot_product_attention(
            *arrays, attn_logits_soft_cap=0.5, **options
        )

    found = of_step(query, key, value, attend=attend)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert bool(kernels.given) == (kind in ("kernel", "causal", "heads"))


@pytest.mark.parametrize("reason", ["mask", "length", "asked", "old"])
def test_where_the_kernel_does_not_fit(
    reason: str, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """XLA's operations give the numbers."""
    arrays, options = arrays_of(100 if reason == "length" else 128), dict[str, Any]()
    if reason == "mask":
        options["mask"] = np.tile(np.arange(128) < 100, (4, 1, 128, 1))
    elif reason == "asked":
        options["flash_attention"] = False
    elif reason == "old":
        monkeypatch.setattr(attention, "_WITHOUT", ("cpu",))
    expected = keras.ops.dot_product_attention(*arrays, **options)
    np.testing.assert_allclose(of_step(*arrays, **options), expected, atol=1e-5)
    assert not kernels.given


def test_several_logical_devices_take_xla_operations(kernels: Kernels) -> None:
    expected = of_one_device(causal=False)
    strategy = mirrored(4, num_logical_devices=2)
    with strategy.scope():
        model = model_of()
    assert_close(numbers_of(model, X, Y), expected)
    assert not kernels.given


@pytest.fixture
def cudnn(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """From here on the devices count as GPUs, with an attention of which cannot be seen
    that it treats each row alone; the shapes of queries that are given to it.
    """
    given: list[tuple[int, ...]] = []
    of_rows = attention.of_rows

    def noted(mesh: Any, original: Any, arrays: Any, has_rows: Any) -> Any:
        def kernel(query: Any, *others: Any) -> Any:
            given.append(query.shape)
            return original(query, *others) + 0 * jnp.sort(query, 0)

        return of_rows(mesh, kernel, arrays, has_rows)

    monkeypatch.setattr(attention, "is_of_gpus", lambda mesh: True)
    monkeypatch.setattr(attention, "of_rows", noted)
    monkeypatch.setattr(values, "SMALL", 0)  # Nothing is gathered.
    return given


@pytest.mark.sampled(7)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("make", STRATEGIES.values(), ids=STRATEGIES)
def test_steps_on_gpus_have_the_numbers_of_one_device(
    make: Any, causal: bool, cudnn: list[Any]
) -> None:
    expected = of_one_device(causal=causal)
    with make().scope():
        model = model_of(causal=causal)
    assert_close(numbers_of(model, X, Y), expected)
    assert cudnn


@pytest.mark.parametrize("options", [{}, {"shard_variables": True}], ids=str)
def test_the_step_stays_local_on_gpus(options: Any, cudnn: list[Any]) -> None:
    strategy = mirrored(4, **options)
    with strategy.scope():
        model = model_of(causal=True)
    model.fit(X[:32], Y[:32], batch_size=16, verbose=0)
    assert "mixes rows" not in str(strategy.summary(model))
    assert set(cudnn) >= {(4, 128, 2, 16)}


@pytest.mark.parametrize("kind", ["each row", "all rows", "bias"])
def test_masks_and_a_bias_on_gpus(kind: str, cudnn: list[Any]) -> None:
    arrays, options = arrays_of(24, 24), dict[str, Any]()
    rows = 1 if kind == "all rows" else arrays[0].shape[0]
    name = "bias" if kind == "bias" else "mask"
    drawn = np.random.default_rng(0).normal(size=(rows, 1, 24, 24))
    options[name] = drawn.astype("float32") if kind == "bias" else drawn > -1
    expected = keras.ops.dot_product_attention(*arrays, **options)
    np.testing.assert_allclose(of_step(*arrays, **options), expected, atol=1e-5)
    assert bool(cudnn) == (kind != "bias")  # That is Keras's, of all rows.


def test_what_keras_computes_on_a_tpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why its attention is replaced there: it does not scale the logits, and nobody
    sees what comes later. When this fails, Keras may have been mended.
    """

    class Tpu:
        platform, device_kind = "tpu", "TPU v5 lite"

    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel as kernels,
    )

    interpreted = functools.partial(kernels.make_splash_mha, interpret=True)
    monkeypatch.setattr(kernels, "make_splash_mha", interpreted)
    arrays = list(map(jnp.asarray, arrays_of()))
    scale = 1 / math.sqrt(16)
    with seen_as([Tpu()]):
        found = jax_nn.dot_product_attention(*arrays, scale=scale)
    right = keras.ops.dot_product_attention(*arrays, scale=scale)
    wrong = keras.ops.dot_product_attention(*arrays, scale=1.0, is_causal=True)
    assert np.abs(found - right).max() > 0.1
    np.testing.assert_allclose(found, wrong, atol=1e-5)
