"""Whole values of variables that are divided over the replicas, in programs.

The gradient of a gathered value is the sum over the replicas, divided again. Both
travel in the dtype that is read, and in which gradients are summed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from keras_distribute._compat import jax_internals
from keras_distribute.devices.mesh import REPLICA_AXIS
from keras_distribute.devices.summed_parts import summed_part
from keras_distribute.variables import MirroredVariable


class Gather:
    """What a divided variable is read as in a program: `Frame.gather`. Gathered once in
    each trace; when, and how often the devices do it, is `where_used`'s.

    Args:
        whole: From a variable, and its part as a program has it, to the value.
    """

    def __init__(self, whole: Callable[[MirroredVariable, Any], Any]) -> None:
        self._whole = whole
        self._seen: dict[tuple[int, str], tuple[Any, Any]] = {}
        self._parts: dict[int, tuple[Any, Any]] = {}

    def stands_for(self, value: Any, part: Any) -> None:
        """From now on `value` is how the program has `part`."""
        self._parts[id(value)] = value, part

    @property
    def has_parts(self) -> bool:
        """Whether the variables of this program have other values than they show."""
        return bool(self._parts)

    def part_of(self, value: Any) -> Any:
        """The part, of a value that stands for one; else the value."""
        return self._parts.get(id(value), (value, value))[1]

    def __call__(self, variable: MirroredVariable, value: Any) -> Any:
        part = self.part_of(value)
        if part is value and self._parts:  # Assigned in this program: whole.
            return value
        key = id(part), variable.dtype
        if key not in self._seen:
            with jax_internals.traced_where(part):
                self._seen[key] = part, self._whole(variable, part)
        return self._seen[key][1]


def whole_in_batch(variable: MirroredVariable, value: Any) -> Any:
    """The value in a program over the global batch, where it is divided, on each
    replica; its gradient is divided again.
    """
    mesh, parts = variable.replica_mesh, variable.value_sharding
    whole = NamedSharding(mesh.mesh, PartitionSpec(*variable.logical_axes))

    def gathered(part: Any) -> Any:
        # Without the first one XLA would take what comes before for whole, too, and
        # gather earlier than `where_used` says.
        there = lax.with_sharding_constraint(part, parts)
        return lax.with_sharding_constraint(there, whole)

    return _read(
        variable,
        value,
        gathered,
        lambda gradient: lax.with_sharding_constraint(gradient, parts),
    )


def whole_in_replica(variable: MirroredVariable, part: Any) -> Any:
    """The value in the program of one replica, which has a part; its gradient is this
    replica's part of the sum over all replicas.
    """
    axis = divided_axis(variable.value_sharding)
    if axis is None:
        return variable._maybe_autocast(part)
    mesh = variable.replica_mesh
    dtype = variable.distribute_strategy.placement.communication_dtype

    def scattered(gradient: Any) -> Any:
        narrow = gradient if dtype is None else gradient.astype(dtype)
        return summed_part(narrow, axis, mesh).astype(gradient.dtype)

    return _read(
        variable,
        part,
        lambda part: lax.all_gather(part, REPLICA_AXIS, axis=axis, tiled=True),
        scattered,
    )


def _read(
    variable: MirroredVariable,
    part: Any,
    gathered: Callable[[Any], Any],
    summed: Callable[[Any], Any],
) -> Any:
    """`gathered` of a part in the dtype that is read; of its gradient, in the
    variable's own dtype, `summed`.
    """
    read, own = variable.dtype, part.dtype

    def forward(part: Any) -> Any:
        return gathered(part.astype(read))

    if not jnp.issubdtype(own, jnp.floating):
        return forward(part)
    function = jax.custom_vjp(forward)
    function.defvjp(
        lambda part: (forward(part), None),
        lambda _, gradient: (summed(gradient.astype(own)),),
    )
    return function(part)


def divided_axis(sharding: NamedSharding) -> int | None:
    """Which axis of an array is divided over the replicas."""
    return next(
        (i for i, axes in enumerate(sharding.spec) if axes == REPLICA_AXIS), None
    )
