"""A traced program as lines: the same for the same, wherever and whenever it was traced."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

from keras_distribute.devices.listed import listed


def texts(function, *args):
    return [line.text for line in listed(jax.make_jaxpr(function)(*args))]


def make_loss(rate=0.5, weights=(1.0, 2.0), *, prints=False, axis=0):
    @jax.custom_jvp
    def squared(x):
        return x * x

    squared.defjvp(lambda x, t: (squared(x[0]), 2 * x[0] * t[0]))

    def loss(x):
        layer = keras.layers.Activation(lambda x: x * np.asarray(weights))
        if prints:
            jax.debug.print("{}", jnp.max(x) + 1)

        def turn(carry, row):
            if prints:
                jax.debug.callback(lambda row: None, jnp.min(row))
            return carry + squared(row), row.max()

        sums, _ = jax.lax.scan(turn, jnp.zeros(2), layer(x) * rate)
        return jax.nn.relu(sums).sum(axis) + jax.random.uniform(jax.random.key(3))

    return jax.value_and_grad(loss)


X = np.ones((3, 2), "float32")


def test_the_same_is_listed_alike():
    """Functions, layers and their names are new each time."""
    expected = texts(make_loss(), X)
    assert texts(make_loss(), X) == expected
    assert not any("0x" in text for text in expected)
    assert any(str(line.layer) for line in listed(jax.make_jaxpr(make_loss())(X)))


def test_what_only_prints_is_left_out():
    assert texts(make_loss(prints=True), X) == texts(make_loss(), X)


def test_what_asks_the_host_is_not():
    def asks(x):
        jax.experimental.io_callback(lambda x: None, None, x + 1)
        return x

    assert texts(asks, X) != texts(lambda x: x, X)


@pytest.mark.parametrize(
    "other", [{"rate": 0.25}, {"weights": (1.0, 3.0)}, {"axis": (0,)}]
)
def test_what_differs_is_listed_otherwise(other):
    same = other == {"axis": (0,)}
    assert (texts(make_loss(**other), X) == texts(make_loss(), X)) is same


@pytest.mark.parametrize(
    "x", [X[:2], X.astype("int32"), X.astype("float16"), X[:, :, None]]
)
def test_another_argument_is_listed_otherwise(x):
    def doubled(x):
        return x + x

    assert texts(doubled, x) != texts(doubled, X)
