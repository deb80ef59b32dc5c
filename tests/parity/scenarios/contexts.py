"""Which context each place is in, and calls in the wrong one."""

from collections.abc import Callable
from typing import Any

from ..encoding import JSON
from .side import Calls, Side, scoped


def places(side: Side, strategy: Any) -> dict[str, dict[str, JSON]]:
    """What the context functions say at each place."""
    distribute = side.distribute
    noted: dict[str, dict[str, JSON]] = {}

    def note(place: str) -> None:
        context = distribute.get_replica_context()
        noted[place] = {
            "in_cross_replica_context": distribute.in_cross_replica_context(),
            "has_strategy": distribute.has_strategy(),
            "replica_context_is_none": context is None,
            "own_strategy": distribute.get_strategy() is strategy,
            "num_replicas_in_sync": distribute.get_strategy().num_replicas_in_sync,
            "context_num_replicas": context and context.num_replicas_in_sync,
        }

    def step() -> None:
        note("run")
        distribute.get_replica_context().merge_call(lambda strategy: note("merge_call"))
        note("run after merge_call")

    note("top level")
    with strategy.scope():
        variable = side.variable(1.0)
        note("scope")
        strategy.run(step)
        strategy.extended.update(variable, lambda v: note("update"))
        with strategy.scope():
            note("scope in scope")
        note("after inner scope")
        strategy.experimental_distribute_values_from_function(
            lambda context: note("value function")
        )
    note("after scope")
    strategy.run(lambda: note("run outside scope"))
    strategy.extended.update(variable, lambda v: note("update outside scope"))
    distribute.experimental_set_strategy(strategy)
    try:
        note("set strategy")
    finally:
        distribute.experimental_set_strategy(None)
    note("strategy unset")
    return noted


NESTED = (
    *("run in run", "run of another in run", "run in merge_call", "run in update"),
    *("scope in run", "scope of another in run", "scope in merge_call"),
    *("scope in update", "reduce in run", "gather in run", "local results in run"),
    *("grouped update in run", "update in update", "update in merge_call"),
    *("reduce in update", "reduce in merge_call"),
)
"""Calls, and the places where they are made."""


def misuse(side: Side, strategy: Any) -> Calls:
    """Calls in the wrong context, and with wrong arguments."""
    other = side.distribute.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        variable = side.variable(1.0, aggregation="sum")
    one = side.tensor(1.0)
    return {
        "scope in scope of another": lambda: scoped(
            strategy, lambda: scoped(other, lambda: one)
        ),
        "scope in own scope": lambda: scoped(
            strategy, lambda: scoped(strategy, lambda: one)
        ),
        "run in scope of another": lambda: scoped(
            other, lambda: strategy.run(lambda: one)
        ),
        **_nested(side, strategy, other, variable),
        **_of_contexts(side, strategy),
        "variable of strategy in run of another": lambda: other.run(
            lambda: variable.assign_add(1.0)
        ),
        "variable created in scope of another, assigned": lambda: scoped(
            other, lambda: variable.assign_add(1.0) is not None
        ),
        "run without a function": lambda: strategy.run(None),
        "run with a bad options": lambda: strategy.run(lambda: one, options="fast"),
        "error in run": lambda: strategy.run(lambda: {}["missing"]),
        **_of_the_default_strategy(side),
        **_devices(side.distribute.MirroredStrategy),
        **_exits(strategy),
    }


def _nested(side: Side, strategy: Any, other: Any, variable: Any) -> Calls:
    """One call in another, by the names in `NESTED`."""
    one, update = side.tensor(1.0), strategy.extended.update
    calls: Calls = {
        "run": lambda: strategy.run(lambda: one),
        "run of another": lambda: other.run(lambda: one),
        "scope": lambda: scoped(strategy, lambda: one),
        "scope of another": lambda: scoped(other, lambda: one),
        "reduce": lambda: strategy.reduce("SUM", one, axis=None),
        "gather": lambda: strategy.gather(side.tensor([1.0]), axis=0),
        "local results": lambda: strategy.experimental_local_results(one)[0],
        "update": lambda: update(variable, lambda v: one, group=False),
        "grouped update": lambda: update(variable, lambda v: one),
    }
    in_places: dict[str, Callable[[Any], Any]] = {
        "run": strategy.run,
        "merge_call": lambda call: strategy.run(
            lambda: side.distribute.get_replica_context().merge_call(
                lambda strategy: call()
            )
        ),
        "update": lambda call: update(variable, lambda v: call(), group=False),
    }
    found: Calls = {}
    for name in NESTED:
        call, place = name.split(" in ")
        found[name.removeprefix("grouped ")] = lambda call=call, place=place: in_places[
            place
        ](calls[call])
    return found


def _of_contexts(side: Side, strategy: Any) -> Calls:
    """Merge calls, contexts kept after their `run`, and strategies that are set."""
    kept: list[Any] = []
    strategy.run(lambda: kept.append(side.distribute.get_replica_context()))
    context, one = kept[0], side.tensor(1.0)

    def merged() -> Any:
        return context.merge_call(lambda strategy: one)

    def set_strategy() -> None:
        side.distribute.experimental_set_strategy(strategy)

    return {
        "merge_call in merge_call": lambda: strategy.run(
            lambda: side.distribute.get_replica_context().merge_call(
                lambda strategy: merged()
            )
        ),
        "merge_call of None": lambda: strategy.run(
            lambda: side.distribute.get_replica_context().merge_call(None)
        ),
        "all_reduce of a kept context": lambda: context.all_reduce("SUM", one),
        "merge_call of a kept context": merged,
        "all_gather of a kept context": lambda: context.all_gather(
            side.tensor([1.0]), axis=0
        ),
        "set strategy in scope": lambda: scoped(strategy, set_strategy),
        "set strategy in run": lambda: strategy.run(set_strategy),
    }


def _of_the_default_strategy(side: Side) -> Calls:
    """What there is without a strategy."""
    distribute, one = side.distribute, side.tensor(1.0)
    default, pair = distribute.get_strategy(), side.tensor([1.0, 3.0])
    return {
        "default all_reduce": lambda: distribute.get_replica_context().all_reduce(
            "SUM", one
        ),
        "default merge_call": lambda: distribute.get_replica_context().merge_call(
            lambda strategy, x: x, args=(one,)
        ),
        "default run": lambda: default.run(lambda x: x + 1, args=(one,)),
        "default reduce": lambda: default.reduce("MEAN", pair, axis=0),
        "default local results": lambda: default.experimental_local_results(one),
    }


def _devices(mirrored: Any) -> Calls:
    """What is no list of devices; nothing is said of a strategy that is made."""
    return {
        "no devices": lambda: mirrored([]) and None,
        "the same device twice": lambda: mirrored(["CPU:0", "CPU:0"]) and None,
        "an unknown device": lambda: mirrored(["CPU:99"]) and None,
        "devices not a list": lambda: mirrored("CPU:0").num_replicas_in_sync,
    }


def _exits(strategy: Any) -> Calls:
    """Scopes that are left in another order, or again."""

    def wrong_order() -> None:
        outer, inner = strategy.scope(), strategy.scope()
        outer.__enter__()
        inner.__enter__()
        try:
            outer.__exit__(None, None, None)
        finally:
            inner.__exit__(None, None, None)

    def exit_twice() -> None:
        scope = strategy.scope()
        scope.__enter__()
        scope.__exit__(None, None, None)
        scope.__exit__(None, None, None)

    return {"exit scopes in wrong order": wrong_order, "exit a scope twice": exit_twice}
