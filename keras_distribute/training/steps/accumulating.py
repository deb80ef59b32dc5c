"""Gradient accumulation in `fit` that communicates gradients only when it updates.

In a step over the global batch XLA reduces a gradient where it is computed, at each
micro-step. Here the forward pass runs per replica (`forward.py`), and each replica's
own gradients are added to its accumulators, which are summed on the last micro-step
only.

What this needs of a model is in `plan.py`; any other is trained by the global step:
exact, and reducing at each micro-step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from keras_distribute import context
from keras_distribute._compat import optimizer as compat_optimizer
from keras_distribute._compat import rows as compat
from keras_distribute._compat.trainer import TrainState
from keras_distribute.strategies.base import Strategy
from keras_distribute.training.accumulation import micro_step
from keras_distribute.training.steps import forward

Step = Callable[[Any, Any], Any]


def accumulating(
    trainer: Any, strategy: Strategy, indices: Sequence[int], global_step: Step
) -> Step:
    """A training step whose state holds the accumulators per replica.

    Args:
        indices: Where the accumulators are among the slots.
        global_step: For batches whose rows do not divide.
    """
    replicas = strategy.num_replicas_in_sync

    def step(state: Any, data: Any) -> Any:
        state = TrainState(*state)
        result = _own_gradients(trainer, strategy, state, data)
        if result is not None:
            logs, grads, state = result
            shapes = [state.slots[i].shape[1:] for i in indices]
            return logs, updated(
                trainer.optimizer,
                state,
                grads,
                lambda totals: forward.summed(totals, strategy),
                dict(zip(indices, shapes, strict=True)),
            )
        sums = {i: jnp.sum(state.slots[i], 0) for i in indices}
        logs, new = global_step(
            state._replace(slots=with_changed(state.slots, sums)), data
        )
        state = TrainState(*new)
        first = {i: _of_first(state.slots[i], replicas) for i in indices}
        return logs, state._replace(slots=with_changed(state.slots, first))

    return step


def _own_gradients(
    trainer: Any, strategy: Strategy, state: TrainState, data: Any
) -> tuple[Any, list[Any], TrainState] | None:
    """What `forward.loss_and_gradients` returns, with the gradients of each replica's
    rows, along an axis for the replicas.

    Returns:
        `None` where the rows do not divide, or the parts do not make up the whole.
    """
    batch = context.frame().batch
    if batch is None or batch.shards != strategy.num_replicas_in_sync:
        return None
    x = compat.unpack_x_y_sample_weight(data)[0]
    own = forward.per_replica(trainer, strategy, list, state.weights, state.others, x)
    if own is None:
        return None
    copies = forward.copies(state.weights, strategy)
    return forward.loss_and_gradients(trainer, own, list, state, data, copies)


def updated(
    optimizer: Any,
    state: TrainState,
    grads: list[Any],
    sum_over_replicas: Callable[[list[Any]], list[Any]],
    shapes: Mapping[int, tuple[int, ...]] | None = None,
) -> TrainState:
    """The optimizer's step on the summed accumulators where it updates.

    Args:
        grads: To be added to the accumulators in `state`.
        sum_over_replicas: Of what they have then.
        shapes: Of the sums, by the place among the slots; by default those of the
            accumulators.
    """
    accumulation = compat_optimizer.accumulation(optimizer)
    assert accumulation is not None
    num_steps, counter, accumulators = accumulation
    index_of = {id(variable): i for i, variable in enumerate(optimizer.variables)}
    order = [index_of[id(accumulator)] for accumulator in accumulators]
    own = [state.slots[i] for i in order]
    wanted = [shapes[i] if shapes else state.slots[i].shape for i in order]
    empty = list(map(jnp.zeros, wanted, [each.dtype for each in own]))
    summed, own = micro_step(
        own,
        grads,
        state.slots[index_of[id(counter)]],
        num_steps,
        sum_over_replicas,
        wanted,
    )
    slots = with_changed(state.slots, dict(zip(order, empty, strict=True)))
    state = forward.updated(optimizer, state._replace(slots=slots), summed)
    kept = dict(zip(order, own, strict=True))
    return state._replace(slots=with_changed(state.slots, kept))


def with_changed(slots: Sequence[Any], changed: Mapping[int, Any]) -> list[Any]:
    """The slots, with others in some places."""
    return [changed.get(i, slot) for i, slot in enumerate(slots)]


def _of_first(total: Any, replicas: int) -> Any:
    """An accumulator of all replicas, in the first one's place."""
    return jnp.zeros((replicas, *total.shape), total.dtype).at[0].set(total)
