"""One trace of a function that is scheduled: what it reads of variables is an input,
what an optimizer is given is an output, and the optimizer does nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from keras_distribute import context
from keras_distribute._compat import optimizer as compat
from keras_distribute.context import Frame, Mode
from keras_distribute.errors import (
    ContextError,
    StructureTypeError,
)
from keras_distribute.run.arguments import Call, Static, is_leaf
from keras_distribute.run.tracing import Capture, unwrapped
from keras_distribute.values import structures
from keras_distribute.variables import DistributedVariable

Form = tuple[str, tuple[int, ...]]  # The dtype's name and the shape of an array.


def next_element(iterator: Any) -> Any:
    """A batch of an iterator that each worker has one of, inside a scheduled function.

    Raises:
        ContextError: Outside of one.
    """
    trace = context.scheduled_trace()
    if trace is None:
        raise not_an_argument()
    return trace.element(iterator)


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
    return context.scheduled_trace().scope


def is_tracing() -> bool:
    """Whether a scheduled function is being traced in this thread."""
    return context.scheduled_trace() is not None


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


class Trace:
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

    def axes(self, given: Sequence[int | None] | None) -> list[int | None]:
        """Along which axis each argument and each batch has the rows of a batch.

        Args:
            given: Of the arguments, where that is known; by default the first axis of
                those that have as many rows as a batch.
        """
        args = [shape.shape for shape in self.call.shapes]
        batches = [shape for _, forms in self.elements for _, shape in forms]
        counts = [shape[0] for shape in batches or args if shape]
        most = max(counts, default=None)

        def first(shape: tuple[int, ...]) -> int | None:
            return 0 if shape and shape[0] == most else None

        of_args = map(first, args) if given is None else given
        return [*of_args, *map(first, batches)]

    def run(self) -> Any:
        """The traced program: from the inputs to results, gradients and new values."""
        frame = Frame(self.strategy, Mode.CROSS, scheduled=self)
        with self.scope, context.entered(frame):
            return jax.make_jaxpr(self._called)(*self.shapes)

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
        leaves = [
            leaf.value if isinstance(leaf, DistributedVariable) else leaf
            for leaf in leaves
        ]
        leaves = [unwrapped(leaf, "that was scheduled") for leaf in leaves]
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
