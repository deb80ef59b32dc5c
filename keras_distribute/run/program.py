"""From a traced function of one replica to a compiled program over all of them, with
state in and out.

A call of `Strategy.run` becomes `jax.jit(jax.shard_map(...))`, compiled once for the
function, the structure, shapes and dtypes of its arguments, and their Python values.
Mirrored variables that it assigns are proved to get the same value on every replica;
`devices/replication_proof.py` says how. Knows no trainer.
"""

from __future__ import annotations

import collections
import functools
import sys
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.sharding import PartitionSpec

from keras_distribute import checks
from keras_distribute._compat import jax_internals, tensorflow
from keras_distribute._compat.variables import in_stateless_scope
from keras_distribute.cluster import liveness
from keras_distribute.cluster.same_programs import check_same_program
from keras_distribute.context import AnyStrategy, Mode
from keras_distribute.devices import replication_proof
from keras_distribute.devices.compiler_options import joined
from keras_distribute.devices.launches import Executable, launches
from keras_distribute.devices.mesh import REPLICA_AXIS, copied_to_devices
from keras_distribute.devices.over_replicas import over_replicas
from keras_distribute.devices.placement import Placement
from keras_distribute.errors import AggregationError, ContextError
from keras_distribute.run import tracing
from keras_distribute.run.arguments import Call, Static, in_trace_error
from keras_distribute.run.traces import Trace
from keras_distribute.run.whole_variables import check_gathered
from keras_distribute.types import RunOptions
from keras_distribute.values.arrays import kept
from keras_distribute.values.per_replica import PerReplica
from keras_distribute.variables import (
    DistributedVariable,
    Holder,
    Part,
    Standing,
    SyncOnReadVariable,
    check_assigned,
    check_same_values,
    is_due,
)

_MANY_FUNCTIONS = 8
_FIX = (
    "the same function in every process; a value that differs is an argument: "
    "strategy.experimental_distribute_values_from_function(lambda _: value)."
)
_OWN = object()  # A result that is the function, or the object whose method it is.


class ProgramCache:
    """The compiled programs of one strategy, by function and signature; forgotten with
    the function, or the object whose method it is, unless that takes no weak reference.
    """

    def __init__(self) -> None:
        self._by_anchor: dict[int, tuple[Any, dict[Any, Any]]] = {}
        self._functions_of_code: collections.Counter[Any] = collections.Counter()

    def programs_of(
        self, function: Callable[..., Any], by: str = "strategy.run"
    ) -> dict[Any, _Program]:
        """The programs compiled from `function`, to look up and to add to; `by` is what
        the user has called.
        """
        anchor, code = _anchored(function)
        key = id(anchor)
        if key not in self._by_anchor:
            try:
                held = weakref.ref(anchor, lambda _: self._by_anchor.pop(key, None))
            except TypeError:
                held = anchor
            self._by_anchor[key] = (held, {})
            # Of methods each object has its own, as each model has of its steps.
            if anchor is function or anchor is held:
                self._warn_if_made_anew(function, by)
        return self._by_anchor[key][1].setdefault(code, {})

    def _warn_if_made_anew(self, function: Callable[..., Any], by: str) -> None:
        key: Any = getattr(function, "__code__", None)
        if isinstance(function, functools.partial):
            function = function.func
            code = getattr(function, "__code__", None)
            owner = getattr(function, "__self__", None if code else function)
            key = code, id(owner)
        if key is None:
            return
        self._functions_of_code[key] += 1
        if self._functions_of_code[key] == _MANY_FUNCTIONS:
            name = getattr(function, "__qualname__", type(function).__qualname__)
            warnings.warn(
                f"{by} has compiled {name!r} {_MANY_FUNCTIONS} times, since each call "
                "passed a new function object. Define the function once, outside the "
                "loop.",
                stacklevel=5,
            )


def _anchored(function: Callable[..., Any]) -> tuple[Any, Any]:
    """What lasts as long as the programs of a function, and which of its functions it
    is.

    A bound method is a new object at each access: its object and its function last.
    Equal is not the same here. Of a function in C, as `operator.add`, the object may be
    its module, in which it has a name.
    """
    anchor = getattr(function, "__self__", None)
    if anchor is None:
        return function, None
    code = getattr(function, "__func__", None)
    return anchor, getattr(function, "__name__", None) if code is None else code


def run(
    strategy: AnyStrategy,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    mode: Mode = Mode.REPLICA,
    options: RunOptions | None = None,
) -> Any:
    """Runs `function` on every replica of `strategy`.

    Args:
        args: `PerReplica` become this replica's component; arrays are the same on every
            replica; variables and other objects are passed as they are.

    Returns:
        What `function` returns, with a `PerReplica` for each array.

    Raises:
        ContextError: Inside a function that JAX or TensorFlow traces, or a
            `keras.StatelessScope`.
    """
    if jax_internals.is_tracing():
        raise in_trace_error("a call while JAX traces a function.")
    if tensorflow.is_tracing():
        raise in_trace_error("a call while TensorFlow traces a function.")
    if in_stateless_scope():
        raise ContextError(
            "A program of strategy.run takes no values from a keras.StatelessScope.",
            received="a call inside of one.",
            fix="assign the variables, and call strategy.run outside; or open the "
            "scope in the function given to it.",
        )
    call = Call(args, kwargs, strategy.replica_mesh)
    programs = strategy.programs.programs_of(function)
    own, _ = _anchored(function)
    key = (call.signature, mode, None if options is None else repr(options))
    program = programs.get(key)
    if program is None:
        guess = next((list(other.variables) for other in programs.values()), [])
        with strategy.replica_mesh.tracing():
            trace, variables = tracing.traced(strategy, function, call, mode, guess)
        # Its programs, which are forgotten with it, must not hold it.
        trace.leaves = [_OWN if leaf == Static(own) else leaf for leaf in trace.leaves]
        check_same_values(variables)
        count = strategy.replica_mesh.num_processes
        check_same_program("in run", trace.program, count, _FIX)
        check_gathered(variables, strategy.replica_mesh)
        if any(variable.trainable for variable in variables):
            strategy.placement.check_layouts([variable.path for variable in variables])
        program = programs[key] = _Program(strategy, trace, call, variables, options)
        if len(programs) == _MANY_FUNCTIONS and any(
            isinstance(leaf, Static) for leaf in call.leaves
        ):
            warnings.warn(
                "strategy.run has compiled "
                f"{getattr(function, '__qualname__', function)!r} {len(programs)} "
                "times, once for each new shape and each new Python value among its "
                "arguments. Pass numbers that change as arrays: np.int32(step).",
                stacklevel=3,
            )
    return program(list(map(kept, call.arrays)), own)


class _Program:
    """A compiled program with its variables."""

    def __init__(
        self,
        strategy: AnyStrategy,
        trace: Trace,
        call: Call,
        variables: Sequence[Any],
        options: RunOptions | None,
    ) -> None:
        self.variables = tuple(variables)
        self._trace, self._split = trace, list(call.split)
        self._mesh = strategy.replica_mesh
        self._donated = strategy.placement.donated
        places = {id(variable): i for i, variable in enumerate(self.variables)}
        self.written = [places[id(v)] for v in trace.written if id(v) in places]
        written = set(self.written)
        self.read = [i for i in range(len(self.variables)) if i not in written]
        self._local = [isinstance(v, SyncOnReadVariable) for v in self.variables]
        if self._mesh.num_replicas > 1:
            self._check_equal()
        self.jitted = self._jitted(options)
        self._holder = _Written(
            [self.variables[i] for i in self.written], strategy.placement
        )
        self._executables: dict[Any, Executable] = {}
        self._calls = 0

    def _check_equal(self) -> None:
        """Raises where replicas would assign different values to mirrored variables."""
        differing = self._differing(self._local)
        if differing:
            raise _differing_error(differing, self._causes())

    def _differing(self, local: Sequence[bool]) -> list[Any]:
        """The mirrored variables to which replicas would assign different values, where
        they have components of their own of those variables that are `local`.
        """
        same = [not split for split in [*local, *self._split]]
        equal = replication_proof.equal_on_all_replicas(self._trace.program, same)
        assigned = zip(self.written, equal[len(self._trace.shapes) :], strict=True)
        return [
            self.variables[i] for i, same in assigned if not same and not self._local[i]
        ]

    def _causes(self) -> list[Any]:
        """The variables whose components alone make the assigned values differ; none
        where something else does.
        """
        count = len(self.variables)
        if self._differing([False] * count):
            return []
        return [
            variable
            for i, variable in enumerate(self.variables)
            if self._local[i] and self._differing([j == i for j in range(count)])
        ]

    def _of_one_replica(self) -> Callable[..., Any]:
        """The traced program on what one replica gets: of values with an axis for the
        replicas, a part of length one.
        """
        evaluate = core.jaxpr_as_fun(self._trace.program)
        order, num_results = [*self.written, *self.read], len(self._trace.shapes)
        local, split = self._local, self._split

        def body(written: list[Any], read: list[Any], arrays: list[Any]) -> Any:
            values: list[Any] = [None] * len(order)
            for i, value in zip(order, [*written, *read], strict=True):
                values[i] = value[0] if local[i] else value
            own = [a[0] if part else a for a, part in zip(arrays, split, strict=True)]
            # A constant is a number.
            outputs = [
                output if isinstance(output, jax.Array) else jnp.asarray(output)
                for output in evaluate(*values, *own)
            ]
            results = [output[None] for output in outputs[:num_results]]
            new = zip(self.written, outputs[num_results:], strict=True)
            return results, [value[None] if local[i] else value for i, value in new]

        return body

    def _jitted(self, options: RunOptions | None) -> Any:
        """The program over all replicas: from the values of assigned variables, which
        it deletes, of others, and the arguments, to results and new values.
        """

        def spec(split: bool) -> PartitionSpec:
            return PartitionSpec(REPLICA_AXIS) if split else PartitionSpec()

        written = [spec(self._local[i]) for i in self.written]
        read = [spec(self._local[i]) for i in self.read]
        results = [spec(True)] * len(self._trace.shapes)
        mapped = over_replicas(
            self._mesh,
            self._of_one_replica(),
            in_specs=(written, read, list(map(spec, self._split))),
            out_specs=(results, written),
        )
        # Variables come back as they are stored, or the second call would compile
        # again. What the compiler chooses to divide over logical devices would not be
        # one component on each replica.
        stored = [self.variables[i].carried_sharding for i in self.written]
        given = [_sharding_of(self.variables[i]) for i in self.read]
        outputs = self._mesh.split if self._mesh.logical_axes else None

        def program(written: list[Any], read: list[Any], arrays: list[Any]) -> Any:
            written = copied_to_devices(written, stored)
            return mapped(written, copied_to_devices(read, given), arrays)

        return jax.jit(
            program,
            donate_argnums=self._donated,
            out_shardings=(outputs, stored),
            compiler_options=self._compiler_options(options),
        )

    def _compiler_options(self, options: RunOptions | None) -> dict[str, Any] | None:
        chosen = options and options.experimental_xla_options
        return joined(self._mesh.compiler_options, chosen)

    def __call__(self, arrays: list[Any], own: Any) -> Any:
        if is_due(self._calls):
            check_assigned(self.variables)
        self._calls += 1
        holder = self._holder
        program = self._executable(arrays)
        program.compile()  # Before `lock` is taken: others may run programs meanwhile.
        with launches.lock:
            written = holder.take()
            read = [_stored(self.variables[i]) for i in self.read]
            liveness.current.begin_step("in run", self._mesh.num_processes)
            program.launch(holder.landing, written, read, arrays)
            results = holder.landed()
            holder.is_running = False
        left = map(_per_replica, results, self._trace.shapes)
        leaves = [
            next(left) if leaf is None else own if leaf is _OWN else leaf.value
            for leaf in self._trace.leaves
        ]
        return jax.tree.unflatten(self._trace.structure, leaves)

    def _executable(self, arrays: list[Any]) -> Executable:
        """The program for arguments on these devices, of the signature's shapes."""
        where = tuple(getattr(array, "sharding", None) for array in arrays)
        found = self._executables.get(where)
        if found is None:
            written, read = (
                [_form_of(self.variables[i]) for i in indices]
                for indices in (self.written, self.read)
            )
            found = Executable(self.jitted, written, read, arrays)
            self._executables[where] = found
        return found


class _Written(Holder):
    """What has the values of the variables that a program assigns: their arrays."""

    def __init__(self, variables: Sequence[Any], placement: Placement) -> None:
        super().__init__(enumerate(variables), placement)

    def take(self) -> list[Any]:
        state = super().take() if self.changed or self.landing else []
        # Whoever has read a variable may still hold its array, and a donated array is
        # deleted. References: the list's, and the argument of getrefcount. (A variable
        # of the loop would be one more, and what `enumerate` keeps another.)
        for i in range(len(state)):
            if sys.getrefcount(state[i]) > 2:
                state[i] = jnp.copy(state[i])
        return state

    def _with(self, changed: dict[int, Any]) -> list[Any]:
        state = list(self.landing[-1][1]) if self.landing else [None] * len(changed)
        for i, variable in changed.items():
            state[i] = variable.stored
        return state

    def forget(self, place: int) -> None:
        self.landing[-1][1][place] = None

    def standing(self, links: Sequence[tuple[int, Any]]) -> list[Standing]:
        arrays = self.landing[-1][1]
        return [
            self._standing_at(place, [Part(variable, 0, arrays[place].size)])
            for place, variable in links
        ]

    def _array(self, place: int, variable: Any) -> Any:
        return self.landing[-1][1][place]


def _stored(variable: Any) -> Any:
    """The array that a program takes for a variable."""
    return (
        variable.carried
        if isinstance(variable, DistributedVariable)
        else variable.value
    )


def _sharding_of(variable: Any) -> Any:
    """Where that is; `None` for Keras's own."""
    ours = isinstance(variable, DistributedVariable)
    return variable.carried_sharding if ours else None


def _form_of(variable: Any) -> Any:
    """Of the array that a variable keeps."""
    shape = tuple(variable.shape)
    if isinstance(variable, SyncOnReadVariable):
        shape = (variable.replica_mesh.num_replicas, *shape)
    if isinstance(variable, DistributedVariable):
        return jax.ShapeDtypeStruct(
            shape, variable._dtype, sharding=variable.carried_sharding
        )
    return variable.value


def _per_replica(array: jax.Array, shapes: Any) -> PerReplica:
    if shapes is None:
        return PerReplica(stacked=array)
    return PerReplica(padded=array, shapes=shapes)


def _differing_error(variables: list[Any], causes: list[Any]) -> AggregationError:
    lines = ", ".join(f"{v.path} {tuple(v.shape)}" for v in variables)
    received = (
        "an assignment in a program over all replicas, to variables with "
        'aggregation="none".'
    )
    fix = (
        'combine the value first, kd.get_replica_context().all_reduce("SUM", '
        "value), or create the variable with "
        'aggregation="sum", "mean" or "only_first_replica", or with '
        'synchronization="on_read".'
    )
    if causes:
        names = checks.listed([variable.path for variable in causes], most=10)
        received = (
            f"values that are computed from {names}, of which each replica has a "
            "component of its own."
        )
        fix = (
            "have one value on all replicas: self.add_weight(..., trainable=False, "
            'aggregation="only_first_replica") for state that follows from weights '
            'alone, aggregation="mean" for other state.'
        )
    return AggregationError(
        f"The replicas would assign different values to {len(variables)} mirrored "
        f"variable(s):\n    {lines}",
        received=received,
        fix=fix,
    )
