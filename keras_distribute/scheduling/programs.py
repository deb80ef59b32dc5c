"""From a function that is scheduled to the program that a worker runs.

The function is traced once for each form of its arguments. What it reads of variables
becomes inputs; what an optimizer is given becomes pushes of gradients, and the
optimizer does nothing; assignments become what is added, or set. The program travels
as bytes; the worker needs no Python of the user's.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from keras_distribute import context
from keras_distribute._compat import optimizer as compat
from keras_distribute.context import Frame, Mode
from keras_distribute.errors import (
    ContextError,
    StructureTypeError,
    ValueStructureError,
    VariableScopeError,
)
from keras_distribute.run.arguments import Call, Static, is_leaf
from keras_distribute.run.tracing import Capture
from keras_distribute.scheduling.additions import Change, added_constant, changes_of
from keras_distribute.servers.programs import exported
from keras_distribute.values import structures
from keras_distribute.values.per_replica import Mirrored, PerReplica
from keras_distribute.variables import DistributedVariable

Form = tuple[str, tuple[int, ...]]  # The dtype's name and the shape of an array.
numbers = itertools.count(1)  # Of programs, datasets and iterators, in all tasks.


class _Current(threading.local):
    trace: _Trace | None = None


_current = _Current()


@dataclasses.dataclass
class Traced:
    """A function of which is known what it reads and makes.

    Attributes:
        number: Of the program, in all tasks.
        blob: The program as bytes.
        reads: The variables on servers whose values it takes, in order.
        kept: Those of the coordinator whose values it takes, after them.
        advanced: Those to which each step adds the same, such as seeds: their values
            come after them, with the arguments of each step.
        num_args: How many arrays of arguments, then all of `elements`.
        elements: The iterators that it takes a batch of, each with the forms of arrays.
        structure: Of the results.
        forms: Of the results that are arrays.
        leaves: Their leaves: `None` for an array, and other objects as they are.
        gradients: The optimizers with the variables whose gradients come first among
            what is pushed.
        pushed: The variables on servers that are added to or set, in order.
        changes: The variables of the coordinator that are, last among the outputs.
        constants: Variables of the coordinator to which always the same is added.
        ordered: Variables that a worker cannot change without knowing all that others
            did before.
    """

    number: int
    blob: np.ndarray[Any, Any]
    reads: list[Any]
    kept: list[Any]
    advanced: list[Any]
    num_args: int
    elements: list[tuple[Any, list[Form]]]
    structure: Any
    forms: list[Any]
    leaves: list[Any]
    gradients: list[tuple[Any, list[Any]]]
    pushed: list[tuple[Change, Any]]
    changes: list[tuple[Change, Any]]
    constants: list[tuple[Any, np.ndarray[Any, Any]]]
    ordered: list[Any]

    @property
    def num_results(self) -> int:
        """How many results are arrays."""
        return sum(leaf is None for leaf in self.leaves)

    def rebuilt(self, arrays: Sequence[Any]) -> Any:
        """What the function returns, from the arrays of a worker."""
        left = iter(arrays)
        leaves = [
            jnp.asarray(next(left)) if leaf is None else leaf.value
            for leaf in self.leaves
        ]
        return jax.tree.unflatten(self.structure, leaves)


def traced(
    strategy: Any,
    function: Callable[..., Any],
    call: Call,
    on_servers: Callable[[Any], bool],
    platforms: Sequence[str],
    elements: Sequence[tuple[Any, list[Form]]] = (),
) -> Traced:
    """The program of a call.

    Args:
        strategy: Whose variables it uses.
        function: Called, while traced, with the arguments.
        call: The arguments.
        on_servers: Whether a variable is one of those that servers keep.
        platforms: Of the workers.
        elements: The forms of batches that differ from the first ones.

    Raises:
        ContextError: For weights that are read after their gradients were applied.
        VariableScopeError: For variables that it may not use, or creates in each call.
    """
    known: list[Any] = []
    batches: list[tuple[Any, list[Form]]] = list(elements)
    created = False
    while True:
        trace = _Trace(strategy, function, call, known, batches)
        program = trace.run()
        new = trace.new_variables()
        if trace.scope.created and created:
            raise _creating_error(list(trace.scope.created.values()))
        created = created or bool(trace.scope.created)
        if not new and len(trace.elements) == len(batches):
            return _Made(trace, program, on_servers).traced(platforms)
        known, batches = [*known, *new], trace.elements


def next_element(iterator: Any) -> Any:
    """A batch of an iterator that each worker has one of, inside a scheduled function.

    Raises:
        ContextError: Outside of one.
    """
    if _current.trace is None:
        raise not_an_argument()
    return _current.trace.element(iterator)


def not_an_argument() -> ContextError:
    """The error for an iterator of the workers that is read in another way."""
    return ContextError(
        "An iterator over a dataset of the workers is an argument of the function that "
        "reads it, on the workers.",
        received="next(iterator) of an iterator that is none.",
        fix="coordinator.schedule(step, args=(iterator,)), and next(iterator) in "
        "`step(iterator)`.",
    )


def current_scope() -> Capture:
    """What the scheduled function that is being traced reads and assigns by."""
    assert _current.trace is not None
    return _current.trace.scope


def is_tracing() -> bool:
    """Whether a scheduled function is being traced in this thread."""
    return _current.trace is not None


def refuse_loss_scaling(optimizer: Any) -> None:
    """Raises `StructureTypeError` for an optimizer that scales losses."""
    if compat.is_loss_scaling(optimizer):
        raise StructureTypeError(
            "Parameter servers do not scale losses: a worker does not know whether the "
            "gradients of all overflow.",
            received=f"{optimizer!r}.",
            fix="the optimizer without loss scaling, and bfloat16 for mixed "
            'precision: keras.mixed_precision.set_global_policy("mixed_bfloat16").',
        )


class _Scope(Capture):
    """Notes what a scheduled function reads and assigns."""

    def __init__(self, strategy: Any) -> None:
        super().__init__(strategy)
        self.applied: dict[int, Any] = {}

    def get_current_value(self, variable: Any) -> Any:
        if id(variable) in self.applied:
            raise ContextError(
                f"The weight {variable.path!r} is read after its gradient was given to "
                "an optimizer, whose update is made later, on a parameter server.",
                received="optimizer.apply, and then a read, in one scheduled function.",
                fix="schedule one step a call: coordinator.schedule(step, args=...).",
            )
        return super().get_current_value(variable)


class _Trace:
    """One trace of a scheduled function."""

    def __init__(
        self,
        strategy: Any,
        function: Callable[..., Any],
        call: Call,
        known: list[Any],
        elements: list[tuple[Any, list[Form]]],
    ) -> None:
        self.strategy, self.call = strategy, call
        self.known, self.elements = known, list(elements)
        self.scope = _Scope(strategy)
        self.gradients: list[tuple[Any, list[Any]]] = []
        self.written: list[Any] = []
        self.structure: Any = None
        self.leaves: list[Any] = []
        self._function = function
        self._pushed: list[Any] = []
        self._given: list[list[Any]] = []
        self._next = 0

    @property
    def shapes(self) -> list[jax.ShapeDtypeStruct]:
        """Of all inputs: variables, arguments, batches."""
        variables = [jax.ShapeDtypeStruct(v.shape, v._dtype) for v in self.known]
        batches = [
            jax.ShapeDtypeStruct(shape, dtype)
            for _, forms in self.elements
            for dtype, shape in forms
        ]
        return [*variables, *self.call.shapes, *batches]

    def run(self) -> Any:
        """The traced program: from the inputs to results, gradients and new values."""
        frame = Frame(self.strategy, Mode.CROSS, gradients=self.take_gradients)
        before, _current.trace = _current.trace, self
        try:
            with self.scope, context.entered(frame):
                return jax.make_jaxpr(self._called)(*self.shapes)
        finally:
            _current.trace = before

    def _called(self, *inputs: Any) -> list[Any]:
        left = list(inputs)
        values = [left.pop(0) for _ in self.known]
        self.scope.given = {
            id(v): value for v, value in zip(self.known, values, strict=True)
        }
        arguments = [left.pop(0) for _ in self.call.shapes]
        self._given = [[left.pop(0) for _ in forms] for _, forms in self.elements]
        args, kwargs = self.call.rebuilt(arguments)
        result = self._function(*args, **kwargs)
        leaves, self.structure = structures.flatten(result, is_leaf)
        leaves = [_as_array(leaf) for leaf in leaves]
        self.leaves = [
            None if isinstance(leaf, jax.Array) else Static(leaf) for leaf in leaves
        ]
        given = dict(self.scope.given)
        self.written = [
            variable
            for key, variable in self.scope.updated.items()
            if self.scope.updates[key] is not given.get(key)
        ]
        new = [self.scope.updates[id(variable)] for variable in self.written]
        self.scope.updates, self.scope.given = {}, {}
        arrays = [leaf for leaf in leaves if isinstance(leaf, jax.Array)]
        return [*arrays, *self._pushed, *new]

    def new_variables(self) -> list[Any]:
        """Those that this trace was the first to use."""
        known = {id(variable) for variable in self.known}
        used = self.scope.unknown | self.scope.updated
        return [variable for key, variable in used.items() if key not in known]

    def take_gradients(
        self, optimizer: Any, grads: list[Any], variables: list[Any] | None
    ) -> None:
        """Notes what an optimizer is to apply on the servers."""
        compat.build(optimizer, variables)
        refuse_loss_scaling(optimizer)
        targets = (
            list(variables)
            if variables is not None
            else compat.built_variables(optimizer)
        )
        pairs = [
            (grad, variable)
            for grad, variable in zip(grads, targets, strict=True)
            if grad is not None
        ]
        twice = [v for _, v in pairs if id(v) in self.scope.applied]
        if twice:
            raise ContextError(
                f"The weight {twice[0].path!r} is given two gradients in one scheduled "
                "function.",
                received="two calls of optimizer.apply.",
                fix="schedule one step a call, or add the gradients up.",
            )
        ready = compat.prepared(optimizer, [grad for grad, _ in pairs])
        self._pushed += map(jnp.asarray, ready)
        self.gradients.append((optimizer, [variable for _, variable in pairs]))
        self.scope.applied |= {id(variable): variable for _, variable in pairs}

    def element(self, iterator: Any) -> Any:
        """The next batch of an iterator of the workers."""
        index, self._next = self._next, self._next + 1
        if index < len(self._given):
            return iterator.rebuilt(self._given[index])
        forms = list(iterator.forms)
        self.elements.append((iterator, forms))
        self._given.append([jnp.zeros(shape, dtype) for dtype, shape in forms])
        return iterator.rebuilt(self._given[-1])


class _Made:
    """From a trace to what travels."""

    def __init__(
        self, trace: _Trace, program: Any, on_servers: Callable[[Any], bool]
    ) -> None:
        self._trace, self._program, self._on_servers = trace, program, on_servers
        self._first = len(program.jaxpr.outvars) - len(trace.written)
        self._index = {id(variable): i for i, variable in enumerate(trace.known)}

    def traced(self, platforms: Sequence[str]) -> Traced:
        """The program, exported."""
        trace, written = self._trace, self._trace.written
        pushed, changed, constants, ordered = self._sorted_changes()
        always = {id(variable) for variable, _ in constants}
        of_servers = [v for v in trace.known if self._on_servers(v)]
        kept = [
            v for v in trace.known if not self._on_servers(v) and id(v) not in always
        ]
        variables = [*of_servers, *kept, *(variable for variable, _ in constants)]
        order = [self._index[id(v)] for v in variables]
        place = {i: k for k, i in enumerate(order)}
        function = functools.partial(self._outputs, [*pushed, *changed])
        shapes = trace.shapes
        blob, used = exported(
            lambda *given: function(
                [given[place[i]] for i in range(len(order))], list(given[len(order) :])
            ),
            [*(shapes[i] for i in order), *shapes[len(order) :]],
            platforms,
            droppable=len(order),
        )
        taken = {id(variables[i]) for i in used}
        return Traced(
            number=next(numbers),
            blob=blob,
            reads=[v for v in of_servers if id(v) in taken],
            kept=[v for v in kept if id(v) in taken],
            advanced=[v for v, _ in constants if id(v) in taken],
            num_args=len(trace.call.shapes),
            elements=trace.elements,
            structure=trace.structure,
            forms=self._program.out_avals[: sum(x is None for x in trace.leaves)],
            leaves=trace.leaves,
            gradients=trace.gradients,
            pushed=[(kind, written[i]) for kind, i in pushed],
            changes=[(kind, written[i]) for kind, i in changed],
            constants=constants,
            ordered=ordered,
        )

    def _sorted_changes(
        self,
    ) -> tuple[
        list[tuple[Change, int]],
        list[tuple[Change, int]],
        list[tuple[Any, Any]],
        list[Any],
    ]:
        """What is pushed, what the coordinator is told, what is always added to its
        variables, and which of those need to know all that was done before.
        """
        written = self._trace.written
        places = [self._index[id(variable)] for variable in written]
        outputs = range(self._first, self._first + len(written))
        pushed: list[tuple[Change, int]] = []
        changed: list[tuple[Change, int]] = []
        constants: list[tuple[Any, Any]] = []
        ordered: list[Any] = []
        for i, kind in enumerate(changes_of(self._program, places, outputs)):
            variable, constant = written[i], None
            if kind is Change.SAME:
                continue
            if self._on_servers(variable):
                pushed.append((kind, i))
                continue
            if kind is Change.OTHER:
                ordered.append(variable)
                kind = Change.SET
            if kind is Change.ADDED:
                constant = added_constant(self._program, places[i], outputs[i])
            if constant is None:
                changed.append((kind, i))
            else:
                constants.append((variable, constant))
        return pushed, changed, constants, ordered

    def _outputs(
        self,
        changes: Sequence[tuple[Change, int]],
        values: list[Any],
        rest: list[Any],
    ) -> list[Any]:
        """What a worker computes: results, gradients, and what is added or set."""
        trace = self._trace
        run = core.jaxpr_as_fun(self._program)
        outputs = run(*values, *rest)
        # Of a sum of the old value and something, that is the sum with zero: XLA
        # computes what both runs share once.
        empty = list(values)
        for kind, i in changes:
            if kind is Change.ADDED:
                place = self._index[id(trace.written[i])]
                empty[place] = jnp.zeros_like(values[place])
        from_zero = run(*empty, *rest)
        new: list[Any] = []
        for kind, i in changes:
            if kind is Change.ADDED:
                new.append(from_zero[self._first + i])
            elif kind is Change.OTHER:
                old = values[self._index[id(trace.written[i])]]
                new.append(outputs[self._first + i] - old)
            else:
                new.append(outputs[self._first + i])
        return [*outputs[: self._first], *new]


def _as_array(leaf: Any) -> Any:
    if isinstance(leaf, PerReplica) and leaf.local is not None:
        return jnp.asarray(leaf.local)
    if isinstance(leaf, np.ndarray | np.generic):
        return jnp.asarray(leaf)
    if isinstance(leaf, Mirrored | DistributedVariable):
        return jnp.asarray(leaf.value)
    if not isinstance(leaf, jax.Array) and structures.holds_tracer(leaf):
        raise ValueStructureError(
            "The function that was scheduled returned an object that holds arrays and "
            "is no structure of them.",
            received=f"a {type(leaf).__name__}.",
            fix="return a dict, a list, a tuple or a dataclass of the arrays.",
        )
    return leaf


def _creating_error(variables: list[Any]) -> VariableScopeError:
    names = ", ".join(variable.path for variable in variables[:10])
    return VariableScopeError(
        f"The function that was scheduled creates variables in each call: {names}.",
        received=f"{len(variables)} new variable(s) while traced again.",
        fix="create models, metrics and variables once, outside of the function.",
    )
