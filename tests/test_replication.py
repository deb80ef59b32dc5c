"""The proof that a value is the same on every replica: what it must refuse, and what it
must let pass.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import keras_distribute as kd
from keras_distribute.devices import replication_proof
from tests.support import mirrored

AXIS = "replica"


def proved(fn, *same):
    """Whether each output of `fn` is proved equal, for scalars or vectors that are the
    same (or not) on each replica.
    """
    arguments = [jnp.ones(4) for _ in same]
    program = jax.make_jaxpr(fn, axis_env=[(AXIS, 2)])(*arguments)
    result = replication_proof.equal_on_all_replicas(program, list(same))
    return result[0] if len(result) == 1 else result


def summed(x):
    return lax.psum(x, AXIS)


@jax.custom_vjp
def with_own_gradient(x):
    return x * 2


with_own_gradient.defvjp(
    lambda x: (x * 2, None), lambda _, g: (g * lax.axis_index(AXIS),)
)

EQUAL = {
    "arithmetic": lambda x, y: jnp.sin(x) @ x + 1,
    "sum": lambda x, y: summed(y),
    "mean": lambda x, y: lax.pmean(y, AXIS),
    "maximum": lambda x, y: lax.pmax(y, AXIS),
    "gather": lambda x, y: lax.all_gather(y, AXIS),
    "sum in jit": lambda x, y: jax.jit(summed)(y),
    "sum in checkpoint": lambda x, y: jax.checkpoint(summed)(y),
    "sum in cond": lambda x, y: lax.cond(
        x[0] > 0, lambda: summed(y), lambda: jnp.zeros(4)
    ),
    "sum in scan": lambda x, y: lax.scan(lambda c, a: (c + summed(a), c), 0.0, y),
    "carry of scan": lambda x, y: lax.scan(lambda c, a: (c + a, c), 0.0, x),
    "while": lambda x, y: lax.while_loop(lambda c: c[0] < 3, lambda c: c * 2, x + 1),
    "gradient of a sum": lambda x, y: jax.grad(lambda x: jnp.sum(summed(x * x)))(x),
    "vmap": lambda x, y: jax.vmap(lambda a: a * 2)(x),
    "custom gradient": lambda x, y: with_own_gradient(x),
    "relu": lambda x, y: jax.nn.relu(x),
}
DIFFERING = {
    "input": lambda x, y: y * 1,
    "replica's number": lambda x, y: x * lax.axis_index(AXIS),
    "replica's number in jit": lambda x, y: jax.jit(lambda x: x + lax.axis_index(AXIS))(
        x
    ),
    "replica's number in scan": lambda x, y: lax.scan(
        lambda c, a: (c + lax.axis_index(AXIS), a), 0, x
    )[0],
    "replica's number in vmap": lambda x, y: jax.vmap(
        lambda a: a * lax.axis_index(AXIS)
    )(x),
    "replica's number in a custom gradient": lambda x, y: jax.grad(
        lambda x: jnp.sum(with_own_gradient(x))
    )(x),
    "predicate": lambda x, y: lax.cond(y[0] > 0, lambda: x, lambda: x * 2),
    "number of rounds": lambda x, y: lax.while_loop(
        lambda c: c[0] < y[0], lambda c: c + 1, x
    ),
    "carry through scan": lambda x, y: lax.scan(lambda c, a: (c + a, c), 0.0, y)[0],
    "carry after some rounds": lambda x, y: lax.fori_loop(
        0, 3, lambda i, c: (c[1], c[2], c[2]), (x, x, y)
    )[0],
    "scatter": lambda x, y: lax.psum_scatter(x, AXIS, tiled=True),
    "permutation": lambda x, y: lax.ppermute(y, AXIS, [(0, 1), (1, 0)]),
    "partial permutation": lambda x, y: lax.ppermute(x, AXIS, [(0, 1)]),
    "all to all": lambda x, y: lax.all_to_all(y, AXIS, 0, 0, tiled=True),
    "groups": lambda x, y: lax.psum(y, AXIS, axis_index_groups=[[0], [1]]),
    "host callback": lambda x, y: jax.pure_callback(
        lambda a: a, jax.ShapeDtypeStruct((4,), "float32"), x
    ),
    "random key": lambda x, y: jax.random.uniform(
        jax.random.fold_in(jax.random.key(0), lax.axis_index(AXIS)), (4,)
    ),
}


@pytest.mark.parametrize("name", EQUAL)
def test_equal(name):
    assert proved(EQUAL[name], True, False) in (True, [True, True])


@pytest.mark.parametrize("name", DIFFERING)
def test_differing(name):
    assert proved(DIFFERING[name], True, False) is False


def test_groups_of_outputs_are_told_apart():
    assert proved(lambda x, y: (x, y, summed(y), x + y), True, False) == [
        True,
        False,
        True,
        False,
    ]


def test_a_false_proof_would_show():
    """Each function that is called equal really is: run it, and look at every replica."""
    strategy = mirrored(2)
    x = jnp.arange(4.0)
    y = strategy.experimental_distribute_values_from_function(
        lambda c: x * (c.replica_id_in_sync_group + 1)
    )
    for name, fn in EQUAL.items():
        for leaf in jax.tree.leaves(
            strategy.run(fn, args=(x, y)),
            is_leaf=lambda leaf: isinstance(leaf, kd.PerReplica),
        ):
            first, second = (np.asarray(value) for value in leaf.values)
            np.testing.assert_array_equal(first, second, err_msg=name)
