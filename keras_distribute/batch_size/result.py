"""What a search for a batch size has found, and what follows from it."""

from __future__ import annotations

import dataclasses
import math


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchSizeResult:
    """What `kd.find_batch_size` has found; batches are global ones, in rows.

    Args:
        largest: The largest batch whose steps ran.
        too_large: The smallest that ran out of memory, or is over `memory_limit`;
            `None` where each batch ran.
        recommended: What to give to `fit` as `batch_size`: less than `largest` by a
            margin, where memory is what limits it.
        gradient_accumulation_steps: What to give to the optimizer, so that
            `recommended` times it is the `global_batch_size` that was asked for; 1 for
            no accumulation.
        num_trials: How many batches were tried, each by a program compiled for it.
    """

    largest: int
    too_large: int | None
    recommended: int
    gradient_accumulation_steps: int
    num_trials: int


def recommended(
    largest: int, *, is_limited: bool, margin: float, unit: int, whole: int | None
) -> tuple[int, int]:
    """The batch to train with, and of how many of them one update is made.

    Args:
        largest: The largest batch whose steps ran.
        is_limited: Whether memory is the reason that it is no larger.
        margin: How much smaller to stay then, as a fraction.
        unit: The number of replicas, over which the rows divide where they can.
        whole: The batch of one update; `None`: each batch is one.
    """
    safe = largest
    if is_limited:
        safe = max(unit, int(largest * (1 - margin)) // unit * unit)
    if whole is None:
        return safe, 1
    if largest == whole:  # Asked for, and tried.
        return whole, 1
    roots = [n for n in range(1, math.isqrt(whole) + 1) if not whole % n]
    divisors = sorted({*roots, *(whole // n for n in roots)})
    small = [count for count in divisors if whole // count <= safe]
    even = [count for count in small if not whole // count % unit]
    count = (even or small)[0]
    return whole // count, count
