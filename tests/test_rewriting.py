"""Programs with some of their operations written otherwise."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from keras_distribute.devices.rewriting import Rewriting, all_rewritten

TABLE = np.array([0.25, -1.0, 3.0], "float32")


def _named(name):
    return lambda eqn: eqn.primitive.name == name


# Not the same functions: what is written otherwise shows in the numbers.
SINES = Rewriting(_named("sin"), lambda eqn, given: [jnp.cos(given[0]) + TABLE])
PRODUCTS = Rewriting(_named("mul"), lambda eqn, given: [given[0] + given[1]])
UNCHANGED = Rewriting(_named("exp"), lambda eqn, given: given)


def test_operations_are_replaced_and_the_others_kept():
    offset = np.array([7.0, 8.0, 9.0], "float32")

    def function(x):
        return jnp.tanh(jax.jit(lambda y: jnp.sin(y) - offset)(x)), x * 2.0

    program = jax.make_jaxpr(function)(TABLE)
    again = all_rewritten(program, (SINES, PRODUCTS))
    x = np.array([0.5, 1.5, -2.0], "float32")
    first, second = core.jaxpr_as_fun(again)(x)
    np.testing.assert_allclose(first, np.tanh(np.cos(x) + TABLE - offset), rtol=1e-6)
    np.testing.assert_allclose(second, x + 2.0)  # `2.0` stands in the program.
    (tanh,) = (eqn for eqn in again.eqns if eqn.primitive.name == "tanh")
    assert any(tanh.source_info is eqn.source_info for eqn in program.eqns)
    jax.jit(core.jaxpr_as_fun(again)).lower(x).compile()


def test_what_one_rewriting_makes_the_next_one_sees():
    doubled = Rewriting(_named("add"), lambda eqn, given: [given[0] * given[1]])
    program = jax.make_jaxpr(lambda x: x + 3.0)(TABLE)
    again = all_rewritten(program, (doubled, PRODUCTS))
    np.testing.assert_allclose(core.jaxpr_as_fun(again)(TABLE)[0], TABLE + 3.0)
    assert [eqn.primitive.name for eqn in again.eqns] == ["add"]


def test_results_may_be_operands_and_may_be_given_back_twice():
    def function(x):
        y = jnp.exp(x)
        return y, y, jnp.tanh(y), x

    again = all_rewritten(jax.make_jaxpr(function)(TABLE), (UNCHANGED,))
    results = core.jaxpr_as_fun(again)(TABLE)
    for got, expected in zip(
        results, (TABLE, TABLE, np.tanh(TABLE), TABLE), strict=True
    ):
        np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_gradients_and_loops_of_what_is_rewritten():
    def function(x):
        def body(carry, row):
            return carry + jnp.sum(jnp.sin(row * x)), row

        return jax.lax.scan(body, 0.0, jnp.arange(6.0).reshape(2, 3))[0]

    program = jax.make_jaxpr(jax.value_and_grad(function))(TABLE)
    squares = Rewriting(_named("sin"), lambda eqn, given: [given[0] ** 2])
    again = all_rewritten(program, (squares,))
    value, gradient = core.jaxpr_as_fun(again)(TABLE)
    rows = np.arange(6.0).reshape(2, 3) * TABLE
    np.testing.assert_allclose(value, (rows**2).sum(), rtol=1e-6)
    _, own = core.jaxpr_as_fun(program)(TABLE)
    np.testing.assert_allclose(gradient, own)  # The cosine was there already.


def test_a_program_that_needs_nothing_is_itself():
    program = jax.make_jaxpr(jnp.tanh)(TABLE)
    assert all_rewritten(program, (SINES, PRODUCTS)) is program
