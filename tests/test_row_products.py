"""Gradients of dense layers in the form that XLA for CPUs makes quickly."""

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
from keras_distribute.devices import jaxprs, row_products
from keras_distribute.devices.rewriting import rewritten
from tests.support import (
    assert_close,
    assert_the_same_bits_in_series,
    mirrored,
    mirrored_or_default,
    numbers_of,
    traced_programs,
)


def is_of_several_dimensions(eqn: Any) -> bool:
    return row_products._is_of_rows(eqn) and eqn.invars[0].aval.ndim > 2


def is_kept(eqn: Any) -> bool:
    return eqn.primitive.name == "optimization_barrier"


def product(left: Any, right: Any) -> Any:
    rows = tuple(range(left.ndim - 1))
    return lax.dot_general(left, right, ((rows, rows), ((), ())))


def drawn(seed: int, shape: tuple[int, ...], dtype: str = "float32") -> Any:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "barrier"),
    [
        ((4, 8), 40, 20, False),
        ((4, 8), 10, 64, True),
        ((2, 3, 4), 10, 64, False),  # Of few rows.
        ((2, 4, 4), 10, 16, False),  # Of few inputs.
        ((4, 8), 1, 64, False),  # Of a matrix and a vector.
        ((32,), 10, 32, True),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_rows_are_one_dimension(
    rows: tuple[int, ...], outputs: int, inputs: int, barrier: bool, dtype: str
) -> None:
    with jax.enable_x64(dtype == "float64"):
        left = drawn(0, (*rows, outputs), dtype)
        right = drawn(1, (*rows, inputs), dtype)
        again = rewritten(product, [row_products.IN_ONE_DIMENSION])
        program = jax.make_jaxpr(again)(left, right)
        assert not jaxprs.has(program, is_of_several_dimensions)
        assert jaxprs.has(program, is_kept) is barrier
        found, expected = jax.jit(again)(left, right), jax.jit(product)(left, right)
        assert found.dtype == expected.dtype == dtype
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("spec", "dtype"),
    [
        ("ijk,ijl->ikl", "float32"),  # A product for each of a batch.
        ("ijk,lmk->ijlm", "float32"),  # Forward.
        ("ijk,jil->kl", "float32"),  # Rows in another order.
        ("ijk,ijl->kl", "bfloat16"),
        ("ijk,ijl->kl", "float16"),
        ("ik,il->kl", "float32"),  # Rows in one dimension.
    ],
)
def test_what_is_left_alone(spec: str, dtype: str) -> None:
    shapes = [(4,) * len(letters) for letters in spec.split("->")[0].split(",")]
    arrays = [drawn(seed, shape, dtype) for seed, shape in enumerate(shapes)]
    program = jax.make_jaxpr(lambda *given: jnp.einsum(spec, *given))(*arrays)
    assert row_products.IN_ONE_DIMENSION.applied(program) is program


def test_precision_and_dtype_are_kept() -> None:
    def precise(left: Any, right: Any) -> Any:
        return lax.dot_general(
            left,
            right,
            (((0, 1), (0, 1)), ((), ())),
            precision=lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        )

    again = rewritten(precise, [row_products.IN_ONE_DIMENSION])
    eqns = jax.make_jaxpr(again)(drawn(0, (2, 3, 4)), drawn(1, (2, 3, 5))).jaxpr.eqns
    (found,) = [eqn for eqn in eqns if eqn.primitive.name == "dot_general"]
    assert found.params["precision"] == (lax.Precision.HIGHEST,) * 2
    assert found.params["preferred_element_type"] == jnp.float32


def test_xla_still_copies_what_it_multiplies() -> None:
    """Else `row_products.py` can go."""

    def update(weights: Any, inputs: Any, back: Any) -> Any:
        return weights - product(jnp.tanh(back), jnp.tanh(inputs)).T

    arrays = drawn(0, (64, 48)), drawn(1, (8, 16, 64)), drawn(2, (8, 16, 48))

    def text(function: Any) -> str:
        return jax.jit(function).lower(*arrays).compile().as_text()

    copied = "lhs_contracting_dims={0}, rhs_contracting_dims={1}"
    assert copied in text(update)
    assert copied not in text(rewritten(update, [row_products.IN_ONE_DIMENSION]))


def model_of(strategy: kd.Strategy) -> keras.Model:
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((6, 3)),
                layers.Dense(32, activation="relu"),
                layers.Dense(5),
                layers.Flatten(),
                layers.Dense(32),
                layers.Dense(4),
            ]
        )
        model.compile("sgd", "mse")
    return model


X, Y = drawn(0, (80, 6, 3)), drawn(1, (80, 4))


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_fit_has_fast_products_alone(
    replicas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = traced_programs(monkeypatch)
    model = model_of(mirrored(replicas))
    model.fit(X, Y, batch_size=64, epochs=1, verbose=0)
    assert programs
    for program in programs:
        assert jaxprs.has(program, row_products._is_of_rows)
        assert not jaxprs.has(program, is_of_several_dimensions)


@pytest.mark.parametrize("replicas", [1, 2, 4, 8])
def test_numbers_are_those_of_one_device(replicas: int) -> None:
    expected = numbers_of(model_of(mirrored_or_default(0)), X, Y)
    assert_close(numbers_of(model_of(mirrored(replicas)), X, Y), expected)


def test_replicas_in_series() -> None:
    assert_the_same_bits_in_series(model_of, X, Y, batch_size=64)
