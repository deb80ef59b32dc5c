"""The model of a dry run, with a strategy whose mesh can be exchanged for another.

A model that is made for it has variables without values, so it may be larger than the
memory of this machine.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import keras

from keras_distribute import checks, context
from keras_distribute._compat.shapes_alone import shapes_alone
from keras_distribute._compat.trainer import is_traced
from keras_distribute.context import Frame, Mode
from keras_distribute.errors import InputError, StructureTypeError
from keras_distribute.strategies.base import Strategy
from keras_distribute.strategies.mirrored import MirroredStrategy
from keras_distribute.training import adoption


class Model(NamedTuple):
    """A compiled model, and the strategy that its variables belong to.

    Args:
        is_users: Whether it is used after the dry run: its variables have values.
    """

    model: Any
    strategy: Strategy
    is_users: bool

    def creation(self) -> AbstractContextManager[None]:
        """Around what creates further variables of the model."""
        return nullcontext() if self.is_users else shapes_alone()


def with_strategy(model_or_builder: Any, **options: Any) -> Model:
    """The model. One without a strategy is made once more from its configuration;
    `options` of a `MirroredStrategy` are for those that are made here.

    Raises:
        StructureTypeError: For anything but a compiled model whose step is traced.
        InputError: For a model that cannot be made from its configuration.
    """
    is_model = isinstance(model_or_builder, keras.Model)
    if is_model:
        _check(model_or_builder)
        own = adoption.strategy_of_variables(model_or_builder)
        if own is not None:
            return Model(model_or_builder, own, is_users=True)
    # A model passes: it can be called.
    what = "A dry run is for a Keras model, or a function that makes one."
    fix = "kd.dry_run(build_model, 256), where build_model() returns a compiled model."
    checks.function("model_or_builder", model_or_builder, what, fix)
    # Variables need a device while they are made; the step will be traced for others.
    strategy = MirroredStrategy(["cpu:0"], **options)
    # `shapes_alone` gives names back: the second dry run of a function has those of the
    # first, and so its program.
    # The function may have a strategy of its own.
    frame = Frame(strategy, Mode.CROSS, named=True, gives_way=True)
    with context.entered(frame), shapes_alone():
        model = _clone(model_or_builder) if is_model else model_or_builder()
    what = "The function of a dry run returns a compiled Keras model."
    checks.instance("model", model, keras.Model, what, "return the model at its end.")
    _check(model)
    own = adoption.strategy_of_variables(model)
    return Model(model, own or strategy, is_users=False)


def _clone(model: Any) -> Any:
    try:
        made = type(model).from_config(model.get_config())
        made.compile_from_config(model.get_compile_config())
    except Exception as error:
        first_line = str(error).partition("\n")[0]
        raise InputError(
            "A model that was made without a strategy is made again for a dry run, "
            "which this one cannot.",
            received=f"{type(error).__name__}: {first_line}",
            fix="pass the function that makes and compiles it: kd.dry_run(build_model, "
            "256).",
        ) from error
    return made


def _check(model: Any) -> None:
    if not model.compiled:
        raise StructureTypeError(
            "A training step needs a compiled model.",
            received=f"{model!r}.",
            fix='model.compile("adam", loss) first, inside of the function that makes '
            "it.",
        )
    refuse_eager(model)


def refuse_eager(model: Any) -> None:
    """Raises `StructureTypeError` for a model whose steps are not compiled."""
    if not is_traced(model):
        raise StructureTypeError(
            "A model that runs eagerly has no program to look at.",
            received=f"run_eagerly={model.run_eagerly}, "
            f"jit_compile={model.jit_compile}.",
            fix="leave both of them as they are when the model is compiled.",
        )
