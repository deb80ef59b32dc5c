"""Which variables and which other state the objects of a checkpoint have, and under
which names.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import keras

from keras_distribute import checks
from keras_distribute._compat import checkpoint as compat
from keras_distribute._compat import optimizer as compat_optimizer
from keras_distribute.checkpoint.adapted import adapted_in
from keras_distribute.checkpoint.names import layer_names, metric_names, optimizer_names
from keras_distribute.errors import CheckpointError, StructureTypeError
from keras_distribute.variables import DistributedVariable


@dataclasses.dataclass(frozen=True)
class Tracked:
    """What a checkpoint saves.

    Args:
        variables: By name; each variable once, under the first name that leads to it.
        stateful: Objects with `get_state` and `set_state`, dictionaries, and layers
            with what `adapt` found out, by name.
        optimizers: Optimizers by the beginning of their variables' names.
        models: Models by the beginning of their variables' names.
        unbuilt: Beginnings of the names of metrics whose variables do not exist yet.
    """

    variables: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    stateful: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    optimizers: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    models: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    unbuilt: list[str] = dataclasses.field(default_factory=list[str])


def is_stateful(value: Any) -> bool:
    """Whether an object hands out its state and takes it back by itself."""
    return callable(getattr(value, "get_state", None)) and callable(
        getattr(value, "set_state", None)
    )


def check_trackable(name: str, value: Any) -> None:
    """Refuses what a checkpoint cannot restore in place.

    Raises:
        StructureTypeError: For a plain value, which has no place to be restored into,
            and for other objects.
    """
    own = is_stateful(value) and not isinstance(value, type)
    plain = (keras.random.SeedGenerator, keras.Variable, dict)
    kinds = (keras.layers.Layer, keras.optimizers.Optimizer, keras.metrics.Metric)
    if isinstance(value, (*kinds, *plain)) or own:
        return
    raise StructureTypeError(
        f"Checkpoint cannot keep {name!r}.",
        received=f"{name}={checks.shown(value)}, a {type(value).__name__}.",
        fix=f"{name}_state = {{'value': ...}}; Checkpoint({name}={name}_state): a "
        "dictionary is restored in place. Models, layers, optimizers, metrics, seed "
        "generators, variables, and objects with get_state() and set_state(state) can "
        "be passed as they are.",
    )


def track(objects: dict[str, Any]) -> Tracked:
    """Finds the variables of `objects`, now: metrics and optimizers may get more.

    Raises:
        CheckpointError: For a model or a layer that is not built.
    """
    tracked = Tracked()
    labels: dict[int, str] = {}
    seen: set[int] = set()

    def add(prefix: str, named: dict[str, Any]) -> None:
        for name, variable in named.items():
            if id(variable) not in seen:
                seen.add(id(variable))
                tracked.variables[f"{prefix}/{name}" if name else prefix] = variable

    def add_optimizer(prefix: str, optimizer: Any) -> None:
        tracked.optimizers[prefix] = optimizer
        add(prefix, optimizer_names(optimizer, labels))

    for name, value in objects.items():
        if isinstance(value, keras.layers.Layer):
            if not value.built:
                raise CheckpointError(
                    f"{name!r} is not built: it has no variables yet.",
                    received=f"{name}={value!r}.",
                    fix=f"{name}.build(input_shape), or call it once, before it is "
                    "saved or restored.",
                )
            named = layer_names(value)
            labels |= {id(variable): label for label, variable in named.items()}
            add(f"{name}/variables", named)
            tracked.stateful.update(adapted_in(name, value))
            if isinstance(value, keras.Model):
                tracked.models[name] = value
                if compat.has_unbuilt_metrics(value):
                    tracked.unbuilt.append(f"{name}/metrics/")
    for name, value in objects.items():
        if isinstance(value, keras.optimizers.Optimizer):
            add_optimizer(name, value)
        elif isinstance(value, keras.metrics.Metric):
            add(name, metric_names([value]))
        elif isinstance(value, keras.random.SeedGenerator):
            add(name, {"state": value.state})
        elif isinstance(value, keras.Variable):
            add(name, {"": value})
        elif not isinstance(value, keras.layers.Layer):
            tracked.stateful[name] = value
    # After optimizers and metrics that are passed by themselves, too.
    for name, value in objects.items():
        if isinstance(value, keras.layers.Layer):
            add(f"{name}/metrics", metric_names(value.metrics))
            optimizer = getattr(value, "optimizer", None)
            if (
                isinstance(optimizer, keras.optimizers.Optimizer)
                and optimizer not in tracked.optimizers.values()
            ):
                add_optimizer(f"{name}/optimizer", optimizer)
            if isinstance(value, keras.Model):
                for more, own in _of_strategy(value).items():
                    add_optimizer(f"{name}/{more}", own)
    return tracked


def _of_strategy(model: Any) -> dict[str, Any]:
    """The optimizers that the model's strategy has for it."""
    variables = model.trainable_variables
    if not variables or not isinstance(variables[0], DistributedVariable):
        return {}
    return variables[0].distribute_strategy._optimizers_of(model)


def synchronize(objects: dict[str, Any]) -> None:
    """Puts the state of a `fit` that is running back into its model's variables."""
    for value in objects.values():
        if isinstance(value, keras.Model):
            value.jax_state_sync()


def build_optimizer(optimizer: Any, model: Any) -> None:
    """Creates an optimizer's variables as `fit` would, under the model's strategy."""
    variables = model.trainable_variables
    with contextlib.ExitStack() as stack:
        if variables and isinstance(variables[0], DistributedVariable):
            stack.enter_context(variables[0].distribute_strategy.scope())
        compat_optimizer.build(optimizer, variables)
