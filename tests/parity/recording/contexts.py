"""Records which context each place is in, and the errors of calls in the wrong one."""

from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from ..encoding import JSON
from .session import Entry, encoded, mirrored, result_of


def places(replicas: int) -> Iterator[Entry]:
    """What the context functions say at each place."""
    strategy = mirrored(replicas)
    noted: dict[str, JSON] = {}

    def note(place: str) -> None:
        context = tf.distribute.get_replica_context()
        noted[place] = {
            "in_cross_replica_context": tf.distribute.in_cross_replica_context(),
            "has_strategy": tf.distribute.has_strategy(),
            "replica_context_is_none": context is None,
            "own_strategy": tf.distribute.get_strategy() is strategy,
            "num_replicas_in_sync": tf.distribute.get_strategy().num_replicas_in_sync,
            "context_num_replicas": context and context.num_replicas_in_sync,
        }

    def step() -> None:
        note("run")
        tf.distribute.get_replica_context().merge_call(
            lambda strategy: note("merge_call")
        )
        note("run after merge_call")

    note("top level")
    with strategy.scope():
        variable = tf.Variable(1.0)
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
    tf.distribute.experimental_set_strategy(strategy)
    note("set strategy")
    tf.distribute.experimental_set_strategy(None)
    note("strategy unset")
    for place, said in noted.items():
        yield {"place": place, **said}


def misuse(replicas: int) -> Iterator[Entry]:
    """Calls in the wrong context: the error, or what came back where there is none."""
    strategy = mirrored(replicas)
    other = tf.distribute.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        variable = tf.Variable(1.0, aggregation=tf.VariableAggregation.SUM)
    kept: list[Any] = []
    strategy.run(lambda: kept.append(tf.distribute.get_replica_context()))
    one = tf.constant(1.0)

    def scoped(outer: tf.distribute.Strategy, fn: Callable[[], Any]) -> Any:
        with outer.scope():
            return fn()

    def in_run(fn: Callable[[], Any]) -> Callable[[], Any]:
        return lambda: strategy.run(fn)

    def in_merge_call(fn: Callable[[], Any]) -> Callable[[], Any]:
        return lambda: strategy.run(
            lambda: tf.distribute.get_replica_context().merge_call(
                lambda strategy: fn()
            )
        )

    def in_update(fn: Callable[[], Any]) -> Callable[[], Any]:
        return lambda: strategy.extended.update(variable, lambda v: fn(), group=False)

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

    cases: dict[str, Callable[[], Any]] = {
        "scope in scope of another": lambda: scoped(
            strategy, lambda: scoped(other, lambda: one)
        ),
        "scope in own scope": lambda: scoped(
            strategy, lambda: scoped(strategy, lambda: one)
        ),
        "run in scope of another": lambda: scoped(
            other, lambda: strategy.run(lambda: one)
        ),
        "run in run": in_run(lambda: strategy.run(lambda: one)),
        "run of another in run": in_run(lambda: other.run(lambda: one)),
        "run in merge_call": in_merge_call(lambda: strategy.run(lambda: one)),
        "run in update": in_update(lambda: strategy.run(lambda: one)),
        "scope in run": in_run(lambda: scoped(strategy, lambda: one)),
        "scope of another in run": in_run(lambda: scoped(other, lambda: one)),
        "scope in merge_call": in_merge_call(lambda: scoped(strategy, lambda: one)),
        "scope in update": in_update(lambda: scoped(strategy, lambda: one)),
        "reduce in run": in_run(lambda: strategy.reduce("SUM", one, axis=None)),
        "gather in run": in_run(lambda: strategy.gather(tf.constant([1.0]), axis=0)),
        "local results in run": in_run(
            lambda: strategy.experimental_local_results(one)[0]
        ),
        "update in run": in_run(
            lambda: strategy.extended.update(variable, lambda v: one)
        ),
        "update in update": in_update(
            lambda: strategy.extended.update(variable, lambda v: one, group=False)
        ),
        "update in merge_call": in_merge_call(
            lambda: strategy.extended.update(variable, lambda v: one, group=False)
        ),
        "reduce in update": in_update(lambda: strategy.reduce("SUM", one, axis=None)),
        "reduce in merge_call": in_merge_call(
            lambda: strategy.reduce("SUM", one, axis=None)
        ),
        "merge_call in merge_call": in_merge_call(
            lambda: kept[0].merge_call(lambda strategy: one)
        ),
        "merge_call of None": in_run(
            lambda: tf.distribute.get_replica_context().merge_call(None)
        ),
        "all_reduce of a kept context": lambda: kept[0].all_reduce("SUM", one),
        "merge_call of a kept context": lambda: kept[0].merge_call(
            lambda strategy: one
        ),
        "all_gather of a kept context": lambda: kept[0].all_gather(
            tf.constant([1.0]), axis=0
        ),
        "set strategy in scope": lambda: scoped(
            strategy, lambda: tf.distribute.experimental_set_strategy(strategy)
        ),
        "set strategy in run": in_run(
            lambda: tf.distribute.experimental_set_strategy(strategy)
        ),
        "variable of strategy in run of another": lambda: other.run(
            lambda: variable.assign_add(1.0)
        ),
        "variable created in scope of another, assigned": lambda: scoped(
            other, lambda: variable.assign_add(1.0) is not None
        ),
        "run without a function": lambda: strategy.run(None),
        "run with a bad options": lambda: strategy.run(lambda: one, options="fast"),
        "error in run": in_run(lambda: {}["missing"]),
        "default all_reduce": lambda: tf.distribute.get_replica_context().all_reduce(
            "SUM", one
        ),
        "default merge_call": lambda: tf.distribute.get_replica_context().merge_call(
            lambda strategy, x: x, args=(one,)
        ),
        "default run": lambda: tf.distribute.get_strategy().run(
            lambda x: x + 1, args=(one,)
        ),
        "default reduce": lambda: tf.distribute.get_strategy().reduce(
            "MEAN", tf.constant([1.0, 3.0]), axis=0
        ),
        "default local results": lambda: (
            tf.distribute.get_strategy().experimental_local_results(one)
        ),
        "no devices": lambda: tf.distribute.MirroredStrategy([]) and None,
        "the same device twice": lambda: (
            tf.distribute.MirroredStrategy(["CPU:0", "CPU:0"]) and None
        ),
        "an unknown device": lambda: (
            tf.distribute.MirroredStrategy(["CPU:99"]) and None
        ),
        "devices not a list": lambda: (
            encoded(tf.distribute.MirroredStrategy("CPU:0").num_replicas_in_sync)
            and None
        ),
        "exit scopes in wrong order": wrong_order,
        "exit a scope twice": exit_twice,
    }
    for name, call in cases.items():
        yield {"name": name, "result": result_of(call)}
