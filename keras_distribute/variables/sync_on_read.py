"""Variables of which each replica has a component of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from keras_distribute._compat import jax_internals
from keras_distribute._compat import variables as compat
from keras_distribute.cluster import liveness
from keras_distribute.context import Frame, Mode
from keras_distribute.devices.launches import launches
from keras_distribute.devices.mesh import components, mesh_of_array
from keras_distribute.errors import AggregationError, ValueStructureError
from keras_distribute.values.per_replica import PerReplica
from keras_distribute.variables.base import DistributedVariable
from keras_distribute.variables.components import (
    aggregated,
    combined,
    of_first,
    spread_over,
    strong,
)
from keras_distribute.variables.holding import copied
from keras_distribute.variables.ownership import owned
from keras_distribute.variables.thread import thread


class _Whole(NamedTuple):
    """A value assigned across replicas, of which no components are made yet. A metric
    that `fit` resets before each epoch never needs them: the step takes the value,
    which may be a number of the host.
    """

    value: jax.Array | np.ndarray[Any, Any]


class SyncOnReadVariable(DistributedVariable):
    """A variable of which each replica has a component of its own, combined when it is
    read across replicas.

    Source: `tf.distribute`'s variables with `synchronization=ON_READ`. Updates inside
    `Strategy.run` communicate nothing. Differs from TF: assigned across replicas with
    `"sum"`, the first component takes the whole value and the others zero, so that any
    dtype reads back exactly (TensorFlow divides by the number of replicas); and
    `assign_add` across replicas is allowed: it changes the components so that what is
    read changes by as much. A `PerReplica` assigned across replicas gives each replica
    its component.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        named = compat.named_arguments(args, kwargs)
        if named.get("synchronization", "auto") == "auto":
            named["synchronization"] = "on_read"
            named["aggregation"] = "sum" if thread.creates_accumulators else "mean"
        super().__init__(**named)
        if isinstance(self._own, jax.Array):  # Keras took the shape of the components.
            self._shape = self._own.shape[1:]
            self._ndim = len(self._shape)

    @property
    def sharding(self) -> NamedSharding:
        """Where the components are: each on its replica, divided over its logical
        devices if the variable is.
        """
        if any(self.logical_axes):
            return self.replica_mesh.stacked(self.logical_axes)
        return self.replica_mesh.split

    @property
    def value_sharding(self) -> NamedSharding:
        mesh = self.replica_mesh
        if any(self.logical_axes):
            return NamedSharding(mesh.mesh, PartitionSpec(*self.logical_axes))
        return mesh.replicated

    @property
    def is_read_together(self) -> bool:
        return self.aggregation != "none"

    @property
    def stored(self) -> jax.Array | None:
        with launches.lock:
            if self._link is None and isinstance(self._own, _Whole):
                self._own = self._spread(self._placed(self._own.value))
            return super().stored

    @property
    def in_step(self) -> Any:
        with launches.lock:
            whole = self._whole()
            return self.value if whole is None else whole

    def _whole(self) -> jax.Array | np.ndarray[Any, Any] | None:
        own = self._own
        return own.value if self._link is None and isinstance(own, _Whole) else None

    @property
    def components(self) -> PerReplica | None:
        """What is stored, to be assigned again; `None` before it is initialized."""
        return PerReplica(stacked=self.stored) if self.is_initialized else None

    def _checked(self, value: Any) -> Any:
        stacked = value.stacked if isinstance(value, PerReplica) else None
        if stacked is None or stacked.shape[1:] != self.shape:
            return super()._checked(value)
        if mesh_of_array(stacked) != self.replica_mesh.mesh:
            raise ValueStructureError(
                f"A value of other replicas was assigned to {self.path!r}.",
                received=f"{value!r} for a variable of {self._strategy!r}.",
                fix="make the value with the variable's strategy.",
            )
        return value

    def _direct_assign(self, value: Any) -> None:
        if isinstance(value, PerReplica):
            self._value = self._as_stored(value)
        else:
            is_number = isinstance(value, np.ndarray) and not value.shape
            self._value = _Whole(value.copy() if is_number else self._placed(value))

    def _as_stored(self, value: Any) -> Any:
        if isinstance(value, PerReplica):
            stacked = jnp.asarray(owned(value.stacked), self._dtype)
            if any(self.logical_axes):
                return jax.device_put(stacked, self.sharding)
            return stacked
        return self._spread(self._placed(value))

    def _placed(self, value: Any) -> jax.Array:
        # It may be on one device, for good.
        return self.replica_mesh.put(strong(value), self.value_sharding)

    def _spread(self, value: Any) -> jax.Array:
        return spread_over(
            self.replica_mesh, self.aggregation == "sum", self.logical_axes
        )(value)

    def _assign_change(self, operation: Callable[..., Any], change: Any) -> Any:
        """Changes each component, so that what is read changes by `change` and no
        replica's own state is lost.
        """
        current = self._own_frame()
        scoped = compat.stateless_value(self)
        if scoped is not None and current.per_replica:
            own = self._maybe_autocast(scoped)
            change = self._write_in_program(change, current)
            value = self._in_own_dtype(operation(own, change))
            compat.add_stateless_update(self, value)
            return value
        if compat.in_stateless_scope():
            return super()._assign_change(operation, change)
        self._check_outlives_trace(change)
        with launches.lock:
            stored = self.stored
            assert stored is not None
            changes = self._spread(self._in_dtype_of_sum(change))
            self._value = self._in_own_dtype(operation(stored, changes))
        return change if self.aggregation == "none" else self._read_stored()

    def _components(self) -> tuple[jax.Array, ...]:
        stacked = self.stored
        assert stacked is not None
        if any(self.logical_axes):
            stacked = jax.device_put(stacked, self.replica_mesh.split)
        return tuple(jnp.squeeze(part, 0) for _, part in components(stacked))

    def _read_now(self) -> Any:
        self._check_readable()
        with launches.lock:
            link = self._link
            held = None if link is None else link[0].across(link[1], self)
            whole = self._whole()
            if whole is not None:
                # The next step is given the array.
                held = copied(whole) if isinstance(whole, jax.Array) else whole
        if isinstance(held, np.ndarray):
            return self._placed(held)
        if held is not None:
            return self.replica_mesh.brought(held)  # A step's state may rest elsewhere.
        liveness.current.begin_program(
            self.replica_mesh.num_processes, f"at the reading of {self.path!r}"
        )
        read = aggregated(self.replica_mesh, self.aggregation, self.value_sharding)
        if not jax_internals.is_tracing():
            return read(self.stored)
        # A step that is traced takes a constant, as of any other variable that is not
        # in its state; a program over the devices would not be a replica's own.
        with jax.core.eval_context():
            return read(self.stored)

    def _read_in_program(self, scoped: Any, current: Frame) -> Any:
        if not (current.per_replica and current.mode is Mode.CROSS):
            return scoped
        self._check_readable()
        return combined(self.aggregation, scoped)

    def _write_in_program(self, value: Any, current: Frame) -> Any:
        if (
            current.per_replica
            and current.mode is Mode.CROSS
            and self.aggregation == "sum"
        ):
            return of_first(value)
        return value

    def _check_readable(self) -> None:
        if self.aggregation == "none":
            raise AggregationError(
                f"The components of {self.path!r} have no aggregation, so they cannot "
                "be read as one value.",
                received='a variable with synchronization="on_read", '
                'aggregation="none".',
                fix='create it with aggregation="sum", "mean" or "only_first_replica", '
                "or read it inside strategy.run.",
            )

    def __repr__(self) -> str:
        if self.aggregation == "none":
            return (
                f"<SyncOnReadVariable path={self.path}, shape={self.shape}, "
                f"dtype={self.dtype}, aggregation=none>"
            )
        return super().__repr__()
