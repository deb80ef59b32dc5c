"""What both kinds of distributed variable have in common."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import keras
import numpy as np
from jax.sharding import NamedSharding

from keras_distribute import checks, context
from keras_distribute._compat import variables as compat
from keras_distribute._compat.jax_internals import is_tracing
from keras_distribute.context import Frame
from keras_distribute.devices.launches import launches
from keras_distribute.devices.mesh import ReplicaMesh
from keras_distribute.devices.placement import Layout
from keras_distribute.errors import (
    StructureTypeError,
    ValueStructureError,
    VariableScopeError,
)
from keras_distribute.values.per_replica import DistributedValues
from keras_distribute.variables import reading
from keras_distribute.variables.holding import Holder, Link, lost_error
from keras_distribute.variables.ownership import owned


class DistributedVariable(compat.Variable):
    """Base of the variables that live on all replicas of a strategy; made by
    `keras.Variable` under its scope.
    """

    # Its own array, or where its holder has it. While there is a link, only that
    # counts.
    _own: Any = None
    _link: Link | None = None
    # How often it was given an array by anything but a step of `fit`.
    _assignments = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._strategy = context.get_strategy()
        named = compat.named_arguments(args, kwargs)
        if "initializer" in named:
            _refuse_value_in_function(named["initializer"])
            named["initializer"] = owned(named["initializer"])
        super().__init__(**named)

    def _initialize(self, value: Any) -> None:
        self._shape = self._validate_shape(value.shape)
        if isinstance(value, jax.core.Tracer):
            # Made in a function that JAX traces, which has it as long as that: as a
            # variable of Keras's own.
            self._value = value
        else:
            self._direct_assign(value)

    def _initialize_with_initializer(self, initializer: Any) -> None:
        self._initialize(
            self._convert_to_tensor(initializer(self._shape, dtype=self._dtype))
        )

    @functools.cached_property
    def logical_axes(self) -> tuple[Any, ...]:
        """How each dimension is divided over the logical devices of a replica: mesh
        axes, or `None`.

        A slot of an optimizer has the layout of its weight, which Keras hands on.
        """
        if self._layout is None:
            placement = self._strategy.placement
            self._layout = placement.layout_of(self.path, tuple(self.shape))
        return self._layout.axes if isinstance(self._layout, Layout) else ()

    @property
    def distribute_strategy(self) -> Any:
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
    def carried_sharding(self) -> NamedSharding:
        """Where the parts of `carried` are."""
        return self.sharding

    @property
    def carried(self) -> jax.Array | None:
        """The array that a program of `run` takes."""
        return self.stored

    @property
    def in_step(self) -> Any:
        """What a step of `fit` takes between two calls."""
        return self.value

    def rested(self, value: Any) -> Any:
        """What a step of `fit` has made, where it is until the next one."""
        return value

    @property
    def is_read_together(self) -> bool:
        """Whether all processes have to take part where one reads its value."""
        raise NotImplementedError

    @property
    def _value(self) -> jax.Array | None:
        """Keras's name for the array; `None` in the middle of Keras's loops."""
        link = self._link
        return None if link is not None and link[0].is_running else self.stored

    @_value.setter
    def _value(self, value: Any) -> None:
        with launches.lock:
            link = self._link
            if link is not None:
                link[0].changed[link[1]] = self
            self._own = value
            self._link = None
            self._assignments += 1

    def _link_to(self, holder: Holder, place: Any) -> None:
        """From now on `holder` has the value, at `place`."""
        link = self._link
        if link is not None and link[0] is not holder:
            link[0].changed[link[1]] = self
        self._link = holder, place
        self._own = None
        if link is not None and link[0] is not holder:
            link[0].forget(link[1])

    def _as_stored(self, value: Any) -> Any:
        """The array that is kept for a value, or for the components of the replicas."""
        raise NotImplementedError

    def _direct_assign(self, value: Any) -> None:
        self._value = self._as_stored(value)

    @property
    def is_initialized(self) -> bool:
        """Whether it has a value, of its own or with a holder."""
        return self._link is not None or self._own is not None

    @property
    def stored(self) -> jax.Array | None:
        """The array that stands on the devices; `None` before the variable is
        initialized.
        """
        with launches.lock:  # Another thread's step may take it meanwhile.
            link = self._link
            return self._own if link is None else link[0].stored(link[1], self)

    @property
    def values(self) -> tuple[jax.Array, ...]:
        """The components on this process's replicas, in replica order."""
        if compat.in_stateless_scope():
            return (self.value,)
        return self._components() if self.is_initialized else ()

    @property
    def value(self) -> Any:
        """The value in the current context; see the table at the top of this file."""
        scoped = compat.stateless_value(self)
        if scoped is not None:
            return self._maybe_autocast(self._read_in_program(scoped, context.frame()))
        if not self.is_initialized:
            if self._initializer is None:
                raise lost_error(self)
            return self._maybe_autocast(compat.uninitialized_value(self))
        if context.is_taken(self):
            raise VariableScopeError(
                f"The variable {self.path!r} was read in a step of fit, evaluate or "
                "predict, outside of the state that the step takes: the compiled step "
                "would have the value of now for ever.",
                received="a read without keras.StatelessScope: in train_step beside "
                "stateless_call, in a metric, or of the optimizer's in a loss.",
                fix="take it from `state`, which has the values of "
                "model.trainable_variables, model.non_trainable_variables, "
                "optimizer.variables and model.metrics_variables in this order; read "
                "it in a callback; or compile(..., run_eagerly=True).",
            )
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
            AggregationError: From `Strategy.run`, when the replicas would assign
                different values to a mirrored variable without aggregation.
            VariableScopeError: In the scope of another strategy; or in a function that
                JAX traces, without `keras.StatelessScope`.
        """
        is_number = type(value) in (int, float) and not self.shape
        if not is_number or compat.in_stateless_scope() or is_tracing():
            return self._assign(self._checked(value))
        # Each epoch resets its metrics: from the host takes a quarter of the time.
        self._own_frame()
        number = np.asarray(value, self._dtype)
        self._direct_assign(number)
        return jnp.asarray(number)

    def assign_add(self, value: Any) -> Any:
        """Adds `value`, which may be of a smaller shape and of another dtype, as in
        Keras; in a replica, the aggregation applies to what is added. As `assign`
        otherwise.
        """
        return self._assign_change(jnp.add, self._change(value))

    def assign_sub(self, value: Any) -> Any:
        """Subtracts `value`; in a replica, the aggregation applies to what is
        subtracted. As `assign_add` otherwise.
        """
        return self._assign_change(jnp.subtract, self._change(value))

    def _change(self, value: Any) -> Any:
        """What is added, in the variable's shape and its own dtype, as in Keras."""
        change = self._as_array(value)
        if not (compat.in_stateless_scope() or isinstance(change, jax.core.Tracer)):
            change = self.replica_mesh.within_reach(change)
        with contextlib.suppress(ValueError):  # The shape is checked in any case.
            change = jnp.broadcast_to(change, self.shape)
        return self._with_own_shape(change)

    def _checked(self, value: Any) -> Any:
        return self._with_own_shape(self._as_array(value, self._dtype))

    def _as_array(self, value: Any, dtype: Any = None) -> Any:
        if isinstance(value, DistributedValues) and not hasattr(value, "value"):
            raise StructureTypeError(
                f"A value that differs per replica cannot be assigned to {self.path!r} "
                "across replicas.",
                received=f"{value!r}.",
                fix="assign it inside strategy.run, or reduce it first: "
                'strategy.reduce("SUM", value, axis=None).',
            )
        return self._convert_to_tensor(owned(value), dtype=dtype)

    def _with_own_shape(self, value: Any) -> Any:
        if not compat.shape_equal(value.shape, self.shape):
            raise ValueStructureError(
                "The shape of the target variable and the shape of the target value in "
                f"`variable.assign(value)` must match: {self.path!r} has the shape "
                f"{tuple(self.shape)}.",
                received=f"a value of shape {tuple(value.shape)}.",
                fix="assign a value of the variable's shape.",
            )
        return value

    def _assign(self, value: Any) -> Any:
        current = self._own_frame()
        if compat.in_stateless_scope():
            compat.add_stateless_update(self, self._write_in_program(value, current))
        else:
            self._check_outlives_trace(value)
            self._direct_assign(value)
        return value

    def _check_outlives_trace(self, value: Any) -> None:
        """Raises `VariableScopeError` for a value of a program that JAX traces."""
        if isinstance(value, jax.core.Tracer):
            raise VariableScopeError(
                f"The variable {self.path!r} was assigned in a function that JAX "
                "traces: the value ends with the trace.",
                received=f"{value}.",
                fix="a function that takes and returns the values of variables, by "
                "model.stateless_call or keras.StatelessScope; or strategy.run in "
                "place of jax.jit.",
            )

    def _assign_change(self, operation: Callable[..., Any], change: Any) -> Any:
        return self._assign(self._in_own_dtype(operation(self.value, change)))

    def _own_frame(self) -> Frame:
        """The current frame, which must not be another strategy's."""
        current = context.frame()
        if context.has_strategy() and current.strategy is not self._strategy:
            raise VariableScopeError(
                f"The variable {self.path!r} lives on another strategy than the "
                "current one.",
                received=f"a variable of {self._strategy!r}, assigned in "
                f"{context.describe(current)}",
                fix="leave the other strategy's scope first.",
            )
        return current

    def _in_own_dtype(self, value: Any) -> Any:
        return jnp.asarray(value, dtype=self._dtype)

    def _in_dtype_of_sum(self, change: Any) -> Any:
        return change.astype(jnp.result_type(jnp.dtype(self._dtype), change))

    def _components(self) -> tuple[jax.Array, ...]:
        raise NotImplementedError

    def _read_in_program(self, scoped: Any, current: Frame) -> Any:
        raise NotImplementedError

    def _write_in_program(self, value: Any, current: Frame) -> Any:
        raise NotImplementedError

    def _read_stored(self) -> Any:
        known = reading.known(self)
        return known if known is not None else self._read_now()

    def _read_now(self) -> Any:
        raise NotImplementedError

    def _is_shown(self) -> bool:
        """Whether its text contains the value."""
        return self.is_initialized

    def __array__(
        self, dtype: Any = None, copy: bool | None = None
    ) -> np.ndarray[Any, Any]:
        # NumPy 2 warns where `copy` is missing, as it is in Keras's.
        array = self._on_host(dtype)
        return np.array(array) if copy else array

    def _on_host(self, dtype: Any) -> np.ndarray[Any, Any]:
        return super().__array__(dtype)

    def __repr__(self) -> str:
        value = (
            f", value={keras.ops.convert_to_numpy(self._read_stored())}"
            if self._is_shown()
            else ""
        )
        return (
            f"<{type(self).__name__} path={self.path}, shape={self.shape}, "
            f"dtype={self.dtype}, "
            f"num_replicas={self._strategy.num_replicas_in_sync}{value}>"
        )


def _refuse_value_in_function(initializer: Any) -> None:
    """Raises `VariableScopeError` for a variable that a function given to `run`, or one
    that workers run, creates from a value, which would be another one in each trace.
    """
    given = not callable(initializer) and not isinstance(initializer, str)
    if not given or not compat.in_stateless_scope():
        return
    current = context.frame()
    for_workers = current.scheduled is not None
    is_traced = current.per_replica or for_workers
    if is_traced and not compat.may_be_initialized_later():
        whose = "that workers run" if for_workers else "given to strategy.run"
        raise VariableScopeError(
            f"The function {whose} creates a variable, or calls what does, such as "
            "load_weights and load_model.",
            received=f"keras.Variable({checks.shown(initializer)}) in "
            f"{context.describe(current)}",
            fix="make it once, inside `with strategy.scope():`, and use it in the "
            "function; load models and weights before.",
        )
