"""Whole values of variables that are divided over the replicas, in programs.

A program over the global batch says where a value is whole, and where its gradient is
divided, by constraints on their shardings; `devices/by_rows` knows what these mean for
one replica. A value travels in the dtype that is read, a gradient in the one in which
gradients are summed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from keras_distribute._compat import jax_internals
from keras_distribute.devices.mesh import REPLICA_AXIS
from keras_distribute.variables import MirroredVariable


class Gather:
    """What a divided variable is read as in a program: `Frame.gather`. Gathered once in
    each trace; when, and how often the devices do it, is `where_used`'s.

    Args:
        variables: Of the model. All others are read in parts: an optimizer with
            another one inside reads slots where layers could read weights.
    """

    def __init__(self, variables: Iterable[Any]) -> None:
        self._of_model = set(map(id, variables))
        self._seen: dict[tuple[int, str], tuple[Any, Any]] = {}

    def __call__(self, variable: MirroredVariable, value: Any) -> Any:
        if id(variable) not in self._of_model:
            return value
        key = id(value), variable.dtype
        if key not in self._seen:
            with jax_internals.traced_where(value):
                self._seen[key] = value, _whole(variable, value)
        return self._seen[key][1]


def _whole(variable: MirroredVariable, value: Any) -> Any:
    """The value on each replica, in the dtype that is read, of one that is divided; its
    gradient, in the variable's own dtype, is divided again.
    """
    mesh, parts = variable.replica_mesh, variable.value_sharding
    whole = NamedSharding(mesh.mesh, PartitionSpec(*variable.logical_axes))
    read, own = variable.dtype, value.dtype

    def forward(value: Any) -> Any:
        # Without the first one XLA would take what comes before for whole, too, and
        # gather earlier than `where_used` says.
        there = lax.with_sharding_constraint(value.astype(read), parts)
        return lax.with_sharding_constraint(there, whole)

    def backward(_: None, gradient: Any) -> tuple[Any]:
        return (lax.with_sharding_constraint(gradient.astype(own), parts),)

    if not jnp.issubdtype(own, jnp.floating):
        return forward(value)
    function = jax.custom_vjp(forward)
    function.defvjp(lambda value: (forward(value), None), backward)
    return function(value)


def divided_axis(sharding: NamedSharding) -> int | None:
    """Which axis of an array is divided over the replicas."""
    return next(
        (i for i, axes in enumerate(sharding.spec) if axes == REPLICA_AXIS), None
    )
