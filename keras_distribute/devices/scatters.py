"""Places of scatters as int32, where XLA divides the program.

XLA ends the process where it divides the places of a scatter unevenly and these are of
another dtype (JAX 0.10.2: a failed check in `spmd_partitioner_util.h`): in the gradient
of a sort, where small integers look up rows of a table, or any with JAX's 64 bits.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from keras_distribute.devices import jaxprs
from keras_distribute.devices.rewriting import Rewriting

_LARGEST = jnp.iinfo(jnp.int32).max


def is_scatter(eqn: Any) -> bool:
    """Whether an operation scatters."""
    return eqn.primitive.name.startswith("scatter")


def _has_other_places(eqn: Any) -> bool:
    if not is_scatter(eqn):
        return False
    array, places = (variable.aval for variable in eqn.invars[:2])
    return places.dtype != jnp.int32 and max(array.shape, default=0) <= _LARGEST


def _by_int32(eqn: Any, given: list[Any]) -> list[Any]:
    array, places, *updates = given
    return jaxprs.bound(eqn, [array, _as_int32(places), *updates])


def _as_int32(places: Any) -> Any:
    """The same places; those outside of any array stay outside, on the same side."""
    limits = jnp.iinfo(places.dtype)
    lowest = max(limits.min, -1)
    return jnp.clip(places, lowest, min(limits.max, _LARGEST)).astype(jnp.int32)


BY_INT32 = Rewriting(_has_other_places, _by_int32)
"""Such places are int32."""
