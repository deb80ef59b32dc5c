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
from keras_distribute._compat.jax_internals import is_key
from keras_distribute._compat.variables import get_stateless_scope
from keras_distribute.context import Frame, Mode
from keras_distribute.errors import ContextError, StructureTypeError
from keras_distribute.run import untraced
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


def no_values(received: str) -> ContextError:
    """The error for a scheduled function that looks at values."""
    return ContextError(
        "A function that workers run becomes a program before it runs: in it, arrays "
        "and variables have no values that Python could look at.",
        received=received,
        fix="in the function keras.ops, such as ops.where, in the place of float(), "
        "if and NumPy; and return what is to be looked at: "
        "coordinator.schedule(step).fetch(). Read, save and load variables in the "
        "program of the coordinator, or in a callback of fit.",
    )


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


def refuse_keys(leaves: Sequence[Any]) -> None:
    """Raises `StructureTypeError` for typed keys of random numbers."""
    for leaf in leaves:
        if is_key(leaf):
            raise StructureTypeError(
                "Typed keys of random numbers do not travel to workers and back.",
                received=f"an array of dtype {leaf.dtype}.",
                fix="jax.random.key_data(key), and jax.random.wrap_key_data(data) on "
                "the other side; or a keras.random.SeedGenerator.",
            )


class Updated:
    """What a server will make of a variable by an optimizer's update: a step can hand
    it on, as it does the state that it returns, and not compute with it.

    Args:
        variable: The weight, or the optimizer's variable.
    """

    __array_ufunc__ = None  # So that NumPy's numbers ask this object.

    def __init__(self, variable: Any) -> None:
        self.variable = variable
        self.shape, self.dtype = variable.shape, variable.dtype

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise _later(self.variable)

    @property
    def __jax_array__(self) -> Any:
        # An error where JAX looks, as `jax.grad` does, rather than JAX's own.
        raise _later(self.variable)


def _check_gradients(
    optimizer: Any, grads: Sequence[Any], weights: Sequence[Any]
) -> None:
    """Raises where gradients are not those of the weights, before a server does."""
    shapes = [None if grad is None else tuple(jnp.shape(grad)) for grad in grads]
    own = [tuple(weight.shape) for weight in weights]
    fits = len(shapes) == len(own) and all(
        shape in (None, each) for shape, each in zip(shapes, own, strict=True)
    )
    if not fits:
        raise StructureTypeError(
            "An optimizer is given one gradient, or None, for each weight, with its "
            "shape.",
            received=f"gradients of shapes {shapes} for weights of shapes {own}.",
            fix=f"{optimizer.name}.apply(grads, model.trainable_variables), with grads "
            "of kd.value_and_grad(loss, model.trainable_variables).",
        )


def _refused(value: Updated, *others: Any) -> Any:
    raise _later(value.variable)


_ONE = "array float int bool len iter getitem neg abs lt le gt ge eq ne"
_TWO = "add sub mul truediv floordiv mod pow matmul"
for _name in (*_ONE.split(), *_TWO.split(), *(f"r{name}" for name in _TWO.split())):
    setattr(Updated, f"__{_name}__", _refused)


def _later(variable: Any) -> ContextError:
    return ContextError(
        f"{variable.path!r} is read after a gradient was given to its optimizer, whose "
        "update is made later, on a parameter server.",
        received="optimizer.apply or stateless_apply, and then a read, in one step.",
        fix="read it before, or schedule one step a call: "
        "coordinator.schedule(step, args=...); in fit, read it in a callback.",
    )


class _Scope(Capture):
    """Notes what a scheduled function reads and assigns."""

    def __init__(self, strategy: Any) -> None:
        super().__init__(strategy)
        self.given_gradients: set[int] = set()
        self.applied: set[int] = set()  # Those, and the state of optimizers.

    def get_current_value(self, variable: Any) -> Any:
        if id(variable) in self.applied:
            raise _later(variable)
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
    def num_results(self) -> int:
        """How many results are arrays."""
        return sum(leaf is None for leaf in self.leaves)

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
        self.scope.begin(self.known, values)
        arguments = [left.pop(0) for _ in self.call.shapes]
        self._given = [[left.pop(0) for _ in forms] for _, forms in self.elements]
        args, kwargs = self.call.rebuilt(arguments)
        with untraced.refused(self._function, no_values):
            result = self._function(*args, **kwargs)
        leaves, self.structure = structures.flatten(result, is_leaf)
        leaves = [
            leaf.value if isinstance(leaf, DistributedVariable) else leaf
            for leaf in leaves
        ]
        leaves = [unwrapped(leaf, "that was scheduled") for leaf in leaves]
        refuse_keys(leaves)
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
        self.scope.end()
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
        targets = compat.targets_of(optimizer, variables)
        if not len(grads):
            return
        _check_gradients(optimizer, grads, targets)
        pairs = compat.given_gradients(optimizer, grads, targets)
        twice = [v for _, v in pairs if id(v) in self.scope.given_gradients]
        if twice:
            raise ContextError(
                f"The weight {twice[0].path!r} is given two gradients in one scheduled "
                "function.",
                received="two calls of optimizer.apply.",
                fix="schedule one step a call, or add the gradients up.",
            )
        self._pushed += map(jnp.asarray, compat.prepared(optimizer, pairs))
        weights = [variable for _, variable in pairs]
        self.gradients.append((optimizer, weights))
        self.scope.given_gradients |= set(map(id, weights))
        updated = [*weights, *compat.changed_by_updates(optimizer)]
        self.scope.applied |= set(map(id, updated))
        scope: Any = get_stateless_scope()
        if scope is not self.scope:
            for variable in updated:
                scope.add_update((variable, Updated(variable)))

    def element(self, iterator: Any) -> Any:
        """The next batch of an iterator of the workers."""
        index, self._next = self._next, self._next + 1
        if index < len(self._given):
            return iterator.rebuilt(self._given[index])
        forms = list(iterator.forms)
        self.elements.append((iterator, forms))
        self._given.append([jnp.zeros(shape, dtype) for dtype, shape in forms])
        return iterator.rebuilt(self._given[-1])
