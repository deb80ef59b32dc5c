"""The model of a dry run, as one of a strategy whose mesh can be exchanged for another."""

from __future__ import annotations

from typing import Any

import keras

from keras_distribute.errors import InputError, StructureTypeError
from keras_distribute.strategies.base import Strategy
from keras_distribute.strategies.mirrored import MirroredStrategy
from keras_distribute.training import steps


def of(model_or_builder: Any, shard_optimizer_state: bool) -> tuple[Any, Strategy]:
    """A compiled model, and the strategy that its variables belong to.

    Args:
        model_or_builder: A compiled model, or a function without arguments that makes
            one. A model without a strategy is made once more from its configuration.
        shard_optimizer_state: For a model that is made here.

    Raises:
        StructureTypeError: For what is no model, and for a model that is not compiled
            or not traced.
        InputError: For a model that cannot be made from its configuration.
    """
    if isinstance(model_or_builder, keras.Model):
        own = steps.strategy_of_variables(model_or_builder)
        if own is not None:
            return _checked(model_or_builder), own
        _checked(model_or_builder)

    # Variables need a home while they are made; the step will be traced for another
    # one.
    strategy = MirroredStrategy(["cpu:0"], shard_optimizer_state=shard_optimizer_state)
    with strategy.scope():
        if isinstance(model_or_builder, keras.Model):
            return _again(model_or_builder), strategy
        if not callable(model_or_builder):
            raise StructureTypeError(
                "A dry run is for a Keras model, or a function that makes one.",
                received=f"{model_or_builder!r}.",
                fix="kd.dry_run(build_model, 256), where build_model() returns a "
                "compiled model.",
            )
        model = model_or_builder()
    if not isinstance(model, keras.Model):
        raise StructureTypeError(
            "The function of a dry run returns a compiled Keras model.",
            received=f"{model!r}.",
            fix="return the model at its end.",
        )
    return _checked(model), steps.strategy_of_variables(model) or strategy


def _again(model: Any) -> Any:
    try:
        made = type(model).from_config(model.get_config())
        made.compile_from_config(model.get_compile_config())
    except Exception as error:
        raise InputError(
            "A model that was made without a strategy is made again for a dry run, "
            "which this one cannot.",
            received=f"{type(error).__name__}: "
            f"{str(error).splitlines()[0] if str(error) else ''}",
            fix="pass the function that makes and compiles it: kd.dry_run(build_model, "
            "256).",
        ) from error
    return _checked(made)


def _checked(model: Any) -> Any:
    if not model.compiled:
        raise StructureTypeError(
            "A training step needs a compiled model.",
            received=f"{model!r}.",
            fix='model.compile("adam", loss) first, inside of the function that makes '
            "it.",
        )
    if model.run_eagerly or not model.jit_compile:
        raise StructureTypeError(
            "A model that runs eagerly has no program to look at.",
            received=f"run_eagerly={model.run_eagerly}, "
            f"jit_compile={model.jit_compile}.",
            fix="leave both of them as they are when the model is compiled.",
        )
    return model
