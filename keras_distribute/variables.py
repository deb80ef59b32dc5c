"""The two kinds of distributed variable, and which one a creation under a scope yields.

|                         | `MirroredVariable`              | `SyncOnReadVariable`                               |
| stored as               | one replicated array            | `(num_replicas, *shape)`, split over the replicas  |
| read in a replica       | the value                       | this replica's component                           |
| read across replicas    | the value                       | the components, aggregated                         |
| assigned in a replica   | aggregated first                | this replica's component                           |
| assigned across replicas| every copy                      | so that a read across replicas gives the value back|

Both are `keras.Variable`s: layers, optimizers, saving and summaries never notice. Inside a program a stateless scope
carries their values, as Keras does it; this room says what a read or an assignment means there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import zlib
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.core
import jax.numpy as jnp
import keras
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from keras_distribute import context
from keras_distribute._compat import variables as compat
from keras_distribute.cluster import agreement, liveness
from keras_distribute.context import Frame, Mode
from keras_distribute.cross_device import of_this_replica
from keras_distribute.errors import (
    AggregationError,
    ContextError,
    StructureTypeError,
    ValueStructureError,
    VariableScopeError,
)
from keras_distribute.mesh import REPLICA_AXIS, ReplicaMesh, is_divided_over_processes, on_host
from keras_distribute.mesh import components as mesh_components
from keras_distribute.mesh import copies as mesh_copies
from keras_distribute.values import DistributedValues, Mirrored, PerReplica

if TYPE_CHECKING:
    from keras_distribute.strategies.base import Strategy


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a variable is divided over the logical devices of a replica: for each dimension mesh axes, or `None`."""

    axes: tuple[Any, ...] = ()


class DistributedVariable(compat.Variable):
    """Base of the variables that live on all replicas of a strategy; made by `keras.Variable` under its scope."""

    def __init__(self, initializer: Any, *args: Any, **kwargs: Any) -> None:
        self._strategy = context.get_strategy()
        super().__init__(_owned(initializer), *args, **kwargs)

    def _initialize(self, value: Any) -> None:
        self._shape = self._validate_shape(value.shape)
        self._direct_assign(value)

    def _initialize_with_initializer(self, initializer: Any) -> None:
        self._initialize(self._convert_to_tensor(initializer(self._shape, dtype=self._dtype)))

    @functools.cached_property
    def logical_axes(self) -> tuple[Any, ...]:
        """How each dimension is divided over the logical devices of a replica: mesh axes, or `None`.

        A slot of an optimizer has the layout of its weight, which Keras hands on.
        """
        if self._layout is None:
            self._layout = self._strategy.layout_of(self.path, tuple(self.shape))
        return self._layout.axes if isinstance(self._layout, Layout) else ()

    @property
    def distribute_strategy(self) -> Strategy:
        """The strategy whose scope the variable was created in."""
        return self._strategy

    @property
    def replica_mesh(self) -> ReplicaMesh:
        """The devices that it lives on."""
        return self._strategy.replica_mesh

    @property
    def sharding(self) -> NamedSharding:
        """Where the parts of the array that stands on the devices are."""
        raise NotImplementedError

    @property
    def value_sharding(self) -> NamedSharding:
        """Where the parts of its value are in a step of `fit`."""
        raise NotImplementedError

    @property
    def stored(self) -> jax.Array | None:
        """The array that stands on the devices; `None` before the variable is initialized."""
        return self._value

    @property
    def values(self) -> tuple[jax.Array, ...]:
        """The components on this process's replicas, in replica order."""
        raise NotImplementedError

    @property
    def value(self) -> Any:
        """The value in the current context; see the table at the top of this file."""
        scoped = compat.stateless_value(self)
        if scoped is not None:
            return self._maybe_autocast(self._read_in_program(scoped, context.frame()))
        if self._value is None and self._initializer is None:
            raise taken_error(self)
        if self._value is None:
            return self._maybe_autocast(compat.uninitialized_value(self))
        return self._maybe_autocast(self._read_stored())

    def assign(self, value: Any) -> Any:
        """Assigns `value` by the rule of the current context.

        Args:
            value: An array of the variable's shape, or what converts to one.

        Returns:
            The assigned value, as an array.

        Raises:
            ValueStructureError: For another shape.
            StructureTypeError: For a value that differs per replica.
            AggregationError: From `Strategy.run`, when the replicas would assign different values to a mirrored
                variable without aggregation.
            VariableScopeError: In the scope of another strategy.
        """
        return self._assign(self._checked(value))

    def assign_add(self, value: Any) -> Any:
        """Adds `value`; in a replica, the aggregation applies to what is added. As `assign` otherwise."""
        return self._assign_change(self._checked(value))

    def assign_sub(self, value: Any) -> Any:
        """Subtracts `value`; in a replica, the aggregation applies to what is subtracted. As `assign` otherwise."""
        return self._assign_change(-self._checked(value))

    def _checked(self, value: Any) -> Any:
        if isinstance(value, DistributedValues) and not hasattr(value, "value"):
            raise StructureTypeError(
                f"A value that differs per replica cannot be assigned to {self.path!r} across replicas.",
                received=f"{value!r}.",
                fix='assign it inside strategy.run, or reduce it first: strategy.reduce("SUM", value, axis=None).',
            )
        value = self._convert_to_tensor(_owned(value), dtype=self._dtype)
        if not compat.shape_equal(value.shape, self.shape):
            raise ValueStructureError(
                "The shape of the target variable and the shape of the target value in "
                f"`variable.assign(value)` must match: {self.path!r} has the shape {tuple(self.shape)}.",
                received=f"a value of shape {tuple(value.shape)}.",
                fix="assign a value of the variable's shape.",
            )
        return value

    def _assign(self, value: Any) -> Any:
        current = self._own_frame()
        if compat.in_stateless_scope():
            compat.add_stateless_update(self, self._write_in_program(value, current))
        else:
            self._direct_assign(value)
        return value

    def _assign_change(self, change: Any) -> Any:
        return self._assign(self._own_dtype_value() + change)

    def _own_frame(self) -> Frame:
        """The current frame, which must not be another strategy's."""
        current = context.frame()
        if context.has_strategy() and current.strategy is not self._strategy:
            raise VariableScopeError(
                f"The variable {self.path!r} lives on another strategy than the current one.",
                received=f"a variable of {self._strategy!r}, assigned in {context.describe(current)}",
                fix="leave the other strategy's scope first.",
            )
        return current

    def _own_dtype_value(self) -> Any:
        return jnp.asarray(self.value, dtype=self._dtype)

    def _read_in_program(self, scoped: Any, current: Frame) -> Any:
        raise NotImplementedError

    def _write_in_program(self, value: Any, current: Frame) -> Any:
        raise NotImplementedError

    def _read_stored(self) -> Any:
        raise NotImplementedError

    def __repr__(self) -> str:
        hidden = self._value is None or (isinstance(self, MirroredVariable) and is_divided_over_processes(self._value))
        value = "" if hidden else f", value={keras.ops.convert_to_numpy(self._read_stored())}"
        return (
            f"<{type(self).__name__} path={self.path}, shape={self.shape}, dtype={self.dtype}, "
            f"num_replicas={self._strategy.num_replicas_in_sync}{value}>"
        )


def taken_error(variable: Any) -> ContextError:
    """The error for a variable whose value is with a `fit` that is running."""
    return ContextError(
        f"The value of {variable.path!r} is with the running fit, evaluate or predict.",
        received="a read in the middle of an epoch.",
        fix="ask for it through `self.model` in the callback, or call model.jax_state_sync() first.",
    )


class MirroredVariable(DistributedVariable):
    """A variable with the same value on every replica, stored as one replicated array.

    Source: `tf.distribute`'s variables with `synchronization=ON_WRITE`. Assigned in a replica, the values of all
    replicas are first combined by its `aggregation`; with `"none"` they must be the same on every replica, which is
    proved before the program runs.

    Example:
        >>> import keras, keras_distribute as kd
        >>> strategy = kd.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> with strategy.scope():
        ...     total = keras.Variable(1.0, aggregation="sum")
        >>> def fn():
        ...     total.assign_add(kd.get_replica_context().replica_id_in_sync_group + 1.0)
        >>> strategy.run(fn)
        >>> float(total.numpy())
        4.0
    """

    _divided = False

    @property
    def values(self) -> tuple[jax.Array, ...]:
        if compat.in_stateless_scope():
            return (self.value,)
        if self._value is None:
            return ()
        whole = jax.device_put(self._value, self.replica_mesh.replicated)
        # Copies, since the next program may give the variable's own buffers away.
        return tuple(map(jnp.copy, mesh_copies(whole)))

    @property
    def sharding(self) -> NamedSharding:
        """Where the parts of the array are: the whole on every device, unless it is divided among them."""
        if self._divided:
            return self.replica_mesh.divided(self.shape, self.logical_axes)
        if any(self.logical_axes):
            return NamedSharding(self.replica_mesh.mesh, PartitionSpec(*self.logical_axes))
        return self.replica_mesh.replicated

    @property
    def value_sharding(self) -> NamedSharding:
        return self.sharding

    def divide(self) -> None:
        """From now on each replica keeps its part only, where the shape allows it."""
        self._divided = True
        if isinstance(self._value, jax.Array):
            self._value = self.replica_mesh.put(self._value, self.sharding)

    def _direct_assign(self, value: Any) -> None:
        value, sharding = _strong(value), self.sharding
        if not (isinstance(value, jax.Array) and value.sharding == sharding):
            value = self.replica_mesh.put(value, sharding)
        self._value = value

    def _read_stored(self) -> Any:
        before = _reading.before.get(id(self))
        return before if before is not None else self._value

    def __array__(self, dtype: Any = None) -> np.ndarray[Any, Any]:
        value = self.value
        if isinstance(value, jax.core.Tracer) or value.is_fully_addressable:
            return super().__array__(dtype)
        if is_divided_over_processes(value):
            liveness.together(self.replica_mesh.num_processes)
        return np.asarray(on_host(value), dtype)

    def _read_in_program(self, scoped: Any, current: Frame) -> Any:
        return scoped

    def _write_in_program(self, value: Any, current: Frame) -> Any:
        return _combined(self.aggregation, value) if self._aggregates(current) else value

    def _assign_change(self, change: Any) -> Any:
        if not self._aggregates(self._own_frame()):
            return super()._assign_change(change)
        value = self._own_dtype_value() + _combined(self.aggregation, change)
        compat.add_stateless_update(self, value)
        return value

    def _aggregates(self, current: Frame) -> bool:
        return current.per_replica and current.mode is Mode.REPLICA and self.aggregation != "none"


class SyncOnReadVariable(DistributedVariable):
    """A variable of which each replica has a component of its own, combined when it is read across replicas.

    Source: `tf.distribute`'s variables with `synchronization=ON_READ`. Updates inside `Strategy.run` communicate
    nothing. Differs from TF: assigned across replicas with `"sum"`, the first component takes the whole value and the
    others zero, so that any dtype reads back exactly (TensorFlow divides by the number of replicas); and `assign_add`
    across replicas is allowed: it changes the components so that what is read changes by as much. A `PerReplica`
    assigned across replicas gives each replica its component.
    """

    def __init__(self, *args: Any, synchronization: str = "auto", aggregation: str = "none", **kwargs: Any) -> None:
        if synchronization == "auto":
            synchronization, aggregation = "on_read", "sum" if compat.is_gradient_accumulator() else "mean"
        super().__init__(*args, synchronization=synchronization, aggregation=aggregation, **kwargs)
        if self._value is not None:  # Keras took the shape of what is stored.
            self._shape = self._value.shape[1:]
            self._ndim = len(self._shape)

    @property
    def values(self) -> tuple[jax.Array, ...]:
        if compat.in_stateless_scope():
            return (self.value,)
        if self._value is None:
            return ()
        stacked = jax.device_put(self._value, self.replica_mesh.split) if any(self.logical_axes) else self._value
        return tuple(jnp.squeeze(part, 0) for _, part in mesh_components(stacked))

    @property
    def sharding(self) -> NamedSharding:
        """Where the components are: each on its replica, divided over its logical devices if the variable is."""
        return self.replica_mesh.stacked(self.logical_axes) if any(self.logical_axes) else self.replica_mesh.split

    @property
    def value_sharding(self) -> NamedSharding:
        mesh = self.replica_mesh
        return (
            NamedSharding(mesh.mesh, PartitionSpec(*self.logical_axes)) if any(self.logical_axes) else mesh.replicated
        )

    @property
    def components(self) -> PerReplica | None:
        """What is stored, to be assigned again as it is; `None` if the value is with a running `fit`."""
        return None if self._value is None else PerReplica(stacked=self._value)

    def _checked(self, value: Any) -> Any:
        if isinstance(value, PerReplica) and value.stacked is not None and value.stacked.shape[1:] == self.shape:
            return value
        return super()._checked(value)

    def _direct_assign(self, value: Any) -> None:
        if isinstance(value, PerReplica):
            stacked = jnp.asarray(_owned(value.stacked), self._dtype)
            self._value = jax.device_put(stacked, self.sharding) if any(self.logical_axes) else stacked
            return
        value = self.replica_mesh.put(_strong(value), self.value_sharding)  # It may be on one device, for good.
        self._value = self._spread(value)

    def _spread(self, value: Any) -> jax.Array:
        return _spread(self.replica_mesh, self.aggregation == "sum", self.logical_axes)(value)

    def _assign_change(self, change: Any) -> Any:
        """Changes each component, so that what is read changes by `change` and no replica's own state is lost."""
        current = self._own_frame()
        scoped = compat.stateless_value(self)
        if scoped is not None and current.per_replica:
            value = scoped + self._write_in_program(change, current)
            compat.add_stateless_update(self, value)
            return value
        if compat.in_stateless_scope():
            return super()._assign_change(change)
        self._value = self._value + self._spread(_strong(change))
        return change if self.aggregation == "none" else self._read_stored()

    def _read_stored(self) -> Any:
        self._check_readable()
        before = _reading.before.get(id(self))
        if before is not None:
            return before
        liveness.together(self.replica_mesh.num_processes)
        return _aggregate(self.replica_mesh, self.aggregation, self.value_sharding)(self._value)

    def _read_in_program(self, scoped: Any, current: Frame) -> Any:
        if not (current.per_replica and current.mode is Mode.CROSS):
            return scoped
        self._check_readable()
        return _combined(self.aggregation, scoped)

    def _write_in_program(self, value: Any, current: Frame) -> Any:
        if current.per_replica and current.mode is Mode.CROSS and self.aggregation == "sum":
            return _of_first(value)
        return value

    def _check_readable(self) -> None:
        if self.aggregation == "none":
            raise AggregationError(
                f"The components of {self.path!r} have no aggregation, so they cannot be read as one value.",
                received='a variable with synchronization="on_read", aggregation="none".',
                fix='create it with aggregation="sum", "mean" or "only_first_replica", or read it inside strategy.run.',
            )

    def __repr__(self) -> str:
        if self.aggregation == "none":
            return f"<SyncOnReadVariable path={self.path}, shape={self.shape}, dtype={self.dtype}, aggregation=none>"
        return super().__repr__()


def choose_class(arguments: dict[str, Any]) -> type[DistributedVariable] | None:
    """The class of a variable that is created now, from its named arguments; `None` for Keras's own.

    Explicit `synchronization` or `aggregation` win. Otherwise trainable and optimizer variables are mirrored, metric
    variables are created `on_read` by Keras, floating state of layers that is not trained (batch normalization's moving
    statistics) is sync-on-read with the mean, gradient accumulators sync-on-read with the sum, all else is mirrored.

    A `keras.distribution` opened inside the scope is the inner one, and places the variable.

    Raises:
        AggregationError: For `synchronization="none"`, as in TensorFlow.
    """
    if not context.has_strategy() or keras.distribution.distribution() is not None:
        return None
    synchronization = arguments.get("synchronization", "auto")
    aggregation = arguments.get("aggregation", "none")
    if synchronization in ("none", None):
        raise AggregationError(
            'synchronization="none" has no meaning for a variable on several replicas.',
            received=f"keras.Variable(..., synchronization={synchronization!r}) in the scope of "
            f"{context.get_strategy()!r}.",
            fix='synchronization="auto", "on_write" or "on_read".',
        )
    if synchronization == "on_read":
        return SyncOnReadVariable
    if synchronization == "auto":
        if compat.is_gradient_accumulator():
            return SyncOnReadVariable
        untrained = not arguments.get("trainable", True) and aggregation in ("none", None)
        dtype = keras.backend.standardize_dtype(arguments.get("dtype"))
        if untrained and compat.is_layer_state() and keras.backend.is_float_dtype(dtype):
            return SyncOnReadVariable
    return MirroredVariable


class _Reading(threading.local):
    def __init__(self) -> None:
        self.before: dict[int, Any] = {}


_reading = _Reading()


@contextlib.contextmanager
def read_before(variables: Sequence[DistributedVariable]) -> Generator[None]:
    """Reads the components of `variables` now, with all processes; in the `with` block each can read on its own."""
    divided = (v for v in variables if isinstance(v, MirroredVariable) and (v._divided or any(v.logical_axes)))
    readable = (v for v in variables if isinstance(v, SyncOnReadVariable) and v.aggregation != "none")
    before = _reading.before
    values = {id(v): on_host(v._read_stored()) for v in (*readable, *divided) if v.stored is not None}
    _reading.before = {key: jnp.asarray(value) for key, value in values.items()}
    try:
        yield
    finally:
        _reading.before = before


def check_same_values(variables: Sequence[DistributedVariable]) -> None:
    """Raises where the processes have given mirrored variables different values; across replicas, before a program.

    Raises:
        VariableScopeError: Names the variables.
    """
    mirrored = [v for v in variables if isinstance(v, MirroredVariable) and v.stored is not None and not v._divided]
    count = max((v.replica_mesh.num_processes for v in mirrored), default=1)
    if count == 1:
        return
    own = [(tuple(v.shape), zlib.crc32(on_host(v.stored).tobytes())) for v in mirrored]  # type: ignore[arg-type]
    said = agreement.exchange("the values of variables", own, count)
    if any(len(other) != len(own) for other in said):
        raise VariableScopeError(
            "The processes run programs over different variables.",
            received=f"{', '.join(str(len(other)) for other in said)} variables.",
            fix="build the same model in every process.",
        )
    differing = [v.path for i, v in enumerate(mirrored) if len({other[i] for other in said}) > 1]
    if differing:
        raise VariableScopeError(
            f"The processes have given different values to {len(differing)} mirrored variable(s): "
            f"{', '.join(differing[:20])}.",
            received=f"{count} processes.",
            fix="assign the same values in every process: kd.run_on_chief(make_values) gives all of them the chief's.",
        )


class _Giving(threading.local):
    away = False


_giving = _Giving()


@contextlib.contextmanager
def given_away() -> Generator[None]:
    """Arrays assigned in this `with` block are the variables' from now on: nobody else uses them."""
    before, _giving.away = _giving.away, True
    try:
        yield
    finally:
        _giving.away = before


def _owned(value: Any) -> Any:
    """A copy of an array that the caller holds: a variable's own is given to each step, which deletes it."""
    if isinstance(value, keras.Variable | Mirrored):
        value = value.value
    kept = isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer) and not _giving.away
    return jnp.copy(value) if kept else value


def _of_first(value: Any) -> Any:
    """The value on the first replica, zeros on the others; inside a program."""
    return jnp.where(lax.axis_index(REPLICA_AXIS) == 0, value, jnp.zeros_like(value))


def _combined(aggregation: str, value: Any) -> Any:
    """The replicas' values as one, by an aggregation other than `"none"`; inside a program."""
    value = of_this_replica(value)
    total = lax.psum(_of_first(value) if aggregation == "only_first_replica" else value, REPLICA_AXIS)
    return (total / lax.axis_size(REPLICA_AXIS) if aggregation == "mean" else total).astype(value.dtype)


def _strong(value: Any) -> Any:
    """Without JAX's weak type, which a Python number leaves: the programs that follow would compile twice."""
    return lax.convert_element_type(value, value.dtype) if getattr(value, "weak_type", False) else value


@functools.lru_cache(maxsize=256)
def _spread(mesh: ReplicaMesh, first_only: bool, axes: tuple[Any, ...] = ()) -> Any:
    """A program from one value to the stored components: the value for each, or for the first and zeros."""

    def spread(value: jax.Array) -> jax.Array:
        shape = (mesh.num_replicas, *value.shape)
        if first_only:
            return jnp.zeros(shape, value.dtype).at[0].set(value)
        return jnp.broadcast_to(value, shape)

    return jax.jit(spread, out_shardings=mesh.stacked(axes) if any(axes) else mesh.split)


def spread_sum(mesh: ReplicaMesh) -> Any:
    """A program from one value to components that add up to it."""
    return _spread(mesh, True)


@functools.lru_cache(maxsize=256)
def _aggregate(mesh: ReplicaMesh, aggregation: str, sharding: NamedSharding) -> Any:
    """A program from the stored components to the value that a read across replicas gives."""

    def aggregate(stacked: jax.Array) -> jax.Array:
        if aggregation == "only_first_replica":
            return stacked[0]
        total = jnp.sum(stacked, 0, dtype=stacked.dtype)
        if aggregation == "sum":
            return total
        # XLA multiplies by 1 / n: the mean of three equal numbers would be another number.
        equal = jnp.all(stacked == stacked[:1], 0)
        return jnp.where(equal, stacked[0], (total / mesh.num_replicas).astype(stacked.dtype))

    return jax.jit(aggregate, out_shardings=sharding)
