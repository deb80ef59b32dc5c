"""A buffer is taken apart into what was put into it, by kernels that parts of one shape
share.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from keras_distribute.training.steps import buffer_slices

SHAPES = [(3, 4), (), (5,), (3, 4), (2, 1, 2), (5,)] * 20


def buffer_of(dtype, first=0.0):
    # Some elements at the end fill it up.
    size = sum(int(np.prod(shape)) for shape in SHAPES) + 3
    return jnp.arange(size).at[0].set(first).astype(dtype)


def expected(buffer):
    ends = np.cumsum([int(np.prod(shape)) for shape in SHAPES])
    return [
        p.reshape(s)
        for p, s in zip(np.split(np.asarray(buffer), ends)[:-1], SHAPES, strict=True)
    ]


def taken(buffer, by_calls):
    return jax.jit(
        lambda buffer: buffer_slices.taken_apart(buffer, SHAPES, by_calls=by_calls)
    )(buffer)


@pytest.mark.parametrize("by_calls", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "uint32"])
def test_the_parts_are_what_was_joined(dtype, by_calls):
    buffer = buffer_of(dtype)
    found = taken(buffer, by_calls)
    assert len(found) == len(SHAPES)
    for one, other in zip(found, expected(buffer), strict=True):
        np.testing.assert_array_equal(one, other)
    again = buffer_slices.joined(found, buffer.size)
    np.testing.assert_array_equal(again[:-3], buffer[:-3])
    assert not again[-3:].any()


@pytest.mark.parametrize("first", [np.nan, np.inf, -np.inf])
def test_whatever_the_first_element_is(first):
    buffer = buffer_of("float32", first)
    for one, other in zip(taken(buffer, True), expected(buffer), strict=True):
        np.testing.assert_array_equal(one, other)


def test_gradients_are_joined():
    def loss(buffer, by_calls):
        return sum(
            (i + 1) * (part**2).sum()
            for i, part in enumerate(
                buffer_slices.taken_apart(buffer, SHAPES, by_calls=by_calls)
            )
        )

    buffer = buffer_of("float32")
    one, other = (
        jax.jit(jax.grad(loss), static_argnums=1)(buffer, by_calls)
        for by_calls in (True, False)
    )
    np.testing.assert_array_equal(one, other)


def test_parts_of_one_shape_share_a_kernel():
    def program(by_calls):
        compiled = jax.jit(
            lambda buffer: buffer_slices.taken_apart(buffer, SHAPES, by_calls=by_calls)
        )
        return compiled.lower(buffer_of("float32")).compile().as_text()

    assert program(True).count("slice={[") <= 1  # Of the first element.
    assert program(True).count(" call(") == len(SHAPES)
    assert program(False).count("slice={[") >= len(SHAPES)
