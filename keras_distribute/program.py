"""From a function of one replica to a compiled program over all of them, with state in and out. Knows no trainer.

A call of `Strategy.run` becomes `jax.jit(jax.shard_map(...))`, compiled once for the function, the structure, shapes
and dtypes of its arguments, and their Python values. The function is traced until the set of variables that it uses is
known (twice on the first call: variables that it reads become inputs, those that it assigns become outputs, and layers
built inside get their variables in between). Mirrored variables that it assigns are proved to get the same value on
every replica; `replication.py` says how.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import sys
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.core
import jax.dtypes
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.sharding import PartitionSpec

from keras_distribute import context, replication
from keras_distribute._compat import variables as compat
from keras_distribute.context import Frame, Mode
from keras_distribute.errors import AggregationError, ContextError, ValueStructureError, VariableScopeError
from keras_distribute.mesh import REPLICA_AXIS, ReplicaMesh
from keras_distribute.types import RunOptions
from keras_distribute.values import Mirrored, PerReplica
from keras_distribute.variables import DistributedVariable, SyncOnReadVariable, taken_error

if TYPE_CHECKING:
    from keras_distribute.strategies.base import Strategy

_MANY_FUNCTIONS = 8
_traces = itertools.count()


class ProgramCache:
    """The compiled programs of one strategy, by function and signature; forgotten with the function."""

    def __init__(self) -> None:
        self._by_anchor: dict[int, tuple[weakref.ref[Any], dict[Any, Any]]] = {}
        self._functions_of_code: collections.Counter[Any] = collections.Counter()

    def programs_of(self, function: Callable[..., Any]) -> dict[Any, _Program]:
        """The programs compiled from `function`, to look up and to add to."""
        # A bound method is a new object at each access: its object and its function last. Equal is not the same here.
        anchor, code = getattr(function, "__self__", function), getattr(function, "__func__", None)
        key = id(anchor)
        if key not in self._by_anchor:
            try:
                reference = weakref.ref(anchor, lambda _: self._by_anchor.pop(key, None))
            except TypeError:  # Nothing to hang the programs on.
                return {}
            self._by_anchor[key] = (reference, {})
            self._warn_if_made_anew(function)
        return self._by_anchor[key][1].setdefault(code, {})

    def _warn_if_made_anew(self, function: Callable[..., Any]) -> None:
        code = getattr(function, "__code__", None)
        if code is None:
            return
        self._functions_of_code[code] += 1
        if self._functions_of_code[code] == _MANY_FUNCTIONS:
            warnings.warn(
                f"strategy.run has compiled {function.__qualname__!r} {_MANY_FUNCTIONS} times, since each call passed "
                "a new function object. Define the function once, outside the loop.",
                stacklevel=5,
            )


def run(
    strategy: Strategy,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    mode: Mode = Mode.REPLICA,
    options: RunOptions | None = None,
) -> Any:
    """Runs `function` on every replica of `strategy`.

    Args:
        strategy: Where to run.
        function: Called, while traced, with one replica's arguments.
        args: `PerReplica` become this replica's component; arrays are the same on every replica; variables and other
            objects are passed as they are.
        kwargs: Likewise.
        mode: The context that `function` sees.
        options: Compiler options.

    Returns:
        What `function` returns, with a `PerReplica` for each array.
    """
    call = _Call(args, kwargs, strategy.replica_mesh)
    programs = strategy.programs.programs_of(function)
    key = (call.signature, mode, None if options is None else repr(options))
    program = programs.get(key)
    if program is None:
        guess = next((list(other.variables) for other in programs.values()), [])
        program = programs[key] = _trace(strategy, function, call, mode, guess, options)
        if len(programs) == _MANY_FUNCTIONS and any(isinstance(leaf, _Static) for leaf in call.leaves):
            warnings.warn(
                f"strategy.run has compiled {getattr(function, '__qualname__', function)!r} {len(programs)} times, "
                "once for each new shape and each new Python value among its arguments. Pass numbers that change as "
                "arrays: np.int32(step).",
                stacklevel=3,
            )
    return program(call.arrays)


@dataclasses.dataclass(frozen=True)
class _Static:
    """A leaf that is no array: part of the program's signature."""

    value: Any

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Static) or type(self.value) is not type(other.value):
            return False
        same = _by_value(self.value) and self.value == other.value and repr(self.value) == repr(other.value)
        return self.value is other.value or same  # 0.0 == -0.0, but they compute differently.

    def __hash__(self) -> int:
        return hash((type(self.value), self.value if _by_value(self.value) else id(self.value)))


def _by_value(value: Any) -> bool:
    return isinstance(value, bool | int | float | complex | str | bytes | None | type | np.dtype)


class _Call:
    """The arguments of one call, as arrays and a hashable signature."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], mesh: ReplicaMesh) -> None:
        leaves, self.structure = jax.tree.flatten((args, kwargs), is_leaf=_is_leaf)
        self.arrays: list[Any] = []
        self.split: list[bool] = []
        self.leaves: list[Any] = []
        for leaf in leaves:
            array, split = _as_array(leaf, mesh)
            if array is None:
                self.leaves.append(_Static(leaf))
                continue
            self.arrays.append(array)
            self.split.append(split)
            shape = array.shape[1:] if split else array.shape
            special = jnp.issubdtype(array.dtype, jax.dtypes.extended)  # Keys of random numbers.
            dtype = array.dtype if special else jax.dtypes.canonicalize_dtype(array.dtype)
            self.leaves.append(jax.ShapeDtypeStruct(shape, dtype))
        kinds = iter(self.split)
        self.signature = (
            self.structure,
            tuple(s if isinstance(s, _Static) else (s.shape, s.dtype, next(kinds)) for s in self.leaves),
        )

    def rebuilt(self, arrays: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with `arrays` in the place of arrays."""
        left = iter(arrays)
        leaves = [leaf.value if isinstance(leaf, _Static) else next(left) for leaf in self.leaves]
        return jax.tree.unflatten(self.structure, leaves)

    @property
    def shapes(self) -> list[jax.ShapeDtypeStruct]:
        return [leaf for leaf in self.leaves if not isinstance(leaf, _Static)]


def _is_leaf(value: Any) -> bool:
    return isinstance(value, PerReplica | Mirrored | compat.Variable) or value is None


def _as_array(leaf: Any, mesh: ReplicaMesh) -> tuple[Any, bool]:
    """The leaf as an array and whether it is split over the replicas; `(None, False)` for other objects."""
    if isinstance(leaf, PerReplica):
        if leaf.stacked is not None:
            if leaf.stacked.shape[0] != mesh.num_replicas:
                raise ValueStructureError(
                    f"A value of {leaf.stacked.shape[0]} replicas was passed to a strategy of {mesh.num_replicas}.",
                    received=f"{leaf!r}.",
                    fix="make the value with the strategy that runs the function.",
                )
            return leaf.stacked, True
        shapes = ", ".join(str(getattr(v, "shape", type(v).__name__)) for v in leaf.values)
        raise ValueStructureError(
            "The replicas run one program, so their components need one shape and dtype.",
            received=f"components {shapes}.",
            fix="pass batches that divide over the replicas, or train with model.fit, which takes any batch.",
        )
    if isinstance(leaf, Mirrored):
        leaf = leaf.value
    if isinstance(leaf, jax.core.Tracer):
        raise ContextError(
            "strategy.run was called inside another traced function.",
            received=f"{leaf!r}.",
            fix="call strategy.run outside jax.jit and jax.grad: it compiles by itself.",
        )
    if isinstance(leaf, jax.Array):
        elsewhere = leaf.committed and leaf.sharding.device_set != set(mesh.devices)
        return (jax.device_put(leaf, mesh.replicated) if elsewhere else leaf), False
    if isinstance(leaf, np.ndarray | np.generic):
        return leaf, False
    if leaf is not None and not isinstance(leaf, compat.Variable | type) and hasattr(leaf, "__array__"):
        return np.asarray(leaf), False
    return None, False


class _Capture(compat.StatelessScope):
    """The stateless scope of a trace: hands out values of known variables, and notes unknown ones."""

    def __init__(self, strategy: Strategy) -> None:
        super().__init__()
        self._strategy = strategy
        self.given: dict[int, Any] = {}
        self.updates: dict[int, Any] = {}
        self.updated: dict[int, Any] = {}
        self.unknown: dict[int, Any] = {}
        self.foreign: dict[int, Any] = {}
        self.created: dict[int, Any] = {}

    def get_current_value(self, variable: Any) -> Any:
        key = id(variable)
        if key in self.updates:
            return self.updates[key]
        if key in self.given:
            return self.given[key]
        if not isinstance(variable, DistributedVariable):
            pass
        elif variable.distribute_strategy is not self._strategy:
            raise VariableScopeError(
                f"The variable {variable.path!r} lives on another strategy.",
                received=f"a variable of {variable.distribute_strategy!r} in {self._strategy!r}.run.",
                fix="build the model under the strategy that runs it.",
            )
        self.unknown[key] = variable
        if getattr(variable, "_value", None) is None:
            if variable._initializer is None:
                raise taken_error(variable)
            self.created[key] = variable
            return None  # Created inside the function: Keras shows its initial value until the trace ends.
        return jnp.zeros(variable.shape, variable._dtype)

    def add_update(self, update: tuple[Any, Any]) -> None:
        variable, value = update
        if not isinstance(variable, DistributedVariable):
            self.foreign[id(variable)] = variable
        self.updates[id(variable)] = value
        self.updated[id(variable)] = variable


def _trace(
    strategy: Strategy,
    function: Callable[..., Any],
    call: _Call,
    mode: Mode,
    variables: list[Any],
    options: RunOptions | None,
) -> _Program:
    created: list[Any] = []
    while True:
        scope, output = _Capture(strategy), dict[str, Any]()
        local = functools.partial(_trace_local, strategy, function, call, mode, variables, scope, output)
        # JAX keeps the traces of inner functions (`jit`, `checkpoint`, `scan`, ...) by their context. A name that no
        # other trace has keeps one trace from finding what another left behind.
        axes = [(REPLICA_AXIS, strategy.num_replicas_in_sync), (f"trace {next(_traces)}", 1)]
        trace = jax.make_jaxpr(local, axis_env=axes)
        with scope:
            program = trace([jax.ShapeDtypeStruct(v.shape, v._dtype) for v in variables], call.shapes)
        if scope.foreign:
            raise _foreign_error(strategy, list(scope.foreign.values()))
        known = {id(v) for v in variables}
        new = [v for key, v in (scope.unknown | scope.updated).items() if key not in known]
        if not new:
            return _Program(strategy, program, call, variables, output, options)
        if created and scope.created:
            raise _creating_error(list(scope.created.values()))
        created = created or list(scope.created.values())
        variables = [*variables, *new]


def _trace_local(
    strategy: Strategy,
    function: Callable[..., Any],
    call: _Call,
    mode: Mode,
    variables: list[Any],
    scope: _Capture,
    output: dict[str, Any],
    values: list[Any],
    arrays: list[Any],
) -> Any:
    """One replica's call: from the values of `variables` and the arguments' arrays to results and assigned values."""
    scope.given = {id(v): value for v, value in zip(variables, values, strict=True)}
    args, kwargs = call.rebuilt(arrays)
    replica_context = strategy.make_replica_context() if mode is Mode.REPLICA else None
    with context.entered(Frame(strategy, mode, replica_context, per_replica=True)):
        result = function(*args, **kwargs)
    leaves, output["structure"] = jax.tree.flatten(result, is_leaf=_is_leaf)
    leaves = [_unwrapped(leaf) for leaf in leaves]
    output["leaves"] = [None if isinstance(leaf, jax.Array) else _Static(leaf) for leaf in leaves]
    output["written"] = list(scope.updated.values())
    # Nothing of this trace may be read after it.
    written, scope.updates, scope.given = [scope.updates[key] for key in scope.updated], {}, {}
    return [leaf for leaf in leaves if isinstance(leaf, jax.Array)], written


def _unwrapped(leaf: Any) -> Any:
    if isinstance(leaf, PerReplica) and leaf.local is not None:
        return jnp.asarray(leaf.local)
    if isinstance(leaf, Mirrored):
        return jnp.asarray(leaf.value)
    if isinstance(leaf, np.ndarray | np.generic):
        return jnp.asarray(leaf)
    return leaf


class _Program:
    """A compiled program with its variables."""

    def __init__(
        self,
        strategy: Strategy,
        program: core.ClosedJaxpr,
        call: _Call,
        variables: Sequence[Any],
        output: dict[str, Any],
        options: RunOptions | None,
    ) -> None:
        self.variables = tuple(variables)
        self._structure, self._leaves = output["structure"], output["leaves"]
        written = output["written"]
        self.written = [i for v in written for i, known in enumerate(self.variables) if known is v]
        self.read = [i for i in range(len(self.variables)) if i not in set(self.written)]
        local_split = [isinstance(v, SyncOnReadVariable) for v in self.variables]
        num_results = sum(leaf is None for leaf in self._leaves)
        same = [not split for split in local_split] + [not split for split in call.split]
        if strategy.num_replicas_in_sync > 1:
            equal = replication.equal_on_all_replicas(program, same)
        else:
            equal = [True] * len(program.jaxpr.outvars)
        differing = [
            self.variables[i]
            for i, same in zip(self.written, equal[num_results:], strict=True)
            if not same and not local_split[i]
        ]
        if differing:
            raise _differing_error(differing)

        evaluate, call_split = core.jaxpr_as_fun(program), list(call.split)
        order = [*self.written, *self.read]

        def body(written: list[Any], read: list[Any], arrays: list[Any]) -> Any:
            values: list[Any] = [None] * len(order)
            for i, value in zip(order, [*written, *read], strict=True):
                values[i] = value[0] if local_split[i] else value
            local = [a[0] if split else a for a, split in zip(arrays, call_split, strict=True)]
            outputs = evaluate(*values, *local)
            outputs = [o if isinstance(o, jax.Array) else jnp.asarray(o) for o in outputs]  # A constant is a number.
            results = [o[None] for o in outputs[:num_results]]
            new = zip(self.written, outputs[num_results:], strict=True)
            return results, [o[None] if local_split[i] else o for i, o in new]

        def spec(split: bool) -> PartitionSpec:
            return PartitionSpec(REPLICA_AXIS) if split else PartitionSpec()

        specs = [spec(split) for split in local_split]
        written_specs = [specs[i] for i in self.written]
        mapped = jax.shard_map(
            body,
            mesh=strategy.replica_mesh.mesh,
            in_specs=(written_specs, [specs[i] for i in self.read], [spec(split) for split in call.split]),
            out_specs=([PartitionSpec(REPLICA_AXIS)] * num_results, written_specs),
            check_vma=False,
        )
        compiler_options = options.experimental_xla_options if options is not None else None
        self.compiled = jax.jit(mapped, donate_argnums=0, compiler_options=compiler_options)

    def __call__(self, arrays: list[Any]) -> Any:
        variables = self.variables
        results, new = self.compiled(
            [_donatable(variables[i]) for i in self.written], [_value_of(variables[i]) for i in self.read], arrays
        )
        for i, value in zip(self.written, new, strict=True):
            variables[i]._value = value
        left = iter(results)
        leaves = [PerReplica(stacked=next(left)) if leaf is None else leaf.value for leaf in self._leaves]
        return jax.tree.unflatten(self._structure, leaves)


def _value_of(variable: Any) -> Any:
    if variable._value is None:
        raise taken_error(variable)
    return variable._value


def _donatable(variable: Any) -> Any:
    """The variable's array, to be given away: a copy if anyone else holds it, since a donated array is deleted."""
    value = _value_of(variable)
    # References: the variable's, this frame's, and the argument of getrefcount.
    return jnp.copy(value) if sys.getrefcount(value) > 3 else value


def _creating_error(variables: list[Any]) -> VariableScopeError:
    names = ", ".join(f"{v.path} {tuple(v.shape)}" for v in variables)
    return VariableScopeError(
        f"The function given to strategy.run creates variables each time it is called:\n    {names}",
        received="a layer, metric or seed generator that is made inside the function.",
        fix="make it once, inside `with strategy.scope():`, and use it in the function.",
    )


def _foreign_error(strategy: Strategy, variables: list[Any]) -> VariableScopeError:
    names = ", ".join(f"{v.path} {tuple(v.shape)}" for v in variables)
    return VariableScopeError(
        f"{len(variables)} variable(s) that strategy.run assigns live on one device, the strategy has "
        f"{strategy.num_replicas_in_sync} replica(s):\n    {names}",
        fix="create the model, the optimizer and the metrics inside `with strategy.scope():`.",
    )


def _differing_error(variables: list[Any]) -> AggregationError:
    lines = ", ".join(f"{v.path} {tuple(v.shape)}" for v in variables)
    return AggregationError(
        f"The replicas would assign different values to {len(variables)} mirrored variable(s):\n    {lines}",
        received='an assignment in a program over all replicas, to variables with aggregation="none".',
        fix='combine the value first, kd.get_replica_context().all_reduce("SUM", value), or create the variable with '
        'aggregation="sum", "mean" or "only_first_replica", or with synchronization="on_read".',
    )
