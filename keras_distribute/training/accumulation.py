"""Gradient accumulation: one micro-step on one replica, in `fit` as in `Strategy.run`.

Each replica adds its own gradients to its own accumulators; they are summed over the
replicas on the last micro-step only. The optimizer's own step runs each time, with
empty accumulators: on the sum where it updates, and on zeros where it discards the
update anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax


def micro_step(
    accumulated: Sequence[Any],
    gradients: Sequence[Any],
    count: Any,
    num_steps: int,
    sum_over_replicas: Callable[[list[Any]], list[Any]],
    shapes: Sequence[tuple[int, ...]],
) -> tuple[list[Any], list[Any]]:
    """Adds gradients to accumulators.

    Args:
        gradients: This replica's own, in their order.
        count: How many micro-steps there were.
        num_steps: Between two updates.
        sum_over_replicas: Sums the accumulated gradients of all replicas.
        shapes: Of these sums.

    Returns:
        What the optimizer gets in place of gradients, and the new accumulators.
    """
    updates = (count + 1) % num_steps == 0
    totals = [a + gradient for a, gradient in zip(accumulated, gradients, strict=True)]
    dtypes = [total.dtype for total in totals]
    summed = lax.cond(
        updates,
        lambda: sum_over_replicas(totals),
        lambda: list(map(jnp.zeros, shapes, dtypes)),
    )
    return summed, [jnp.where(updates, jnp.zeros_like(t), t) for t in totals]
