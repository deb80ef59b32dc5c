"""What replicas do together: collectives and their gradients, merge calls."""

from collections.abc import Callable
from typing import Any

import numpy as np

from .side import Side

Step = Callable[[Any], Any]
"""What each replica does with its value."""


def all_reduce(side: Side, op: str) -> Step:
    """The reduction of the replicas' values."""
    return lambda value: side.distribute.get_replica_context().all_reduce(op, value)


def all_gather(side: Side, axis: int) -> Step:
    """The replicas' values along an axis."""
    return lambda value: side.distribute.get_replica_context().all_gather(
        value, axis=axis
    )


def gradient(side: Side, collective: str, power: int) -> Step:
    """The gradient, on each replica, of its own `coefficient * sum(weights * y**power)`
    with respect to its own `x`.

    `y` is the collective of `x`, and the weights are 1, 2, 3, ... by element of `y`.
    """
    together = (
        all_gather(side, 0) if "gather" in collective else all_reduce(side, collective)
    )

    def step(value: Any) -> Any:
        x, coefficient = value

        def loss(x: Any) -> Any:
            y = together(x)
            weights = side.tensor(np.arange(1, y.shape[0] + 1, dtype=np.float32))
            return coefficient * weights * y**power

        return side.gradient(loss, x)

    return step


def merge_calls(side: Side) -> dict[str, Step]:
    """What each replica gets back from a merge function, by what that returns."""

    def failing(strategy: Any, value: Any) -> Any:
        raise LookupError("raised in merge_call")

    functions: dict[str, Callable[[Any, Any], Any]] = {
        "reduce": lambda strategy, value: strategy.reduce("SUM", value, axis=None),
        "same": lambda strategy, value: value,
        "structure": lambda strategy, value: {
            "mean": strategy.reduce("MEAN", value, axis=None),
            "own": value,
        },
        "last local result": lambda strategy, value: (
            strategy.experimental_local_results(value)[-1]
        ),
        "raises": failing,
    }
    return {
        name: lambda value, function=function: (
            side.distribute.get_replica_context().merge_call(function, args=(value,))
        )
        for name, function in functions.items()
    }
