"""Places of scatters as int32, where XLA divides the program.

XLA ends the process where it divides the places of a scatter unevenly and these are of
another dtype (JAX 0.10.2: a failed check in `spmd_partitioner_util.h`): in the gradient
of a sort, where small integers look up rows of a table, or any with JAX's 64 bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from keras_distribute.devices import jaxprs

_LARGEST = jnp.iinfo(jnp.int32).max


def are_in(program: Any) -> bool:
    """Whether a traced program has places of another dtype."""
    # A `shard_map` is the program of each device alone.
    return jaxprs.has(program, _is_one, but_in=("shard_map",))


def by_int32(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, in which they are int32."""

    def converting(*args: Any) -> Any:
        program, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        given = jax.tree.leaves(args)
        results = jaxprs.evaluated(program, given, _evaluated)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return converting


def _evaluated(eqn: Any, given: list[Any]) -> list[Any]:
    eqn = jaxprs.with_programs(eqn, _traced_again)
    if _is_one(eqn):
        array, places, *updates = given
        given = [array, _as_int32(places), *updates]
    return jaxprs.bound(eqn, given)


def _as_int32(places: Any) -> Any:
    """The same places; those outside of any array stay outside, on the same side."""
    limits = jnp.iinfo(places.dtype)
    lowest = max(limits.min, -1)
    return jnp.clip(places, lowest, min(limits.max, _LARGEST)).astype(jnp.int32)


def _traced_again(program: core.ClosedJaxpr) -> core.ClosedJaxpr:
    return jaxprs.retraced(program, _evaluated) if are_in(program) else program


def _is_one(eqn: Any) -> bool:
    if not eqn.primitive.name.startswith("scatter"):
        return False
    array, places = (variable.aval for variable in eqn.invars[:2])
    return places.dtype != jnp.int32 and max(array.shape, default=0) <= _LARGEST
