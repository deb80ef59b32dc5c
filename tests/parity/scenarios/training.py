"""Optimizers and metrics in `run`."""

from collections.abc import Callable, Iterable
from typing import Any

from ..encoding import JSON
from .side import Side, scoped

Config = dict[str, Any]


def optimized(
    side: Side,
    strategy: Any,
    optimizer: tuple[str, Config],
    start: list[Any],
    steps: Iterable[Any],
) -> tuple[list[JSON], int]:
    """Variables after each step with each replica's gradients, as they are, and how
    many steps the optimizer has counted.
    """
    name, config = optimizer
    with strategy.scope():
        made = getattr(side.keras.optimizers, name)(**config)
        variables = [side.variable(value) for value in start]
        made.build(variables)

    def step(gradients: Any) -> None:
        made.apply_gradients(zip(gradients, variables, strict=True))

    after: list[JSON] = []
    for gradients in steps:
        strategy.run(step, args=(gradients,))
        values = [side.read(variable) for variable in variables]
        after.append(side.encoded(value=values, strategy=strategy))
    return after, int(side.read(made.iterations))


def metric(
    side: Side, strategy: Any, name: str, config: Config
) -> tuple[Any, Callable[[list[Any]], Any]]:
    """A metric, and what updates it with each replica's arguments and weights, if there
    are any, and gives its results there.
    """
    made = scoped(strategy, lambda: getattr(side.keras.metrics, name)(**config))

    def step(args: Any, weights: Any) -> Any:
        made.update_state(*args, sample_weight=weights)
        return made.result()

    def update(batches: list[Any]) -> Any:
        args, weights = zip(*batches, strict=True)
        weighted = weights[0] is not None
        given = side.per_replica(strategy, weights) if weighted else None
        return strategy.run(step, (side.per_replica(strategy, args), given))

    return made, update
