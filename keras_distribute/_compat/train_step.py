"""What Keras's training step consists of, for one that carries its weights in another
form; and whether a model has that step.
"""

from __future__ import annotations

from typing import Any

from keras import Layer
from keras.utils import unpack_x_y_sample_weight

from keras_distribute._compat.names import BaseTrainer, JAXTrainer
from keras_distribute._compat.seams import check

__all__ = ["unpack_x_y_sample_weight"]

check(JAXTrainer, "_losses_override", "_update_metrics_variables")
check(Layer, "_call_has_training_arg")

_STEP_METHODS = {
    BaseTrainer: ("compute_loss", "_compute_loss", "stateless_compute_loss"),
    JAXTrainer: ("train_step", "compute_loss_and_updates", "_update_metrics_variables"),
    Layer: ("stateless_call", "losses"),
}


def has_keras_step(trainer: Any) -> bool:
    """Whether all methods that Keras's training step consists of are Keras's own."""
    return not any(
        getattr(type(trainer), name) is not getattr(owner, name)
        or name in vars(trainer)
        for owner, names in _STEP_METHODS.items()
        for name in names
    )


def forward(trainer: Any, trained: list[Any], others: list[Any], x: Any) -> Any:
    """Keras's forward pass in training: predictions, new values of `others`, losses."""
    kwargs = {"training": True} if trainer._call_has_training_arg else {}
    return trainer.stateless_call(trained, others, x, return_losses=True, **kwargs)


def stateless_loss(
    trainer: Any, losses: list[Any], variables: tuple[Any, ...], **batch: Any
) -> Any:
    """`stateless_compute_loss` with the losses that the forward pass collected, as
    Keras's own step calls it.
    """
    if losses:
        trainer._losses_override.clear()
        trainer._losses_override = losses
    try:
        return trainer.stateless_compute_loss(*variables, **batch)
    finally:
        if losses:
            trainer._losses_override.clear()


def update_metrics(
    trainer: Any,
    metrics_variables: Any,
    loss: Any,
    x: Any,
    y: Any,
    y_pred: Any,
    weight: Any,
) -> Any:
    """The logs and the new values of the metrics' variables."""
    return trainer._update_metrics_variables(
        metrics_variables, loss, x, y, y_pred, weight
    )
