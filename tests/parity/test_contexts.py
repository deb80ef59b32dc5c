"""Which context each place is in, and what calls in the wrong one do, against
TensorFlow.
"""

import jax.numpy as jnp
import keras
import pytest

import keras_distribute as kd

from .comparing import (
    as_run_returns,
    check,
    check_error,
    encoded,
    entries,
    mirrored,
    numbers,
    record,
)
from .differences import because
from .encoding import is_error


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_places(replicas):
    strategy = mirrored(replicas)
    noted = {}

    def note(place):
        context = kd.get_replica_context()
        noted[place] = {
            "in_cross_replica_context": kd.in_cross_replica_context(),
            "has_strategy": kd.has_strategy(),
            "replica_context_is_none": context is None,
            "own_strategy": kd.get_strategy() is strategy,
            "num_replicas_in_sync": kd.get_strategy().num_replicas_in_sync,
            "context_num_replicas": context and context.num_replicas_in_sync,
        }

    def step():
        note("run")
        kd.get_replica_context().merge_call(lambda strategy: note("merge_call"))
        note("run after merge_call")

    note("top level")
    with strategy.scope():
        variable = keras.Variable(1.0)
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
    kd.experimental_set_strategy(strategy)
    try:
        note("set strategy")
    finally:
        kd.experimental_set_strategy(None)
    note("strategy unset")
    places = [entry for entry in record()["places"] if entry["replicas"] == replicas]
    assert noted == {
        e["place"]: {key: e[key] for key in e if key not in ("replicas", "place")}
        for e in places
    }


# What TensorFlow lets pass and we refuse, with the builtin class of our error.
REFUSED = {
    "run with a bad options": "TypeError",
    "no devices": "ValueError",
    "an unknown device": "ValueError",
    "exit scopes in wrong order": "RuntimeError",
    "run in update": "RuntimeError",
    "scope in update": "RuntimeError",
}


@entries("misuse", "name")
def test_misuse(entry):
    strategy, name, expected = (
        mirrored(entry["replicas"]),
        entry["name"],
        entry["result"],
    )
    call = calls(strategy)[name]
    if name == "devices not a list":
        assert because("one device name")
        assert call() == 1
    elif name in REFUSED and not is_error(expected):
        assert because("refused early")
        check_error(call, {"error": REFUSED[name]})
    elif name == "error in run":  # the user's own error, as it is
        check_error(call, expected, fix=False)
    elif is_error(expected):
        check_error(call, expected)
    elif name.endswith("in update"):
        assert because("updates are one program")
        assert all(
            float(number) == 1.0 for number in numbers(encoded(strategy, call()))
        )
    elif name.startswith("default") or name == "scope in own scope":
        check(strategy, call, expected)
    else:
        check(strategy, call, as_run_returns(expected, entry["replicas"]))
    assert not kd.has_strategy(), "a scope was left open"


def calls(strategy):
    """The same calls as in the record."""
    other = kd.MirroredStrategy(["cpu:5"])
    with strategy.scope():
        variable = keras.Variable(1.0, aggregation="sum")
    one = jnp.asarray(1.0)
    default = kd.get_strategy()
    kept = []
    strategy.run(lambda: kept.append(kd.get_replica_context()))

    def scoped(outer, fn):
        with outer.scope():
            return fn()

    def in_run(fn):
        return lambda: strategy.run(fn)

    def in_merge_call(fn):
        return lambda: strategy.run(
            lambda: kd.get_replica_context().merge_call(lambda strategy: fn())
        )

    def in_update(fn):
        return lambda: strategy.extended.update(variable, lambda v: fn(), group=False)

    def wrong_order():
        outer, inner = strategy.scope(), strategy.scope()
        outer.__enter__()
        inner.__enter__()
        try:
            outer.__exit__(None, None, None)
        finally:
            inner.__exit__(None, None, None)

    def exit_twice():
        scope = strategy.scope()
        scope.__enter__()
        scope.__exit__(None, None, None)
        scope.__exit__(None, None, None)

    vector = jnp.asarray([1.0])
    return {
        "scope in scope of another": lambda: scoped(strategy, lambda: scoped(other, lambda: one)),
        "scope in own scope": lambda: scoped(strategy, lambda: scoped(strategy, lambda: one)),
        "run in scope of another": lambda: scoped(other, lambda: strategy.run(lambda: one)),
        "run in run": in_run(lambda: strategy.run(lambda: one)),
        "run of another in run": in_run(lambda: other.run(lambda: one)),
        "run in merge_call": in_merge_call(lambda: strategy.run(lambda: one)),
        "run in update": in_update(lambda: strategy.run(lambda: one)),
        "scope in run": in_run(lambda: scoped(strategy, lambda: one)),
        "scope of another in run": in_run(lambda: scoped(other, lambda: one)),
        "scope in merge_call": in_merge_call(lambda: scoped(strategy, lambda: one)),
        "scope in update": in_update(lambda: scoped(strategy, lambda: one)),
        "reduce in run": in_run(lambda: strategy.reduce("SUM", one, axis=None)),
        "gather in run": in_run(lambda: strategy.gather(vector, axis=0)),
        "local results in run": in_run(lambda: strategy.experimental_local_results(one)[0]),
        "update in run": in_run(lambda: strategy.extended.update(variable, lambda v: one)),
        "update in update": in_update(lambda: strategy.extended.update(variable, lambda v: one, group=False)),
        "update in merge_call": in_merge_call(lambda: strategy.extended.update(variable, lambda v: one, group=False)),
        "reduce in update": in_update(lambda: strategy.reduce("SUM", one, axis=None)),
        "reduce in merge_call": in_merge_call(lambda: strategy.reduce("SUM", one, axis=None)),
        "merge_call in merge_call": in_merge_call(lambda: kept[0].merge_call(lambda strategy: one)),
        "merge_call of None": in_run(lambda: kd.get_replica_context().merge_call(None)),
        "all_reduce of a kept context": lambda: kept[0].all_reduce("SUM", one),
        "merge_call of a kept context": lambda: kept[0].merge_call(lambda strategy: one),
        "all_gather of a kept context": lambda: kept[0].all_gather(vector, axis=0),
        "set strategy in scope": lambda: scoped(strategy, lambda: kd.experimental_set_strategy(strategy)),
        "set strategy in run": in_run(lambda: kd.experimental_set_strategy(strategy)),
        "variable of strategy in run of another": lambda: other.run(lambda: variable.assign_add(1.0)),
        "variable created in scope of another, assigned": lambda: scoped(other, lambda: variable.assign_add(1.0)),
        "run without a function": lambda: strategy.run(None),
        "run with a bad options": lambda: strategy.run(lambda: one, options="fast"),
        "error in run": in_run(lambda: {}["missing"]),
        "default all_reduce": lambda: kd.get_replica_context().all_reduce("SUM", one),
        "default merge_call": lambda: kd.get_replica_context().merge_call(lambda strategy, x: x, args=(one,)),
        "default run": lambda: default.run(lambda x: x + 1, args=(one,)),
        "default reduce": lambda: default.reduce("MEAN", jnp.asarray([1.0, 3.0]), axis=0),
        "default local results": lambda: default.experimental_local_results(one),
        "no devices": lambda: kd.MirroredStrategy([]),
        "the same device twice": lambda: kd.MirroredStrategy(["cpu:0", "cpu:0"]),
        "an unknown device": lambda: kd.MirroredStrategy(["cpu:99"]),
        "devices not a list": lambda: kd.MirroredStrategy("cpu:0").num_replicas_in_sync,
        "exit scopes in wrong order": wrong_order,
        "exit a scope twice": exit_twice,
    }  # fmt: skip
