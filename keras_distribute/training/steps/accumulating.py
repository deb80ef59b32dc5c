"""Gradient accumulators of which each replica has its own part.

In a step over the global batch XLA reduces a gradient where it is computed, at each
micro-step. Where each replica computes the gradients of its own rows (`by_rows.py`), it
adds them to its accumulators, which are summed on the last micro-step only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from keras_distribute._compat.trainer import TrainState
from keras_distribute.training.steps.step_programs import Step

SLOTS = TrainState._fields.index("slots")
"""Where the accumulators are in a state: among the optimizer's variables."""


def on_sums(step: Step, accumulators: Sequence[int], replicas: int) -> Step:
    """A step over the global batch, on a state whose accumulators have an axis for the
    replicas.

    Args:
        step: On their sums.
        accumulators: Where they are among the slots.
    """
    if not accumulators:
        return step

    def summed_step(state: Any, data: Any) -> Any:
        state = TrainState(*state)
        sums = {i: jnp.sum(state.slots[i], 0) for i in accumulators}
        changed = state._replace(slots=with_changed(state.slots, sums))
        logs, new = step(changed, data)
        state = TrainState(*new)
        first = {i: of_first(state.slots[i], replicas) for i in accumulators}
        return logs, state._replace(slots=with_changed(state.slots, first))

    return summed_step


def with_changed(slots: Sequence[Any], changed: Mapping[int, Any]) -> list[Any]:
    """The slots, with others in some places."""
    return [changed.get(i, slot) for i, slot in enumerate(slots)]


def of_first(total: Any, replicas: int) -> Any:
    """An accumulator of all replicas, in the first one's place."""
    return jnp.zeros((replicas, *total.shape), total.dtype).at[0].set(total)
