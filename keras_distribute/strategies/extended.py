"""`StrategyExtended`: the half of a strategy that library code uses. Knows no strategy
by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import keras

from keras_distribute import checks, context
from keras_distribute.cluster import liveness
from keras_distribute.context import Frame, Mode
from keras_distribute.devices.names import name_of
from keras_distribute.errors import VariableScopeError
from keras_distribute.run import program
from keras_distribute.run.replica_context import own_part
from keras_distribute.strategies import reducing
from keras_distribute.strategies.deprecated import AbsentNames
from keras_distribute.types import CommunicationOptions, ReduceOp
from keras_distribute.values import structures
from keras_distribute.values.cross_device_ops import CrossDeviceOps, checked_pairs
from keras_distribute.values.per_replica import DistributedValues, PerReplica


class StrategyExtended(AbsentNames):
    """The part of a strategy for library code. Source:
    `tf.distribute.StrategyExtended`.
    """

    def __init__(self, strategy: Any, cross_device_ops: CrossDeviceOps) -> None:
        self._strategy = strategy
        self._cross_device_ops = cross_device_ops

    @property
    def cross_device_ops(self) -> CrossDeviceOps:
        """How values are reduced over the replicas."""
        return self._cross_device_ops

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """The names of the devices that run the replicas, in replica order; of several
        logical ones, the first.
        """
        return tuple(map(name_of, self._strategy.replica_mesh.first_devices))

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """The names of the devices that hold the variables: those of the replicas; of a
        central storage the device that it is on, of host memory `"cpu:0"`.
        """
        placement = self._strategy.placement
        if not placement.rests_elsewhere:
            return self.worker_devices
        device = placement.parameter_device
        return ("cpu:0" if device is None else name_of(device),)

    @property
    def experimental_require_static_shapes(self) -> bool:
        """`True`: XLA compiles a program for each shape."""
        return True

    def variable_created_in_scope(self, v: Any) -> bool:
        """Whether the variable `v` was created under this strategy's scope.

        Raises:
            StructureTypeError: For anything that is not a variable.
        """
        what = "Only variables have a scope."
        checks.instance("v", v, keras.Variable, what, "pass a keras.Variable.")
        return self._owner(v) is self._strategy

    def value_container(self, value: Any) -> Any:
        """The variable or value that a component belongs to: here always `value`
        itself.
        """
        return value

    def reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value: Any,
        destinations: Any,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """The sum or mean of a `PerReplica` over the replicas, on every replica.

        Args:
            reduce_op: `ReduceOp.SUM` or `ReduceOp.MEAN`, or its name.
            value: A `PerReplica`; what is the same on all replicas can only be
                averaged.
            destinations: Accepted for compatibility: the result is on every replica.
            options: How to pack and communicate.

        Raises:
            ContextError: Inside a replica.
        """
        return self.batch_reduce_to(reduce_op, [(value, destinations)], options)[0]

    def batch_reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Sequence[tuple[Any, Any]],
        options: CommunicationOptions | None = None,
    ) -> list[Any]:
        """`reduce_to` of several values together; one result for each pair of a value
        and its destinations.
        """
        op = ReduceOp.parse(reduce_op)
        context.require_cross_replica(
            "reduce_to",
            f'kd.get_replica_context().all_reduce("{op.name}", value)',
            self._strategy,
        )
        pairs = checked_pairs(value_destination_pairs)
        options = CommunicationOptions.checked(options)
        differing = [pair for pair in pairs if isinstance(pair[0], PerReplica)]
        liveness.current.begin_program(self._strategy.replica_mesh.num_processes)
        reduced = iter(self._cross_device_ops.batch_reduce(op, differing, options))
        return [
            next(reduced)
            if isinstance(value, PerReplica)
            else reducing.reduce_one(self._strategy, op, value, ())
            for value, _ in pairs
        ]

    def update(
        self,
        var: Any,
        fn: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: Any = None,
        group: bool = True,
    ) -> Any:
        """Calls `fn(var, *args, **kwargs)` to update one variable on every replica, in
        the update context.

        Args:
            var: A variable of this strategy.
            fn: Assigns to it. Of a `PerReplica` argument it gets each replica's
                component.
            args: Further arguments.
            kwargs: Named arguments.
            group: Whether to return nothing of the components; `False` returns them as
                a tuple.

        Raises:
            VariableScopeError: For a variable of another strategy, or of none.
            AggregationError: When the copies of a mirrored variable would come to
                differ.
        """
        if not self.variable_created_in_scope(var):
            raise VariableScopeError(
                f"The variable {var.path!r} was not created under this strategy.",
                received=f"a variable of {self._owner(var)!r}.",
                fix="create it inside `with strategy.scope():`.",
            )
        context.require_own("update", self._strategy)
        fix = "strategy.extended.update(var, lambda v, x: v.assign(x), args=(x,))"
        checks.function("fn", fn, "A variable is updated by a function of it.", fix)
        check_arguments("update", args, kwargs, fix)
        checks.flag("group", group)
        current = context.frame()
        if self._strategy is context.default_strategy():  # Keras's own variable.
            return self._updated(var, fn, args, kwargs, group)
        if current.per_replica and current.replica_context is not None:
            # As TensorFlow does: a merge_call.
            return current.replica_context.merge_call(
                lambda strategy, *a: strategy.extended.update(
                    var, fn, a, kwargs, group
                ),
                args=tuple(args),
            )
        if current.per_replica:
            given = tuple(args), dict(kwargs or {})
            args, kwargs = structures.mapped(own_part, given, is_value)
            return self._updated(var, fn, args, kwargs, group, per_replica=True)
        result = program.run(
            self._strategy, fn, (var, *args), dict(kwargs or {}), mode=Mode.UPDATE
        )
        if group:
            return result
        return jax.tree.map(
            self._strategy.experimental_local_results, result, is_leaf=is_value
        )

    def _updated(
        self,
        var: Any,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Any,
        group: bool,
        per_replica: bool = False,
    ) -> Any:
        """`update` by a call of `fn` here."""
        frame = Frame(self._strategy, Mode.UPDATE, per_replica=per_replica)
        with context.entered(frame):
            result = fn(var, *args, **(kwargs or {}))
        return result if group else (result,)

    def _owner(self, variable: Any) -> Any:
        return (
            getattr(variable, "distribute_strategy", None) or context.default_strategy()
        )


def check_arguments(what: str, args: Any, kwargs: Any, fix: str) -> None:
    """Raises `StructureTypeError` for what are no arguments of a function."""
    tuples, names = (tuple, list), (Mapping, type(None))
    text = f"The arguments of {what} come as a tuple"
    checks.instance("args", args, tuples, f"{text}.", fix)
    checks.instance("kwargs", kwargs, names, f"{text} and a dict.", f"{fix} and kwargs")
    for name in kwargs or ():
        checks.instance("kwargs", name, str, f"{text} and a dict by name.", fix)


def is_value(leaf: Any) -> bool:
    """Whether a structure of values ends here: at a distributed value or a variable."""
    return isinstance(leaf, DistributedValues | keras.Variable)
