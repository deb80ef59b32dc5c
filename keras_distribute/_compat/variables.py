"""How Keras creates and reads variables: the places where ours take over.

- `keras.Variable.__new__`: Keras has no hook for the class of a new variable. Goes if
  it gets one.
- `keras.Variable.__init__`: a variable that is read together is not trainable unless
  its creator says so, as in TensorFlow. Goes if Keras has that rule.
- `StatelessScope`: the stack of scopes is private; our variables look through all of
  them, not only the innermost.
- `name_scope_stack`: tells whether a layer creates the variable; Keras passes no
  creator.
- `auto_name`: a variable without a name is called after its class; ours as Keras's,
  since layouts and optimizers go by names. Goes when the name can be set afterwards.
- `Optimizer.add_variable_from_reference`: gradient accumulators have no mark but their
  name.
- A variable of a given value is refused in a stateless scope; where a model is made
  from shapes alone, and where an optimizer is built (`initialized_later`), it gets a
  function that returns the value.
"""

# pyright: reportAttributeAccessIssue=false
from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from inspect import signature
from typing import Any

import jax
from keras import Layer, StatelessScope, Variable, ops
from keras.optimizers import Optimizer
from keras.src.backend.common import global_state
from keras.src.backend.common.stateless_scope import (
    get_stateless_scope,
    in_stateless_scope,
)
from keras.src.backend.common.variables import shape_equal
from keras.src.utils.naming import auto_name

from keras_distribute._compat.seams import Replacements, check

__all__ = [
    "StatelessScope",
    "Variable",
    "get_stateless_scope",
    "in_stateless_scope",
    "shape_equal",
]

check(Variable, "_dtype", "_initializer", "_shape")

_SIGNATURE = signature(Variable.__init__)
_PARAMETERS = [
    parameter.name
    for parameter in list(_SIGNATURE.parameters.values())[1:]
    if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
]
_INITIALIZED_LATER = "keras_distribute_initialized_later"


def named_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a variable by their names, with the name that Keras's own would
    have where it is given none.
    """
    _SIGNATURE.bind_partial(None, *args, **kwargs)
    named = _named(args, kwargs)
    return named if named.get("name") else {**named, "name": auto_name("Variable")}


def install(
    replaced: Replacements,
    choose_class: Callable[[dict[str, Any]], type | None],
    accumulators_created: Callable[[], AbstractContextManager[None]],
) -> None:
    """Lets `choose_class` pick the class of each `keras.Variable`.

    Args:
        choose_class: From the named arguments to the class; `None`: Keras's own.
        accumulators_created: Is around the creation of gradient accumulators.
    """

    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        # A copy of a variable is made without arguments, of the class that it has.
        creates = cls is Variable and (args or kwargs)
        chosen = choose_class(_named(args, kwargs)) if creates else None
        return object.__new__(chosen or cls)

    initialize: Callable[..., Any] = Variable.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        named = _named(args, kwargs)
        if named.get("synchronization") == "on_read" and "trainable" not in named:
            kwargs["trainable"] = False
        if may_be_initialized_later():
            args, kwargs = (), _with_function(named | kwargs)
        initialize(self, *args, **kwargs)

    add_variable: Callable[..., Any] = Optimizer.add_variable_from_reference

    def add_and_mark(
        self: Any, reference_variable: Any, name: Any = None, *more: Any, **kw: Any
    ) -> Any:
        # What an optimizer assigns as it is has no sum over the replicas.
        is_sum = not takes_gradient_as_value(reference_variable)
        is_accumulator = name == "gradient_accumulator" and is_sum
        with accumulators_created() if is_accumulator else nullcontext():
            return add_variable(self, reference_variable, name, *more, **kw)

    replaced.assign(Variable, "__new__", new)
    replaced.replace(Variable, "__init__", init)
    replaced.replace(Optimizer, "add_variable_from_reference", add_and_mark)


@contextmanager
def initialized_later() -> Generator[None]:
    """In the `with` block, a variable of a given value may wait for it, like one of an
    initializer.
    """
    outer = global_state.get_global_attribute(_INITIALIZED_LATER)
    global_state.set_global_attribute(_INITIALIZED_LATER, True)
    try:
        yield
    finally:
        global_state.set_global_attribute(_INITIALIZED_LATER, outer)


def may_be_initialized_later() -> bool:
    """Whether a variable that is made now may wait for its given value."""
    return bool(global_state.get_global_attribute(_INITIALIZED_LATER))


def takes_gradient_as_value(variable: Any) -> bool:
    """Whether an optimizer assigns a variable its gradient: what quantization to float8
    keeps, of which the gradient is the new value.
    """
    return bool(getattr(variable, "overwrite_with_gradient", False))


def is_layer_state() -> bool:
    """Whether the variable being created belongs to a layer."""
    stack = global_state.get_global_attribute("name_scope_stack")
    return bool(stack) and isinstance(stack[-1].caller, Layer)


def stateless_value(variable: Variable) -> Any:
    """The variable's value in the innermost stateless scope with one, else `None`."""
    scope = get_stateless_scope()
    while scope is not None:
        value = scope.get_current_value(variable)
        if value is not None:
            return value
        scope = getattr(scope, "original_scope", None)
    return None


def add_stateless_update(variable: Variable, value: Any) -> None:
    """Assigns in the innermost stateless scope, which must exist."""
    scope = get_stateless_scope()
    assert scope is not None
    scope.add_update((variable, value))


def uninitialized_value(variable: Variable) -> Any:
    """What Keras shows for a variable whose creation waits for the end of a stateless
    scope: its initial value.
    """
    return variable._initializer(variable._shape, dtype=variable._dtype)


def _with_function(named: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a variable, with a function in place of a value."""
    given = named["initializer"]
    if callable(given) or isinstance(given, str):
        return named
    with jax.ensure_compile_time_eval():  # Of a number, no tracer.
        value: Any = ops.convert_to_tensor(given, named.get("dtype"))

    def returning(shape: Any, dtype: Any = None) -> Any:
        return ops.convert_to_tensor(value, dtype)

    more = {"shape": value.shape, "dtype": value.dtype, "initializer": returning}
    return named | more


def _named(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return dict(zip(_PARAMETERS, args, strict=False)) | kwargs
