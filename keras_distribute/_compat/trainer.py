"""Keras's JAX trainer and its epoch iterator, of which ours are subclasses.

What is private: the modules of both classes, and of their base. Keras 3.16 renames
them: `JAXTrainer` to `Trainer`, `Trainer` to `BaseTrainer`, `jax_state_sync` to
`state_sync`.

What is replaced while the package is installed:

- the bases of `keras.Model`, and of all other classes made from Keras's trainer;
- `Trainer` in `keras.src.models.model`, whose `__init__` `Model.__init__` calls;
- the names of both classes in `keras.src.backend.jax.trainer`, from where Keras's `fit`
  and code that makes trainers of its own take them;
- `compile` of the base: Keras compares a class's `compile` with it, to know whether a
  saved model can be compiled again, so it cannot be overridden;
- `_distribute_data`: a batch for `train_on_batch` stays on the host until the step.

All of it goes when Keras lets a model choose its trainer.
"""

# pyright: reportAttributeAccessIssue=false
from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from keras.src.backend.jax import trainer as jax_trainer
from keras.src.models import model as model_module

from keras_distribute._compat.names import BaseTrainer, JAXTrainer
from keras_distribute._compat.seams import Replacements

JAXEpochIterator: Any = jax_trainer.JAXEpochIterator

sync: Callable[[Any], None] = getattr(
    JAXTrainer, "state_sync", JAXTrainer.jax_state_sync
)
"""Puts the arrays of Keras's own state into the variables."""


def install(
    replaced: Replacements,
    trainer: type,
    epoch_iterator: type,
    around_compile: Callable[[Callable[..., Any]], Callable[..., Any]],
    host_batch: Callable[[Callable[..., Any], Any, Any], Any],
) -> None:
    """Puts our subclasses in the place of Keras's classes.

    Args:
        around_compile: From Keras's `compile` to ours.
        host_batch: Called with `_distribute_data` and its arguments.
    """
    distribute = jax_trainer._distribute_data
    for cls in JAXTrainer.__subclasses__():
        if cls is not trainer:
            bases = [trainer if base is JAXTrainer else base for base in cls.__bases__]
            replaced.assign(cls, "__bases__", tuple(bases))
    replaced.assign(model_module, "Trainer", trainer)
    replaced.assign(jax_trainer, JAXTrainer.__name__, trainer)
    replaced.assign(jax_trainer, "JAXEpochIterator", epoch_iterator)
    replaced.replace(BaseTrainer, "compile", around_compile(BaseTrainer.compile))

    def _distribute_data(data: Any, layouts: Any = None, **more: Any) -> Any:
        return host_batch(functools.partial(distribute, **more), data, layouts)

    replaced.replace(jax_trainer, "_distribute_data", _distribute_data)


def compile_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Those of `compile` by their names."""
    names = list(inspect.signature(BaseTrainer.compile).parameters)[1:]
    return dict(zip(names, args, strict=False)) | kwargs


def is_validation(kwargs: dict[str, Any]) -> bool:
    """Whether these are the arguments that `fit` gives to `evaluate`, whose pass may go
    on in the next epoch.
    """
    return "_use_cached_eval_dataset" in kwargs


def is_unbuilt(trainer: Any) -> bool:
    """Whether a layer of the model has no variables yet."""
    return not all(layer.built for layer in trainer._flatten_layers())


class TrainState(NamedTuple):
    """The state of a training step, in Keras's order: arrays, or what stands for them.

    Attributes:
        weights: Trainable variables.
        others: The other variables of layers, such as moving statistics.
        slots: The optimizer's variables.
        metrics: The variables of metrics.
    """

    weights: list[Any]
    others: list[Any]
    slots: list[Any]
    metrics: list[Any]


class TestState(NamedTuple):
    """The same of a step of `evaluate`."""

    weights: list[Any]
    others: list[Any]
    metrics: list[Any]


class PredictState(NamedTuple):
    """The same of a step of `predict`."""

    weights: list[Any]
    others: list[Any]


def state_variables(trainer: Any, kind: str) -> TrainState | TestState | PredictState:
    """The variables behind the state of a step.

    Args:
        kind: `"train"`, `"test"` or `"predict"`.
    """
    weights = list(trainer.trainable_variables)
    others = list(trainer.non_trainable_variables)
    if kind == "predict":
        return PredictState(weights, others)
    metrics = list(trainer.metrics_variables)
    if kind == "test":
        return TestState(weights, others, metrics)
    slots = [] if trainer.optimizer is None else list(trainer.optimizer.variables)
    return TrainState(weights, others, slots, metrics)


def is_traced(trainer: Any) -> bool:
    """Whether the trainer's steps are compiled."""
    return bool(not trainer.run_eagerly and trainer.jit_compile)
