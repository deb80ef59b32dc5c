"""LSTMs where the devices are GPUs, with a stand-in for cuDNN's on CPUs, of which
cannot be seen that it treats each row alone: the numbers of Keras on one CPU.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from jax.experimental import rnn
from keras import layers

from keras_distribute.devices.by_rows import values
from keras_distribute.training import recurrent
from tests.logical import tpu_strategy
from tests.support import mirrored, numbers_of

# The package has a function of this name.
keras_rnn = importlib.import_module("keras.src.backend.jax.rnn")
pytestmark = pytest.mark.timeout(200)
RNG = np.random.default_rng(0)
X = RNG.standard_normal((37, 10, 8)).astype("float32")
Y = RNG.integers(0, 3, 37)


def model_of(kind: str) -> keras.Model:
    keras.utils.set_random_seed(1)
    # As many units as a batch has rows: sizes do not say what has rows.
    first = layers.LSTM(16, return_sequences=True, go_backwards=kind == "backwards")
    if kind == "bidirectional":
        first = layers.Bidirectional(first)
    model = keras.Sequential([keras.Input(X.shape[1:]), first, layers.LSTM(16)])
    model.add(layers.Dense(3))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.5), loss)
    return model


@functools.cache
def of_one_device(kind: str) -> list[Any]:
    """By the stand-in: for `go_backwards`, cuDNN's sequences are in the other order
    than those that Keras 3.15 computes without it.
    """
    return numbers_of(model_of(kind), X, Y)


@pytest.fixture
def cudnn(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """From here on the devices count as GPUs; how many rows the kernel was given."""
    given: list[int] = []

    def kernel(
        x: Any, h_0: Any, c_0: Any, weights: Any, lengths: Any, **options: Any
    ) -> Any:
        given.append(x.shape[0])
        sizes = {key: options[key] for key in options if key != "dropout"}
        apart = rnn.unpack_lstm_weights(weights, **sizes)
        found = rnn.lstm_ref(x, h_0, c_0, *apart, lengths, **options)
        return jax.tree.map(lambda each: each + 0 * jnp.sort(each, 0), found)

    monkeypatch.setattr(rnn, "lstm", functools.partial(recurrent.lstm, kernel))
    monkeypatch.setattr(recurrent, "is_of_gpus", lambda mesh: True)
    monkeypatch.setattr(keras_rnn, "_is_gpu_available", lambda: True)
    monkeypatch.setattr(values, "SMALL", 0)  # Nothing is gathered.
    return given


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "options", [{}, {"shard_variables": True, "min_shard_bytes": 64}], ids=str
)
@pytest.mark.parametrize("kind", ["forwards", "backwards", "bidirectional"])
def test_the_numbers_of_one_device_by_local_steps(
    kind: str, options: Any, cudnn: list[int]
) -> None:
    expected = of_one_device(kind)
    cudnn.clear()
    strategy = mirrored(4, **options)
    with strategy.scope():
        model = model_of(kind)
    for found, wanted in zip(numbers_of(model, X, Y), expected, strict=True):
        np.testing.assert_allclose(found, wanted, atol=2e-5)
    assert "mixes rows" not in str(strategy.summary(model))
    # Of batches of 16 rows, and of 5; 16 where the model is built, of no numbers.
    assert set(cudnn) == {16, 4, 2}


def test_16_bits_do_without_it(cudnn: list[int]) -> None:
    """JAX 0.12 would raise an error when it compiles the step."""
    keras.mixed_precision.set_dtype_policy("mixed_bfloat16")
    try:
        with mirrored(2).scope():
            model = model_of("bidirectional")
    finally:
        keras.mixed_precision.set_dtype_policy("float32")
    model.fit(X, Y, batch_size=16, verbose=0)
    assert not cudnn


def test_logical_devices_do_without_it(cudnn: list[int]) -> None:
    with tpu_strategy(2).scope():
        model = model_of("forwards")
    model.fit(X, Y, batch_size=16, verbose=0)
    assert not cudnn


def test_a_strategy_on_cpus_of_a_machine_with_gpus(
    cudnn: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recurrent, "is_of_gpus", lambda mesh: False)
    with mirrored(2).scope():
        model = model_of("forwards")
    model.fit(X, Y, batch_size=16, verbose=0)
    assert not cudnn
