"""Where an optimizer gets its gradients: `apply`, and the finiteness check of loss
scaling; where it keeps its slots.

Keras's JAX optimizers have no hook for aggregation. `apply` is the one place before
clipping, weight decay and loss-scale checks. `_trainable_variables` and what is
excluded from weight decay have no public names.
"""

# pyright: reportAttributeAccessIssue=false
from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from keras import Variable, name_scope, optimizers
from keras.optimizers import LossScaleOptimizer, Optimizer

from keras_distribute._compat.seams import Replacements, check
from keras_distribute._compat.shapes_alone import shapes_alone
from keras_distribute._compat.variables import (
    initialized_later,
    takes_gradient_as_value,
)

check(
    Optimizer,
    "_accumulated_gradients",
    "_clip_gradients",
    "_exclude_from_weight_decay",
    "_filter_empty_gradients",
    "_get_variable_index",
    "_iterations",
    "_learning_rate",
    "_tracker",
    "_trainable_variables",
    "_untrack_variable",
    "_use_weight_decay",
)
check(optimizers.Adafactor, "_c", "_r")
check(optimizers.Nadam, "_u_product")
check(Variable, "_name", "_path")

_WEIGHT = "_keras_distribute_weight"  # Of a slot: the weight that it belongs to.

Apply = Callable[[Any, list[Any], "list[Any] | None"], None]
AroundApply = Callable[[Any, list[Any], "list[Any] | None", Apply], None]


def install(
    replaced: Replacements,
    around_apply: AroundApply,
    all_of: Callable[[Any], Any],
    slot_begins: Callable[[Any], None],
    slot_created: Callable[[Any], None],
) -> None:
    """Puts `around_apply(optimizer, grads, variables, original)` around `apply`, and
    `all_of` around `check_finite`.

    `slot_begins` is called with the weight before each slot is made, `slot_created`
    with the slot.
    """
    add_slot: Callable[..., Any] = Optimizer.add_variable_from_reference
    check_finite: Callable[..., Any] = LossScaleOptimizer.check_finite

    def add_and_tell(
        self: Any, reference_variable: Any, *args: Any, **kwargs: Any
    ) -> Any:
        slot_begins(reference_variable)
        slot = add_slot(self, reference_variable, *args, **kwargs)
        setattr(slot, _WEIGHT, reference_variable)
        slot_created(slot)
        return slot

    def agreed_finite(self: Any, grads: Any) -> Any:
        return all_of(check_finite(self, grads))

    def applying(original: Apply) -> Apply:
        def apply(
            self: Any, grads: list[Any], trainable_variables: list[Any] | None = None
        ) -> None:
            around_apply(self, grads, trainable_variables, original)

        return apply

    for owner in (Optimizer, LossScaleOptimizer):
        replaced.replace(owner, "apply", applying(owner.apply))
    replaced.replace(LossScaleOptimizer, "check_finite", agreed_finite)
    replaced.replace(Optimizer, "add_variable_from_reference", add_and_tell)


def build(optimizer: Any, variables: list[Any] | None) -> None:
    """Creates the optimizer's variables, as its own first `apply` would."""
    if not optimizer.built and variables is not None:
        # Nadam and Adafactor make variables of given values.
        with name_scope(optimizer.name, caller=optimizer), initialized_later():
            optimizer.build(list(variables))
        optimizer.built = True


def is_loss_scaling(optimizer: Any) -> bool:
    """Whether it wraps another optimizer and checks for overflows."""
    return isinstance(optimizer, LossScaleOptimizer)


def built_variables(optimizer: Any) -> list[Any]:
    """The model variables that the optimizer was built with, in order."""
    return list(optimizer._trainable_variables)


def targets_of(optimizer: Any, variables: list[Any] | None) -> list[Any]:
    """The model variables that an `apply` with these arguments is about."""
    return built_variables(optimizer) if variables is None else list(variables)


def accumulates(optimizer: Any) -> bool:
    """Whether it accumulates gradients, also before it is built."""
    return bool(optimizer.gradient_accumulation_steps)


def accumulation(optimizer: Any) -> tuple[int, Any, list[Any]] | None:
    """Of one that is built, the number of micro-steps, their counter and the
    accumulators; `None` without accumulation.
    """
    if not accumulates(optimizer):
        return None
    return (
        optimizer.gradient_accumulation_steps,
        optimizer._iterations,
        optimizer._accumulated_gradients,
    )


def index_of(optimizer: Any, variable: Any) -> int:
    """The position of a model variable among those the optimizer was built with."""
    return optimizer._get_variable_index(variable)


# Of Keras's optimizers, those that treat each element of a weight alone: none takes a
# norm of, or factors, a weight.
_BY_ELEMENT = (
    optimizers.SGD,
    optimizers.RMSprop,
    optimizers.Adam,
    optimizers.AdamW,
    optimizers.Adadelta,
    optimizers.Adagrad,
    optimizers.Adamax,
    optimizers.Nadam,
    optimizers.Ftrl,
    optimizers.Lion,
)


def takes_elements_alone(optimizer: Any, variables: list[Any]) -> bool:
    """Whether it was built for `variables`, and treats each element of them alone."""
    if type(optimizer) not in _BY_ELEMENT or not optimizer.built:
        return False
    targets = optimizer._trainable_variables
    if list(map(id, targets)) != list(map(id, variables)):
        return False
    nadams = getattr(optimizer, "_u_product", None)
    known = (optimizer._iterations, optimizer._learning_rate, nadams)
    ones = [optimizer.variables[i] for i in slot_places(optimizer)[0]]
    if any(all(one is not each for each in known) for one in ones):
        return False  # A variable of the user's own, or a slot that is not known.
    excluded = getattr(optimizer, "_exclude_from_weight_decay", None) or getattr(
        optimizer, "_exclude_from_weight_decay_pattern", None
    )
    by_weight = (
        optimizer.clipnorm is not None
        or optimizer.gradient_accumulation_steps
        or excluded
    )
    own_rules = any(
        v.constraint is not None or takes_gradient_as_value(v) for v in variables
    )
    return not (by_weight or own_rules or own_methods(optimizer))


def same_for(optimizer: Any, weights: list[tuple[tuple[int, ...], Any]]) -> Any:
    """An optimizer like `optimizer`, for other weights, for `stateless_apply` only: it
    holds no values.

    Args:
        weights: The shape and dtype of each.
    """
    with shapes_alone():
        return _without_values(_clone(optimizer, _like(weights)))


def slot_weights(optimizer: Any) -> list[int | None]:
    """For each variable of an optimizer the index of the weight whose slot it is;
    `None` for one that belongs to no weight, as far as is known.
    """
    targets = {id(weight): i for i, weight in enumerate(optimizer._trainable_variables)}
    found = {
        id(variable): targets.get(id(getattr(variable, _WEIGHT, None)))
        for variable in optimizer.variables
    }
    if isinstance(optimizer, optimizers.Adafactor) and optimizer.built:
        # Of the means over rows and columns it tells nobody whose they are.
        for means in (optimizer._r, optimizer._c):
            found |= {id(each): i for i, each in enumerate(means)}
    return [found[id(variable)] for variable in optimizer.variables]


def slot_places(optimizer: Any) -> tuple[list[int], list[list[int]]]:
    """Among an optimizer's variables the indices of those that belong to no weight, and
    of the slots of each weight.
    """
    ones: list[int] = []
    own: list[list[int]] = [[] for _ in optimizer._trainable_variables]
    for i, weight in enumerate(slot_weights(optimizer)):
        (ones if weight is None else own[weight]).append(i)
    return ones, own


def shares_state(optimizer: Any) -> bool:
    """Whether it has state that belongs to no weight and may depend on which weights
    there are. Scalars of Keras's own optimizers are the same for any weights.
    """
    name = type(optimizer).__name__
    is_keras = type(optimizer) is getattr(optimizers, name, None)
    common = optimizer._iterations, optimizer._learning_rate
    return any(
        weight is None and not any(variable is each for each in common)
        for variable, weight in zip(
            optimizer.variables, slot_weights(optimizer), strict=True
        )
        if variable.shape or not is_keras
    )


def own_methods(optimizer: Any) -> list[str]:
    """The methods that were replaced on this one object, which a copy cannot have: they
    may know the object itself.
    """
    names = [name for name, value in vars(optimizer).items() if callable(value)]
    return [n for n in names if callable(getattr(type(optimizer), n, None))]


def is_by_element(optimizer: Any) -> bool:
    """Whether it treats each element of a weight alone, but for clipping."""
    return type(optimizer) in _BY_ELEMENT


# Those of them that take norms and means of a weight, which are sums of its parts.
_BY_PART = (*_BY_ELEMENT, optimizers.Adafactor, optimizers.Lamb)


def may_take_whole_weights(optimizer: Any) -> bool:
    """Whether its update may need all of a weight in one place, such as Muon's."""
    return type(optimizer) not in _BY_PART


@contextmanager
def updates_in_turn(
    optimizer: Any, tie: Callable[[Any, list[Any]], Any]
) -> Generator[None]:
    """In the `with` block, the update of a weight begins when that of the one before is
    done.

    Args:
        tie: From a gradient and values to the gradient, which there is not before them.
    """
    own, update = vars(optimizer).get("update_step"), optimizer.update_step
    done: list[Any] = []

    def update_step(gradient: Any, variable: Any, learning_rate: Any) -> None:
        update(tie(gradient, done) if done else gradient, variable, learning_rate)
        done[:] = [variable.value]

    optimizer.update_step = update_step
    try:
        yield
    finally:
        del optimizer.update_step
        if own is not None:
            optimizer.update_step = own


def leaves_zero_gradients(optimizer: Any, weight: Any) -> bool:
    """Whether a gradient of zero changes neither a weight nor its slots, whatever they
    are: then rows without gradients need no update. Tried, with any values.
    """
    copy = copy_for(optimizer, [((4, 2), weight)])
    random = np.random.default_rng(0)
    state, value = [
        [jnp.asarray(random.uniform(0.1, 0.9, v.shape), v.dtype) for v in variables]
        for variables in (copy.variables, copy._trainable_variables)
    ]
    new_value, new_state = copy.stateless_apply(
        state, [jnp.zeros_like(value[0])], value
    )
    pairs = zip(state, new_state, slot_weights(copy), strict=True)
    same = [bool((old == new).all()) for old, new, of in pairs if of is not None]
    return all(same) and bool((value[0] == new_value[0]).all())


def given_gradients(
    optimizer: Any, grads: list[Any], weights: list[Any]
) -> list[tuple[Any, Any]]:
    """The gradients that are there, with their weights; raises or warns as Keras."""
    found = optimizer._filter_empty_gradients(grads, weights)
    return list(zip(*found, strict=True))


def prepared(optimizer: Any, pairs: list[tuple[Any, Any]]) -> list[Any]:
    """Gradients as the optimizer's update takes them: unscaled, and clipped unless they
    are accumulated before.

    Args:
        pairs: Each gradient with its weight.
    """
    ready = [grad for grad, _ in pairs]
    real = [i for i, (_, v) in enumerate(pairs) if not takes_gradient_as_value(v)]
    grads, scale = [ready[i] for i in real], optimizer.loss_scale_factor
    if scale is not None:
        grads = [grad / scale for grad in grads]
    if not optimizer.gradient_accumulation_steps:
        grads = optimizer._clip_gradients(grads)
    for i, grad in zip(real, grads, strict=True):
        ready[i] = grad
    return ready


def changed_by_updates(optimizer: Any) -> list[Any]:
    """The variables of an optimizer that an update may change: all but a learning rate
    that is set from outside.
    """
    rate = optimizer._learning_rate
    return [variable for variable in optimizer.variables if variable is not rate]


def copy_for(optimizer: Any, weights: list[tuple[tuple[int, ...], Any]]) -> Any:
    """An optimizer that does to other weights what `optimizer` does to its own, with
    gradients that are `prepared`; for `stateless_apply` only.

    Args:
        optimizer: The user's.
        weights: The shape of each, and the user's weight, of which it may be a part.
    """
    with shapes_alone():
        own = _like([(shape, weight.dtype) for shape, weight in weights])
        for variable, (_, weight) in zip(own, weights, strict=True):
            # By its name an optimizer may know how to treat a weight: Muon's do.
            variable._name, variable._path = weight.name, weight.path
            variable.overwrite_with_gradient = takes_gradient_as_value(weight)
        clone = _without_values(_clone(optimizer, own))
    clone.loss_scale_factor = None
    if not optimizer.gradient_accumulation_steps:
        clone.clipnorm = clone.global_clipnorm = clone.clipvalue = None
    decays: dict[int, bool] = {}
    for variable, (_, weight) in zip(clone._trainable_variables, weights, strict=True):
        variable.constraint = weight.constraint
        decays[id(variable)] = optimizer._use_weight_decay(weight)
    # Its own weights have other names than those that are excluded.
    clone._use_weight_decay = lambda variable: decays[id(variable)]
    return clone


def _like(weights: list[tuple[tuple[int, ...], Any]]) -> list[Any]:
    """Variables of these shapes and dtypes."""
    return [
        Variable("zeros", shape=shape, dtype=dtype, name=f"weight_{i}")
        for i, (shape, dtype) in enumerate(weights)
    ]


# What Keras's own `__init__` and `build` make, and a cache.
_MADE = frozenset(
    {
        "built",
        "_exclude_from_weight_decay_cache",
        "_iterations",
        "_learning_rate",
        "_tracker",
        "_trainable_variables",
        "_trainable_variables_indices",
        "_variables",
    }
)


def unbuilt(optimizer: Any, value_of: Callable[[Any], Any]) -> Any:
    """An optimizer with the attributes of `optimizer`, and variables of its own, which
    has not been built. Its class is not called: that may take what no attribute or
    `get_config` says.

    Args:
        value_of: What a variable begins with, for the one it stands for.
    """
    rate = optimizer._learning_rate
    copy: Any = object.__new__(type(optimizer))
    rate = float(value_of(rate)) if isinstance(rate, Variable) else rate
    Optimizer.__init__(copy, rate, name=optimizer.name)
    own = {id(variable) for variable in optimizer.variables}
    for name, value in vars(optimizer).items():
        if name in _MADE:
            continue
        if id(value) in own and not hasattr(value, _WEIGHT):
            value = Variable(
                value_of(value), dtype=value.dtype, trainable=False, name=value.name
            )
        vars(copy)[name] = copy._tracker.track(_emptied(value, own))
    return copy


def _emptied(value: Any, own: set[int]) -> Any:
    """A container without the variables of these ids."""
    if id(value) in own:
        return None
    if isinstance(value, dict):
        return {key: _emptied(each, own) for key, each in value.items()}
    if isinstance(value, list):
        return [_emptied(each, own) for each in value]
    if isinstance(value, tuple):  # It may be a named one.
        return jax.tree.map(
            lambda each: _emptied(each, own), value, is_leaf=lambda x: x is not value
        )
    return value


_DEPTH = 5  # Of a schedule in a list of an optimizer, and what it has, at most.


def settings(optimizer: Any, weights: list[Any]) -> Any:
    """What a copy of an optimizer for some weights has as constants, to compare: it
    changes with each attribute that is set, also of its schedule, and with a weight's
    constraint. Variables do not count.
    """
    of_class = _MADE - {"_learning_rate"}
    own = {name: each for name, each in vars(optimizer).items() if name not in of_class}
    return _comparable([own, *(weight.constraint for weight in weights)], _DEPTH + 1)


def _comparable(value: Any, depth: int) -> Any:
    kind = type(value)
    if isinstance(value, Variable):
        return None
    if value is None or isinstance(value, bool | int | float | str):
        return kind, repr(value)
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        array = np.asarray(value)
        return kind, array.shape, str(array.dtype), array.tobytes()
    if depth and isinstance(value, dict):
        return tuple(
            (_comparable(key, 0), _comparable(each, depth - 1))
            for key, each in value.items()
        )
    if depth and isinstance(value, list | tuple):
        return tuple(_comparable(each, depth - 1) for each in value)
    if depth and isinstance(value, set | frozenset):
        return frozenset(_comparable(each, 0) for each in value)
    if depth and hasattr(value, "__dict__") and not inspect.isroutine(value):
        return kind, _comparable(vars(value), depth - 1)
    try:
        return weakref.ref(value)  # Of another object with the same id it is not.
    except TypeError:
        return id(value)


def _clone(optimizer: Any, weights: list[Any]) -> Any:
    """An optimizer like `optimizer`, built with other weights."""
    clone = unbuilt(optimizer, lambda variable: np.zeros(variable.shape))
    first = list(clone.variables)
    own = [each for name, each in vars(clone).items() if name not in _MADE]
    lists = [(each, len(each)) for each in own if isinstance(each, list)]
    clone.build(weights)
    for each, size in lists:
        if len(each) > size:  # A list of `__init__` that `build` has filled before.
            del each[:size]
    for variable in first:
        if not any(variable is each for each in vars(clone).values()):
            clone._untrack_variable(variable)  # `build` has made another one.
    return clone


def _without_values(clone: Any) -> Any:
    for variable in [*clone.variables, *clone._trainable_variables]:
        variable._value = variable._initializer = None
    return clone
