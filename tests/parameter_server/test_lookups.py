"""`by_rows`: the same numbers from the rows that a function looks up as from the whole
table.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core

from keras_distribute.scheduling.lookups import by_rows
from keras_distribute.servers.rows import found

RANDOM = np.random.default_rng(0)
TABLE = RANDOM.normal(size=(50, 4)).astype("float32")
IDS = np.array([[3, 7, 3], [49, 0, 7]], "int32")
WEIGHT = RANDOM.normal(size=(2, 3, 4)).astype("float32")


def compared(function, *inputs, tables, known, refused=lambda table: None):
    """Runs a program as a worker would; returns what was found of it."""
    program = jax.make_jaxpr(function)(*inputs)
    looked = by_rows(program, tables, known, refused)
    ids = looked.ids(*(x if i in looked.needed else None for i, x in enumerate(inputs)))
    rows = [
        found(each, {"size": t.size})
        for each, t in zip(ids, looked.tables, strict=True)
    ]
    given = list(inputs)
    for table, each in zip(looked.tables, rows, strict=True):
        given[table.index] = each.padded([inputs[table.index][each.ids]])
    run = core.jaxpr_as_fun(looked.program)
    outputs = run(*given, *(each.places for each in rows))
    expected = core.jaxpr_as_fun(program)(*inputs)
    of_gradient = {
        tables[t.index]: (t, each) for t, each in zip(looked.tables, rows, strict=True)
    }
    for i, (ours, theirs) in enumerate(zip(outputs, expected, strict=True)):
        if i in of_gradient:
            table, each = of_gradient[i]
            whole = np.zeros((table.rows, *ours.shape[1:]), ours.dtype)
            np.add.at(whole, each.ids, np.asarray(ours)[: len(each.ids)])
            assert not np.any(np.asarray(ours)[len(each.ids) :])
            ours = whole
        np.testing.assert_allclose(
            np.asarray(ours, "float32"), np.asarray(theirs, "float32"), rtol=1e-6
        )
    return looked


LOSSES = {
    "take": lambda table, ids: jnp.sum(jnp.take(table, ids, axis=0) ** 2 * WEIGHT),
    "indexing": lambda table, ids: jnp.sum(table[ids] * WEIGHT),
    "clipped ids": lambda table, ids: jnp.sum(
        jnp.take(table, ids + 48, axis=0, mode="clip") * WEIGHT
    ),
    "negative ids": lambda table, ids: jnp.sum(table[ids - 5] * WEIGHT),
    "two lookups": lambda table, ids: jnp.sum(table[ids] * table[ids + 1] * WEIGHT),
    "in 16 bits": lambda table, ids: jnp.sum(
        table.astype("bfloat16")[ids] * WEIGHT
    ).astype("float32"),
    "scaled gradient": lambda table, ids: 3.0 * jnp.sum(table[ids] * WEIGHT) / 7.0,
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_and_its_gradient(name):
    looked = compared(
        jax.value_and_grad(LOSSES[name]), TABLE, IDS, tables={0: 1}, known={1}
    )
    assert [table.index for table in looked.tables] == [0]
    assert looked.whole == {}


def test_ids_outside_of_the_table():
    """Fill values as JAX's, and no gradient."""

    def function(table, ids):
        rows = jnp.take(table, ids, axis=0, mode="fill", fill_value=2.0)
        return jnp.sum(rows * WEIGHT)

    ids = np.array([[3, 50, 3], [-51, 0, 100]], "int32")
    looked = compared(
        jax.value_and_grad(function), TABLE, ids, tables={0: 1}, known={1}
    )
    assert len(looked.tables) == 1


CLIPS = {
    "norm": lambda g: g / jnp.maximum(1.0, jnp.sqrt(jnp.sum(g**2))),
    "value": lambda g: jnp.clip(g, -0.1, 0.1),
    "sum of two": lambda g: g + 2 * g,
    "masked": lambda g: jnp.where(jnp.array(True), g, 0.0),
}


@pytest.mark.parametrize("name", CLIPS)
def test_what_is_done_to_a_gradient(name):
    def function(table, ids):
        return CLIPS[name](jax.grad(LOSSES["take"])(table, ids))

    looked = compared(function, TABLE, IDS, tables={0: 0}, known={1})
    assert len(looked.tables) == 1


def test_tables_of_one_shape():
    def loss(tables, ids):
        first, second = tables
        return jnp.sum(first[ids] * second[ids + 1] * WEIGHT)

    def function(first, second, ids):
        return jax.grad(loss)((first, second), ids)

    looked = compared(
        function, TABLE, TABLE[::-1].copy(), IDS, tables={0: 0, 1: 1}, known={2}
    )
    assert [table.index for table in looked.tables] == [0, 1]


def test_ids_that_are_computed():
    def loss(table, words, seed):
        ids = (words * 7 + jax.random.randint(seed, words.shape, 0, 50)) % 50
        return jnp.sum(table[ids] * WEIGHT)

    seed = jax.random.PRNGKey(3)
    looked = compared(
        jax.value_and_grad(loss), TABLE, IDS, seed, tables={0: 1}, known={1, 2}
    )
    assert looked.needed == [1, 2]
    assert len(looked.tables) == 1


WHOLE = {
    "penalty": (
        lambda table, ids: jnp.sum(table[ids] * WEIGHT) + jnp.sum(table**2),
        "all its rows are summed",
    ),
    "tied": (
        lambda table, ids: jnp.sum(table[ids] @ table.T),
        "all of it is read, by transpose",
    ),
    "columns": (
        lambda table, ids: jnp.sum(table[ids] * WEIGHT) + jnp.sum(table[ids, 1]),
        "a part of it is taken that is no row",
    ),
    "loop": (
        lambda table, ids: jax.lax.fori_loop(
            0, 3, lambda i, x: x + jnp.sum(table[ids[0] + i]), 0.0
        ),
        None,
    ),
}


@pytest.mark.parametrize("name", WHOLE)
def test_tables_that_are_read_as_a_whole(name):
    loss, why = WHOLE[name]
    looked = compared(jax.value_and_grad(loss), TABLE, IDS, tables={0: 1}, known={1})
    assert looked.tables == []
    assert looked.whole.get(0) == why


def test_why_a_table_is_wanted_as_a_whole():
    function = jax.value_and_grad(LOSSES["take"])
    looked = compared(
        function, TABLE, IDS, tables={0: 1}, known={1}, refused=lambda table: "so"
    )
    assert (looked.tables, looked.whole) == ([], {0: "so"})
    looked = compared(function, TABLE, IDS, tables={0: 1}, known=())
    assert looked.whole == {0: "its ids depend on other variables"}
    looked = compared(function, TABLE[:6], IDS % 6, tables={0: 1}, known={1})
    assert looked.whole == {0: "it has no more rows than a step looks up"}


def test_a_table_that_is_returned():
    def function(table, ids):
        return jnp.sum(table[ids]), 2 * table

    looked = compared(function, TABLE, IDS, tables={0: None}, known={1})
    assert looked.tables == []
    assert looked.whole == {0: "the function returns all of it"}


def test_a_gradient_that_is_returned():
    """And pushed: then all of it is wanted."""

    def function(table, ids):
        gradient = jax.grad(LOSSES["take"])(table, ids)
        return gradient, gradient + 1.0

    looked = compared(function, TABLE, IDS, tables={0: 0}, known={1})
    assert looked.whole == {0: "the function returns all of it"}


def test_only_a_gradient_that_does_not_depend_on_the_table():
    def function(table, ids):
        return jax.grad(LOSSES["indexing"])(table, ids)

    looked = compared(function, TABLE, IDS, tables={0: 0}, known={1})
    assert len(looked.tables) == 1


def test_other_arrays_with_as_many_rows():
    """Sums of ones in the table's shape that have nothing to do with it."""

    def function(table, ids, x):
        ones = jnp.ones((50, 4)) * 3.0 + x
        return jnp.sum(table[ids] * WEIGHT) + jnp.sum(ones), ones @ ones.T

    looked = compared(
        function, TABLE, IDS, TABLE.copy(), tables={0: None}, known={1, 2}
    )
    assert len(looked.tables) == 1
