"""What is done to variables, for every synchronization, aggregation and context."""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from .side import Calls, Side, scoped

INITIAL = 10.0
PER_REPLICA = (1.0, 2.0, 3.0, 5.0)
COMMON = 8.0
OPERATIONS = ("read", "assign", "assign_add", "assign_sub")


def create(side: Side, strategy: Any, synchronization: str, aggregation: str) -> Any:
    """The variable under the strategy's scope."""
    return scoped(
        strategy,
        lambda: side.variable(
            INITIAL, synchronization=synchronization, aggregation=aggregation
        ),
    )


def operate(
    side: Side, strategy: Any, variable: Any, context: str, operation: str
) -> Any:
    """What each replica, the scope or the update function reads after the operation."""
    did = _operator(side, operation)
    if context == "replica":  # no Python number: see "python number" in `creation`
        return strategy.run(
            lambda: did(variable, side.tensor(PER_REPLICA)[side.replica_id()])
        )
    with strategy.scope():
        if context == "cross-replica":
            return did(variable, COMMON)
        return strategy.extended.update(variable, did, args=(COMMON,), group=False)


@cache
def _operator(side: Side, operation: str) -> Callable[[Any, Any], Any]:
    def did(variable: Any, operand: Any) -> Any:
        if operation != "read":
            getattr(variable, operation)(operand)
        return side.read(variable)

    return did


def creation(side: Side, strategy: Any) -> Calls:
    """Variables made where it is unusual: in a replica, with defaults, wrongly."""

    def by_replica() -> float:
        in_run = side.distribute.get_replica_context() is not None
        return 1.0 + (float(side.replica_id()) if in_run else 0.0)

    made: dict[str, tuple[Any, dict[str, Any]]] = {
        "defaults": (1.0, {}),
        "not trainable": (1.0, {"trainable": False}),
        "integer": (np.int32(1), {}),
        "on read, trainable": (1.0, {"trainable": True, "synchronization": "on_read"}),
        "bad aggregation": (1.0, {"aggregation": "most"}),
        "bad synchronization": (1.0, {"synchronization": "later"}),
        "initial value by replica": (by_replica, {}),
    }
    return {
        name: lambda initial=initial, options=options: scoped(
            strategy, lambda: side.variable(initial, **options)
        )
        for name, (initial, options) in made.items()
    }
