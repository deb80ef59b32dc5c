"""`value_and_grad`: gradients of stateful Keras code, for custom loops."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras

from keras_distribute import checks
from keras_distribute._compat import jax_internals
from keras_distribute._compat import variables as compat
from keras_distribute.errors import StructureTypeError, ValueStructureError
from keras_distribute.run.tracing import check_kept, holding_error
from keras_distribute.values import structures
from keras_distribute.values.arrays import as_array


class _Recording(compat.StatelessScope):
    """A stateless scope that remembers which variables were assigned; all others have
    the values that they have in the scope around it.
    """

    def __init__(self, state_mapping: list[tuple[Any, Any]]) -> None:
        self._outer = compat.get_stateless_scope()
        super().__init__(state_mapping, collect_losses=True)
        self.assigned: dict[int, Any] = {}
        self._trace = jax_internals.current_trace()

    def get_current_value(self, variable: Any) -> Any:
        value = super().get_current_value(variable)
        if value is None and self._outer is not None:
            return self._outer.get_current_value(variable)
        return value

    def add_update(self, update: tuple[Any, Any]) -> None:
        check_kept(*update, self._trace)
        super().add_update(update)
        self.assigned[id(update[0])] = update[0]


def value_and_grad(
    fn: Callable[..., Any], variables: Sequence[Any], has_aux: bool = False
) -> Callable[..., Any]:
    """A function that calls `fn` and also returns the gradients of its result with
    respect to `variables`.

    `fn` may be stateful Keras code: batch normalization's statistics, random states and
    metrics that it updates are kept. Inside `Strategy.run` the gradients are this
    replica's own; `optimizer.apply` sums them over the replicas. It takes the place of
    `tf.GradientTape`.

    Args:
        fn: Returns a scalar of a floating dtype; with `has_aux`, a pair of it and
            anything else; of what holds arrays, a structure that `Strategy.run` could
            return.
        variables: The variables to differentiate by, such as
            `model.trainable_variables` of a built model.
        has_aux: Whether `fn` returns a pair.

    Returns:
        A function of the arguments of `fn` that returns `(result of fn, gradients)`,
        the gradients a list in the order of `variables`, each of its variable's shape;
        zeros where the result does not depend on it. A variable that is listed twice
        has its gradient in both places.

    Raises:
        ValueStructureError: Without variables, or when `fn` does not return a scalar.
        StructureTypeError: For what is no variable, or a variable of an integer dtype;
            when `fn` returns no floating number, with `has_aux` no pair, or in it an
            object that holds arrays and is no structure.

    Example:
        >>> import keras, keras_distribute as kd
        >>> v = keras.Variable(3.0)
        >>> loss, grads = kd.value_and_grad(lambda x: x * v * v, [v])(2.0)
        >>> float(loss), float(grads[0])
        (18.0, 12.0)
    """
    listed = _checked(fn, variables, has_aux)
    targets = list({id(target): target for target in listed}.values())

    @functools.wraps(fn)
    def with_gradients(*args: Any, **kwargs: Any) -> Any:
        assigned: list[Any] = []
        form: Any = None
        outside = jax_internals.current_trace()

        def pure(values: list[Any]) -> Any:
            nonlocal form
            with _Recording(list(zip(targets, values, strict=True))) as scope:
                result = fn(*args, **kwargs)
            loss, aux = _pair(result) if has_aux else (result, None)
            aux, form = structures.flatten(aux)
            _check_outlives(aux, outside)
            assigned[:] = scope.assigned.values()
            return _scalar(loss), (aux, list(map(scope.get_current_value, assigned)))

        values = [target.value for target in targets]
        (loss, (aux, updates)), grads = jax.value_and_grad(pure, has_aux=True)(values)
        outer = compat.get_stateless_scope()
        for variable, value in zip(assigned, updates, strict=True):
            if outer is None:
                variable.assign(value)
            else:  # Already what an assignment here means.
                outer.add_update((variable, value))
        of = {id(target): grad for target, grad in zip(targets, grads, strict=True)}
        result = (loss, jax.tree.unflatten(form, aux)) if has_aux else loss
        return result, [of[id(target)] for target in listed]

    return with_gradients


def _checked(fn: Any, variables: Any, has_aux: Any) -> list[Any]:
    """The variables to differentiate by; raises for wrong arguments."""
    fix = "kd.value_and_grad(fn, model.trainable_variables)"
    checks.function("fn", fn, "Gradients are those of a function.", fix)
    checks.flag("has_aux", has_aux)
    what = "Gradients are taken with respect to variables."
    targets = checks.items(variables)
    if targets is None:
        raise StructureTypeError(
            what, received=f"variables={checks.shown(variables)}.", fix=fix
        )
    if not targets:
        raise ValueStructureError(
            "There is no variable to differentiate by.",
            received="variables=[].",
            fix="build the model first, model.build(input_shape), so that "
            "model.trainable_variables is not empty.",
        )
    for target in targets:
        checks.instance("variables", target, keras.Variable, what, fix)
        if not keras.backend.is_float_dtype(target.dtype):
            raise StructureTypeError(
                f"{target.path!r} is of the dtype {target.dtype}, which has no "
                "gradient.",
                received="a variable that is not floating.",
                fix="pass trainable variables only.",
            )
    return targets


def _pair(result: Any) -> tuple[Any, Any]:
    """The loss and what comes with it."""
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise StructureTypeError(
            "With has_aux=True, fn returns a pair: the loss and anything else.",
            received=f"{checks.shown(result)}.",
            fix="return loss, predictions",
        )
    return result[0], result[1]


def _check_outlives(aux: list[Any], outside: Any) -> None:
    """Raises for objects with arrays that end with the trace of the gradients.

    Args:
        outside: What is traced around it.
    """
    for leaf in aux:
        for tracer in structures.tracers_in(leaf):
            if jax_internals.is_of_inner_function(tracer, outside):
                raise holding_error(leaf, "given to kd.value_and_grad")


def _scalar(loss: Any) -> jax.Array:
    loss = as_array(loss, "A loss is a number.")
    if loss.ndim:
        raise ValueStructureError(
            "Only a scalar has gradients.",
            received=f"a result of shape {loss.shape}.",
            fix="reduce it: kd.nn.compute_average_loss(per_example_loss), or "
            "keras.ops.sum(loss).",
        )
    if not jnp.issubdtype(loss.dtype, jnp.floating):
        raise StructureTypeError(
            "Only a floating number has gradients.",
            received=f"a result of dtype {loss.dtype}.",
            fix='keras.ops.cast(loss, "float32"), or keras.ops.real(loss).',
        )
    return loss
