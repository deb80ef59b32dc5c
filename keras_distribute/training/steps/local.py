"""The training step whose gradients are each replica's own until they are summed.

In a step over the global batch XLA sums a gradient where the product that yields it is
computed, and what follows the product, often a transposition, cannot become a part of
it any more. Where each replica computes the gradient of its own rows as one device
would, and the results are summed, the step is as fast as a loop by hand.

What this needs of a model is in `plan.py`.
"""

from __future__ import annotations

from typing import Any

from keras_distribute import context
from keras_distribute._compat import rows as compat
from keras_distribute._compat.trainer import TrainState
from keras_distribute.strategies.base import Strategy
from keras_distribute.training.steps import forward
from keras_distribute.training.steps.forward import Restore
from keras_distribute.training.steps.step_programs import Step


def local_step(trainer: Any, strategy: Strategy, global_step: Step) -> Step:
    """Keras's training step on local gradients, for a model whose plan is local.

    Args:
        global_step: For batches whose rows do not divide.
    """

    def step(state: Any, data: Any) -> Any:
        result = gradients(trainer, strategy, list, TrainState(*state), data)
        if result is None:
            return global_step(state, data)
        logs, grads, new = result
        return logs, forward.updated(trainer.optimizer, new, grads)

    return step


def gradients(
    trainer: Any,
    strategy: Strategy,
    restore: Restore,
    state: TrainState,
    data: Any,
    *,
    summed: bool = True,
) -> tuple[Any, list[Any], TrainState] | None:
    """What `forward.loss_and_gradients` returns, of each replica's rows.

    Args:
        restore: From weights as they are carried to the values of the trainable
            variables.
        state: With its weights as they are carried.
        summed: Whether the gradients are the sums over the replicas; otherwise each has
            an axis for the replicas' own.

    Returns:
        `None` where the rows do not divide, or the parts do not make up the whole.
    """
    batch = context.frame().batch
    if batch is None or batch.shards != strategy.num_replicas_in_sync:
        return None
    x = compat.unpack_x_y_sample_weight(data)[0]
    own = forward.per_replica(
        trainer, strategy, restore, state.weights, state.others, x
    )
    if own is None:
        return None
    copies = forward.copies(state.weights, strategy)
    logs, grads, state = forward.loss_and_gradients(
        trainer, own, restore, state, data, copies
    )
    return logs, forward.summed(grads, strategy) if summed else grads, state
