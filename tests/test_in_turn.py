"""Collectives of CPUs, where a loop or a condition before or after them holds others."""

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from keras_distribute.devices import replication_proof
from keras_distribute.devices.axes import REPLICA_AXIS as AXIS
from keras_distribute.devices.collectives import COLLECTIVES
from keras_distribute.devices.over_replicas import over_replicas
from tests.support import mirrored


def held_by(name, body, first):
    """What a loop makes of a first value by its body, or a condition that chooses it."""
    if name == "while":
        return lax.while_loop(lambda t: jnp.sum(t) < 9.0, body, first)
    if name == "cond":
        return lax.cond(jnp.sum(first) > 9.0, body, jnp.sin, first)
    return lax.scan(lambda t, _: (body(t), None), first, length=3)[0]


def operations_of(fn, deterministic):
    """Each operation of a device's program, and the variables that it takes."""
    mesh = mirrored(4, deterministic=deterministic).replica_mesh
    program = over_replicas(mesh, fn, (PartitionSpec(AXIS),), PartitionSpec())
    traced = jax.make_jaxpr(program)(np.ones((24, 3), "float32"))
    (mapped,) = [eqn for eqn in traced.eqns if eqn.primitive.name == "shard_map"]
    for eqn in mapped.params["jaxpr"].eqns:
        yield eqn, [v for v in eqn.invars if isinstance(v, jax.extend.core.Var)]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", ["while", "cond", "scan"])
def test_collectives_after_a_loop_with_some_take_of_its_results(name, deterministic):
    """XLA on CPUs would begin them before it has ended, and meet those of it."""

    def fn(x):
        def body(total):
            return jnp.cos(lax.psum(jnp.sin(total + x), AXIS))

        total = held_by(name, body, lax.psum(x, AXIS))
        value = x
        for _ in range(4):  # These need none of it.
            value = lax.all_gather(jnp.sin(value), AXIS)[3] + x
        return total, lax.psum(value, AXIS)

    reached, later = set(), 0
    for eqn, variables in operations_of(fn, deterministic):
        held = eqn.primitive.name == name and replication_proof.communicates(eqn)
        if held or not reached.isdisjoint(variables):
            reached.update(eqn.outvars)
        if reached and eqn.primitive.name in COLLECTIVES:
            assert not reached.isdisjoint(variables), eqn
            later += 1
    assert later


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", ["while", "cond", "scan"])
def test_a_loop_with_some_takes_of_the_results_of_collectives_before_it(
    name, deterministic
):
    """XLA on CPUs would choose to begin it before them, and they would meet those of
    it: sums over the replicas had other replicas' values in them.
    """

    def fn(x):
        first = lax.psum(x, AXIS)
        before = lax.all_gather(x[:, :2], AXIS)  # The loop needs none of it.

        def body(total):
            return lax.psum(jnp.sin(total + x), AXIS)

        return held_by(name, body, first), before

    reached, held = set(), 0
    for eqn, variables in operations_of(fn, deterministic):
        if eqn.primitive.name == name and replication_proof.communicates(eqn):
            # What a condition chooses by is enough.
            taken = variables[:1] if name == "cond" else variables
            assert not reached.isdisjoint(taken), eqn
            held += 1
            continue
        communicated = [v.aval.shape[-1:] for v in variables] == [(2,)]
        communicated &= eqn.primitive.name in COLLECTIVES
        if communicated or not reached.isdisjoint(variables):
            reached.update(eqn.outvars)
    assert held
