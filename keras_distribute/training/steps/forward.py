"""The forward pass of a training step over the global batch, and its gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from keras_distribute._compat import train_step as compat
from keras_distribute._compat.trainer import TrainState

Restore = Callable[[list[Any]], list[Any]]


def loss_and_gradients(
    trainer: Any, restore: Restore, state: TrainState, data: Any
) -> tuple[Any, list[Any], TrainState]:
    """The loss of all rows, and its gradients with respect to the weights as they are
    carried.

    Args:
        restore: From weights as they are carried to the values of the trainable
            variables.
        state: With its weights as they are carried.

    Returns:
        The logs, the gradients, and the state with new `others` and `metrics`.
    """
    x, y, weight = compat.unpack_x_y_sample_weight(data)

    def loss_of(weights: list[Any]) -> Any:
        # A loss may read weights, too, and is differentiated by them.
        values = restore(weights)
        predictions, others, losses = compat.forward(trainer, values, state.others, x)
        loss, (_, others, metrics) = compat.stateless_loss(
            trainer,
            losses,
            (values, others, state.metrics),
            x=x,
            y=y,
            y_pred=predictions,
            sample_weight=weight,
            training=True,
        )
        scaled = trainer.optimizer.scale_loss(loss)
        return scaled, (loss, predictions, others, metrics)

    (_, (loss, predictions, others, metrics)), grads = jax.value_and_grad(
        loss_of, has_aux=True
    )(state.weights)
    logs, metrics = compat.update_metrics(
        trainer, metrics, loss, x, y, predictions, weight
    )
    return logs, grads, state._replace(others=others, metrics=metrics)


def updated(optimizer: Any, state: TrainState, grads: list[Any]) -> TrainState:
    """The state after the optimizer's step."""
    weights, slots = optimizer.stateless_apply(state.slots, grads, state.weights)
    return state._replace(weights=weights, slots=slots)
