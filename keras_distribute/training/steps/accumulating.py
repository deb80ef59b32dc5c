"""Gradient accumulation in `fit` that communicates gradients only when it updates.

In a step over the global batch XLA reduces a gradient where it is computed, at each
micro-step. Here the forward pass runs per replica (`forward.py`), and each replica's
own gradients are added to its accumulators, which are summed on the last micro-step
only.

What this needs of a model is in `plan.py`; any other is trained by the global step:
exact, and reducing at each micro-step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from keras_distribute._compat import optimizer as compat_optimizer
from keras_distribute.strategies.base import Strategy
from keras_distribute.training.steps import forward, local

Step = Callable[[Any, Any], Any]


def accumulating(
    trainer: Any, strategy: Strategy, indices: Sequence[int], global_step: Step
) -> Step:
    """A training step whose state holds the accumulators per replica."""

    def step(state: Any, data: Any) -> Any:
        result = _local_step(trainer, strategy, indices, state, data)
        if result is not None:
            return result
        trained, others, slots, metrics = state
        slots = list(slots)
        for i in indices:
            slots[i] = jnp.sum(slots[i], 0)
        logs, (trained, others, slots, metrics) = global_step(
            (trained, others, slots, metrics), data
        )
        for i in indices:
            slots[i] = (
                jnp.zeros(
                    (strategy.num_replicas_in_sync, *slots[i].shape), slots[i].dtype
                )
                .at[0]
                .set(slots[i])
            )
        return logs, (trained, others, slots, metrics)

    return step


def _local_step(
    trainer: Any, strategy: Strategy, indices: Sequence[int], state: Any, data: Any
) -> Any:
    trained, others, slots, metrics = state
    result = local.gradients(
        trainer, strategy, list, trained, others, metrics, data, summed=False
    )
    if result is None:
        return None
    logs, grads, others, metrics = result
    trained, slots = _apply(trainer.optimizer, strategy, indices, trained, slots, grads)
    return logs, (trained, others, slots, metrics)


def _apply(
    optimizer: Any,
    strategy: Strategy,
    indices: Sequence[int],
    trained: list[Any],
    slots: list[Any],
    grads: list[Any],
) -> Any:
    """The optimizer's step on the summed accumulators where it updates; elsewhere it
    discards what it gets.
    """
    accumulation = compat_optimizer.accumulation(optimizer)
    assert accumulation is not None
    steps, counter, accumulators = accumulation
    variables = optimizer.variables
    count = slots[
        next(i for i, variable in enumerate(variables) if variable is counter)
    ]
    updates = (count + 1) % steps == 0
    place = {id(variables[i]): i for i in indices}
    order = [place[id(accumulator)] for accumulator in accumulators]
    totals = [slots[i] + grad for i, grad in zip(order, grads, strict=True)]
    shapes = [total.shape[1:] for total in totals]
    summed = lax.cond(
        updates,
        lambda: forward.summed(totals, strategy),
        lambda: [
            jnp.zeros(shape, total.dtype)
            for shape, total in zip(shapes, totals, strict=True)
        ],
    )
    slots = list(slots)
    for i, shape in zip(order, shapes, strict=True):
        slots[i] = jnp.zeros(shape, slots[i].dtype)
    trained, slots = optimizer.stateless_apply(slots, summed, trained)
    for i, total in zip(order, totals, strict=True):
        slots[i] = jnp.where(updates, jnp.zeros_like(total), total)
    return trained, slots
