"""Variables with one value for all replicas."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from keras_distribute._compat import variables as compat
from keras_distribute.cluster import alone, liveness
from keras_distribute.context import Frame, Mode
from keras_distribute.devices.mesh import (
    REPLICA_AXIS,
    copies,
    is_divided_over_processes,
    on_host,
)
from keras_distribute.variables.base import DistributedVariable
from keras_distribute.variables.components import combined, strong


def checksum(value: Any) -> int:
    """Of an array that this process can read."""
    return zlib.crc32(on_host(value).tobytes())


class MirroredVariable(DistributedVariable):
    """A variable with the same value on every replica, stored as one replicated array.

    Source: `tf.distribute`'s variables with `synchronization=ON_WRITE`. Assigned in a
    replica, the values of all replicas are first combined by its `aggregation`; with
    `"none"` they must be the same on every replica, which is proved before the program
    runs.

    Example:
        >>> import keras, keras_distribute as kd
        >>> strategy = kd.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> with strategy.scope():
        ...     total = keras.Variable(1.0, aggregation="sum")
        >>> def fn():
        ...     context = kd.get_replica_context()
        ...     total.assign_add(context.replica_id_in_sync_group + 1.0)
        >>> strategy.run(fn)
        >>> float(total.numpy())
        4.0
    """

    _divided = False
    _given: int | None = None  # A checksum of what this process assigned as a whole.
    _checked_assignments = 0

    @property
    def sharding(self) -> NamedSharding:
        """Where the parts of the array are: the whole on every device, unless it is
        divided among them.
        """
        if self.is_divided:
            return self.replica_mesh.divided(self.shape, self.logical_axes)
        if any(self.logical_axes):
            return NamedSharding(
                self.replica_mesh.mesh, PartitionSpec(*self.logical_axes)
            )
        return self.replica_mesh.replicated

    @property
    def is_divided(self) -> bool:
        """Whether each replica keeps a part only, where the shape allows it."""
        placement = self._strategy.placement
        return self._divided or placement.divides(self.shape, self._dtype)

    @property
    def is_indivisible(self) -> bool:
        """Whether it is large enough for each replica to keep a part only, and is whole
        since the number of replicas divides no dimension that is left.
        """
        return (
            self.is_divided
            and self._strategy.placement.is_large(self.shape, self._dtype)
            and REPLICA_AXIS not in self.value_sharding.spec
        )

    @property
    def value_sharding(self) -> NamedSharding:
        return self.sharding

    @property
    def is_read_together(self) -> bool:
        return self.is_divided or any(self.logical_axes)

    def divide(self) -> None:
        """From now on each replica keeps its part only, where the shape allows it."""
        self._divided = True
        if isinstance(self.stored, jax.Array):
            self._value = self.replica_mesh.put(self.stored, self.sharding)

    def _as_stored(self, value: Any) -> Any:
        value, sharding = strong(value), self.sharding
        if not (isinstance(value, jax.Array) and value.sharding == sharding):
            if self.is_divided and self.replica_mesh.num_processes > 1:
                self._given = checksum(value)
            value = self.replica_mesh.put(value, sharding)
        return value

    def take_checksum(self) -> int | None:
        """Of the value that this process gave: once, where no process has all of it;
        then `None`, as where it gave none.
        """
        self.is_assigned = False
        if self.is_divided:
            given, self._given = self._given, None
            return given
        return None if self.stored is None else checksum(self.stored)

    @property
    def is_assigned(self) -> bool:
        """Whether it was assigned across replicas since its checksum was taken."""
        return self._assignments != self._checked_assignments

    @is_assigned.setter
    def is_assigned(self, assigned: bool) -> None:
        self._checked_assignments = -1 if assigned else self._assignments

    def _components(self) -> tuple[jax.Array, ...]:
        whole = jax.device_put(self.stored, self.replica_mesh.replicated)
        # Copies, since the next program may give the variable's own buffers away.
        return tuple(map(jnp.copy, copies(whole)))

    def _read_now(self) -> Any:
        value = self.stored
        if alone.is_alone() and value is not None and is_divided_over_processes(value):
            alone.check_together(f"The reading of {self.path!r}, which is divided,")
        return value

    def _is_shown(self) -> bool:
        value = self.stored
        return value is not None and not is_divided_over_processes(value)

    def _on_host(self, dtype: Any) -> np.ndarray[Any, Any]:
        value = self.value
        if isinstance(value, jax.core.Tracer) or value.is_fully_addressable:
            return super()._on_host(dtype)
        if is_divided_over_processes(value):
            liveness.current.begin_program(
                self.replica_mesh.num_processes, f"at the reading of {self.path!r}"
            )
        return np.asarray(on_host(value), dtype)

    def _read_in_program(self, scoped: Any, current: Frame) -> Any:
        if current.gather is not None and self.is_divided:
            return current.gather(self, scoped)
        return scoped

    def _write_in_program(self, value: Any, current: Frame) -> Any:
        return combined(self.aggregation, value) if self._aggregates(current) else value

    def _assign_change(self, operation: Callable[..., Any], change: Any) -> Any:
        if not self._aggregates(self._own_frame()):
            return super()._assign_change(operation, change)
        change = combined(self.aggregation, self._in_dtype_of_sum(change))
        value = self._in_own_dtype(operation(self.value, change))
        compat.add_stateless_update(self, value)
        return value

    def _aggregates(self, current: Frame) -> bool:
        return (
            current.per_replica
            and current.mode is Mode.REPLICA
            and self.aggregation != "none"
        )
