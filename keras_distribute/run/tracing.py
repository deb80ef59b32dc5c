"""From a function of one replica to its traced program, with the variables that it
uses. Knows no devices.

The function is traced until the set of its variables is known (twice on the first call:
variables that it reads become inputs, those that it assigns become outputs, and layers
built inside get their variables in between). Where replicas hold arrays of different
shapes, it is traced for each distinct set of shapes, and the traces are joined to one.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from keras_distribute import context
from keras_distribute._compat import jax_internals
from keras_distribute._compat import variables as compat
from keras_distribute.context import AnyStrategy, Frame, Mode
from keras_distribute.devices.launches import launches
from keras_distribute.devices.mesh import REPLICA_AXIS
from keras_distribute.errors import (
    StructureTypeError,
    ValueStructureError,
    VariableScopeError,
)
from keras_distribute.run import untraced
from keras_distribute.run.arguments import Call, Static, Variant, is_leaf
from keras_distribute.run.traces import Trace, joined
from keras_distribute.values import structures
from keras_distribute.values.per_replica import Mirrored, PerReplica
from keras_distribute.values.trace_exchange import BrokenOff, RaggedTrace, Told
from keras_distribute.variables import DistributedVariable

# That find variables which the one before had not: usually one or two.
_MOST_TRACES = 8


def traced(
    strategy: AnyStrategy,
    function: Callable[..., Any],
    call: Call,
    mode: Mode,
    guess: Sequence[Any],
) -> tuple[Trace, list[Any]]:
    """The trace of a call, and the variables that are its first inputs.

    Args:
        guess: Variables that it probably uses.

    Raises:
        VariableScopeError: For variables that it may not assign, or creates anew in
            each call.
        ValueStructureError: Where replicas with other shapes do something that is not
            one program.
    """
    variables, created, found = list(guess), list[Any](), 0
    told = Told(strategy.num_replicas_in_sync)
    while True:
        new: dict[int, Any] = {}
        traces: list[Trace] = []
        telling = [told.trace(variant.replicas) for variant in call.variants]
        for variant, ragged_trace in zip(call.variants, telling, strict=True):
            scope, trace = _trace_variant(
                strategy, function, call, mode, variables, variant, ragged_trace
            )
            known = {id(v) for v in variables}
            new |= {
                key: v
                for key, v in (scope.unknown | scope.updated).items()
                if key not in known
            }
            if trace is None:
                continue
            traces.append(trace)
            if created and scope.created:
                raise _creating_error(list(scope.created.values()))
            created = created or list(scope.created.values())
        if not told.learn(telling) and not new:
            return (
                traces[0] if len(traces) == 1 else joined(traces, variables)
            ), variables
        found += bool(new)
        if found > _MOST_TRACES:  # A model that it loads has its values at once.
            raise _creating_error(list(new.values()))
        variables = [*variables, *new.values()]


def _trace_variant(
    strategy: AnyStrategy,
    function: Callable[..., Any],
    call: Call,
    mode: Mode,
    variables: list[Any],
    variant: Variant,
    telling: RaggedTrace,
) -> tuple[Capture, Trace | None]:
    """One trace; `None` where it was broken off."""
    scope, output = Capture(strategy), dict[str, Any]()
    is_ragged = len(variant.replicas) < strategy.num_replicas_in_sync
    replica_context = strategy.make_replica_context() if mode is Mode.REPLICA else None
    frame = Frame(
        strategy,
        mode,
        replica_context,
        per_replica=True,
        ragged=telling if is_ragged else None,
    )
    local = functools.partial(
        _trace_local, function, call, frame, variables, variant, scope, output
    )
    # JAX keeps the traces of inner functions (`jit`, `checkpoint`, `scan`, ...) by
    # their context. A name that no other trace has keeps one trace from finding what
    # another left behind.
    axes = [(REPLICA_AXIS, strategy.num_replicas_in_sync), (_TraceAxis(), 1)]
    noting = _noting_folded_sums() if is_ragged else contextlib.nullcontext([])
    given = [jax.ShapeDtypeStruct(v.shape, v._dtype) for v in variables]
    try:
        with scope, noting as folded:
            program = jax.make_jaxpr(local, axis_env=axes)(given, call.shapes)
    except (BrokenOff, Exception):
        if telling.broken_off:
            return scope, None
        raise
    if telling.broken_off:  # The function has caught it.
        return scope, None
    if scope.foreign:
        raise _foreign_error(strategy, list(scope.foreign.values()))
    shapes: list[Any] = [None] * sum(leaf is None for leaf in output["leaves"])
    return scope, Trace(
        program, **output, variant=variant, shapes=shapes, folded=folded
    )


class _TraceAxis:
    """The name of an axis that no other trace has."""


@contextlib.contextmanager
def _noting_folded_sums() -> Generator[list[Any]]:
    """Collects the numbers whose `psum` JAX computes while tracing."""
    with launches.tracing, jax_internals.noting_folded_sums(REPLICA_AXIS) as folded:
        yield folded


def _trace_local(
    function: Callable[..., Any],
    call: Call,
    frame: Frame,
    variables: list[Any],
    variant: Variant,
    scope: Capture,
    output: dict[str, Any],
    values: list[Any],
    arrays: list[Any],
) -> Any:
    """One replica's call: from the values of `variables` and the arguments' arrays to
    results and assigned values.
    """
    scope.begin(variables, values)
    args, kwargs = call.rebuilt(variant.cut(arrays))
    with context.entered(frame):
        try:
            with untraced.refused(function, untraced.no_values):
                result = function(*args, **kwargs)
        except Exception as error:
            # Replicas with rows were traced before, and raised nothing.
            if variant.empty and frame.ragged is not None:
                raise _no_rows_error(variant, error) from error
            raise
    leaves, output["structure"] = structures.flatten(result, is_leaf)
    leaves = [unwrapped(leaf, "given to strategy.run") for leaf in leaves]
    output["leaves"] = [
        None if isinstance(leaf, jax.Array) else Static(leaf) for leaf in leaves
    ]
    output["written"] = list(scope.updated.values())
    written = [scope.updates[key] for key in scope.updated]
    scope.end()
    return [leaf for leaf in leaves if isinstance(leaf, jax.Array)], written


def unwrapped(leaf: Any, how: str) -> Any:
    """A leaf of what a function returned, inside of its trace: arrays as JAX's.

    Args:
        how: Whose function it is, for the error's text.
    """
    if isinstance(leaf, PerReplica) and leaf.local is not None:
        return jnp.asarray(leaf.local)
    if isinstance(leaf, Mirrored):
        return jnp.asarray(leaf.value)
    if isinstance(leaf, np.ndarray | np.generic):
        return jnp.asarray(leaf)
    if structures.tracers_in(leaf):
        raise holding_error(leaf, how)
    return leaf


def holding_error(leaf: Any, how: str) -> StructureTypeError:
    """The error for an object that would keep arrays of a trace beyond it."""
    return StructureTypeError(
        f"The function {how} returned an object that holds arrays and is no "
        "structure of them.",
        received=f"a {type(leaf).__name__}.",
        fix="return a dict, a list, a tuple or a dataclass of the arrays, or "
        "register the class with JAX: jax.tree_util.register_pytree_node.",
    )


class Capture(compat.StatelessScope):
    """A trace's stateless scope: has values of known variables, notes unknown ones."""

    def __init__(self, strategy: AnyStrategy) -> None:
        # As without a scope, `model.losses` holds what its layers added.
        super().__init__(collect_losses=True)
        self._strategy = strategy
        self.given: dict[int, Any] = {}
        self.updates: dict[int, Any] = {}
        self.updated: dict[int, Any] = {}
        self.unknown: dict[int, Any] = {}
        self.foreign: dict[int, Any] = {}
        self.created: dict[int, Any] = {}
        self._trace: Any = None

    def begin(self, variables: Sequence[Any], values: Sequence[Any]) -> None:
        """In the trace that begins here, variables have these values."""
        pairs = zip(variables, values, strict=True)
        self.given = {id(variable): value for variable, value in pairs}
        self._trace = jax_internals.current_trace()

    def end(self) -> None:
        """Nothing of this trace may be read after it."""
        self.updates, self.given, self._trace = {}, {}, None

    def get_current_value(self, variable: Any) -> Any:
        key = id(variable)
        if key in self.updates:
            return self.updates[key]
        if key in self.given:
            return self.given[key]
        ours = isinstance(variable, DistributedVariable)
        if ours and variable.distribute_strategy is not self._strategy:
            raise VariableScopeError(
                f"The variable {variable.path!r} lives on another strategy.",
                received=f"a variable of {variable.distribute_strategy!r} in "
                f"{self._strategy!r}.run.",
                fix="build the model under the strategy that runs it.",
            )
        self.unknown[key] = variable
        if not (variable.is_initialized if ours else variable._value is not None):
            self.created[key] = variable
            # Created inside the function: Keras shows its initial value until the trace
            # ends.
            return None
        return jnp.zeros(variable.shape, variable._dtype)

    def add_update(self, update: tuple[Any, Any]) -> None:
        variable, value = update
        check_kept(variable, value, self._trace)
        if not isinstance(variable, DistributedVariable):
            self.foreign[id(variable)] = variable
        self.updates[id(variable)] = value
        self.updated[id(variable)] = variable


def check_kept(variable: Any, value: Any, trace: Any) -> None:
    """Raises where a variable is assigned in a function that JAX traces apart.

    Args:
        trace: Of the code around that function, as `current_trace` gives it.
    """
    if jax_internals.is_of_inner_function(value, trace):
        raise VariableScopeError(
            f"The variable {variable.path!r} was assigned in a function that JAX "
            "traces apart: the value would end with that function, or be assigned "
            "whether it is called or not.",
            received="an assignment in a branch of lax.cond, in the body of lax.scan "
            "or another loop, or under jax.jit, jax.grad, jax.vmap or jax.checkpoint.",
            fix="return the value from that function, and assign it outside: "
            "variable.assign(keras.ops.cond(condition, f, g)); kd.value_and_grad in "
            "place of jax.grad.",
        )


def _no_rows_error(variant: Variant, error: Exception) -> ValueStructureError:
    replicas = ", ".join(map(str, variant.replicas))
    return ValueStructureError(
        "The function given to strategy.run failed for arrays without rows, which "
        f"replica(s) {replicas} got.",
        received=f"{type(error).__name__}: {error}",
        fix="drop the last batch, dataset.batch(size, drop_remainder=True), or give "
        "each replica a row: a last batch of at least as many rows as replicas.",
    )


def _creating_error(variables: list[Any]) -> VariableScopeError:
    names = ", ".join(f"{v.path} {tuple(v.shape)}" for v in variables)
    return VariableScopeError(
        "The function given to strategy.run creates variables each time it is "
        f"called:\n    {names}",
        received="a layer, metric or seed generator that is made inside the function, "
        "or a model that is loaded there.",
        fix="make it once, inside `with strategy.scope():`, and use it in the "
        "function.",
    )


def _foreign_error(strategy: AnyStrategy, variables: list[Any]) -> VariableScopeError:
    names = ", ".join(f"{v.path} {tuple(v.shape)}" for v in variables)
    return VariableScopeError(
        f"{len(variables)} variable(s) that strategy.run assigns live on one device, "
        f"the strategy has {strategy.num_replicas_in_sync} replica(s):\n    {names}",
        fix="create the model, the optimizer and the metrics inside `with "
        "strategy.scope():`.",
    )
