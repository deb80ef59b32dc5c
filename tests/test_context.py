"""Scopes and contexts: nesting, threads, exceptions, `clear_session`, and what each
kind of place answers.
"""

import threading

import keras
import numpy as np
import pytest

import keras_distribute as kd
from keras_distribute import errors
from tests.support import dense_model, mirrored


@pytest.fixture
def strategy():
    return mirrored(2)


@pytest.fixture
def other():
    return kd.MirroredStrategy(["cpu:2", "cpu:3"])


def test_at_the_top_level():
    assert not kd.has_strategy()
    assert not kd.in_cross_replica_context()
    assert kd.get_strategy().num_replicas_in_sync == 1
    assert kd.get_replica_context().replica_id_in_sync_group == 0
    assert kd.get_replica_context().num_replicas_in_sync == 1


def test_in_a_scope(strategy):
    with strategy.scope() as entered:
        assert entered is strategy
        assert kd.get_strategy() is strategy
        assert kd.has_strategy()
        assert kd.in_cross_replica_context()
        assert kd.get_replica_context() is None
    assert not kd.has_strategy()


def test_in_run_merge_call_and_update(strategy):
    seen = {}

    def look(name):
        seen[name] = (
            kd.in_cross_replica_context(),
            kd.get_replica_context() is None,
            kd.get_strategy() is strategy,
        )

    with strategy.scope():
        variable = keras.Variable(1.0)

    def merged(strategy):
        look("merge_call")
        strategy.extended.update(variable, lambda v: look("update in merge_call"))

    def fn():
        look("run")
        kd.get_replica_context().merge_call(merged)

    strategy.run(fn)
    strategy.extended.update(variable, lambda v: look("update"))
    assert seen == {
        "run": (False, False, True),
        "merge_call": (True, True, True),
        "update in merge_call": (True, True, True),
        "update": (True, True, True),
    }
    assert not kd.has_strategy()


def test_scopes_nest_with_themselves(strategy):
    with strategy.scope(), strategy.scope():
        assert kd.get_strategy() is strategy
    scope = strategy.scope()
    with scope:
        with scope:
            pass
        assert kd.has_strategy()
    with scope:
        assert kd.has_strategy()
    assert not kd.has_strategy()


def test_another_strategys_scope_is_refused(strategy, other):
    with strategy.scope():
        with pytest.raises(
            errors.ContextError,
            match="Two strategies cannot be mixed.*\n.*cpu:2.*inside.*cpu:0",
        ):
            other.scope().__enter__()
        assert kd.get_strategy() is strategy
    with (
        strategy.scope(),
        pytest.raises(RuntimeError, match="strategy.run was called inside"),
    ):
        other.run(lambda: None)


def test_scopes_left_in_another_order(strategy):
    first, second = strategy.scope(), strategy.scope()
    first.__enter__()
    second.__enter__()
    with pytest.raises(errors.ContextError, match="left in another order"):
        first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert not kd.has_strategy()


def test_exceptions_leave_no_trace(strategy):
    with pytest.raises(KeyError), strategy.scope():
        raise KeyError

    def fn():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        strategy.run(fn)
    with pytest.raises(ZeroDivisionError):
        strategy.run(lambda: kd.get_replica_context().merge_call(lambda s: fn()))
    assert not kd.has_strategy()
    assert not kd.in_cross_replica_context()


def test_threads_have_their_own_scopes(strategy, other):
    results, started, checked = {}, threading.Barrier(2), threading.Barrier(2)

    def work(name, own):
        with own.scope():
            started.wait(timeout=30)
            results[name] = kd.get_strategy() is own
            checked.wait(timeout=30)

    with strategy.scope():
        threads = [
            threading.Thread(target=work, args=(i, s))
            for i, s in enumerate((strategy, other))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        new = []
        thread = threading.Thread(target=lambda: new.append(kd.has_strategy()))
        thread.start()
        thread.join()
    assert results == {0: True, 1: True}
    assert new == [False]


def test_threads_share_a_scope(strategy):
    scope, entered, left = strategy.scope(), threading.Event(), threading.Event()
    seen = []

    def work():
        with scope:
            entered.set()
            left.wait(timeout=30)
            seen.append(kd.get_strategy())
        seen.append(kd.has_strategy())

    thread = threading.Thread(target=work)
    thread.start()
    entered.wait(timeout=30)
    with scope:
        assert kd.get_strategy() is strategy
    assert not kd.has_strategy()
    left.set()
    thread.join()
    assert seen == [strategy, False]


def test_clear_session_keeps_the_scope(strategy):
    with strategy.scope():
        keras.utils.clear_session()
        assert kd.get_strategy() is strategy
        assert isinstance(keras.Variable(1.0), kd.MirroredVariable)


def test_experimental_set_strategy(strategy, other):
    try:
        kd.experimental_set_strategy(strategy)
        assert kd.get_strategy() is strategy
        assert kd.in_cross_replica_context()
        assert isinstance(keras.Variable(1.0), kd.MirroredVariable)
        seen = []
        thread = threading.Thread(
            target=lambda: seen.append(kd.get_strategy() is strategy)
        )
        thread.start()
        thread.join()
        assert seen == [True]
        with (
            strategy.scope(),
            pytest.raises(
                errors.ContextError, match="cannot be changed inside a scope"
            ),
        ):
            kd.experimental_set_strategy(other)
    finally:
        kd.experimental_set_strategy(None)
    assert not kd.has_strategy()
    with pytest.raises(errors.StructureTypeError, match="takes a strategy"):
        kd.experimental_set_strategy("mirrored")


def test_calls_in_the_wrong_context(strategy):
    def in_run(call):
        return lambda: strategy.run(lambda: call())

    value = strategy.run(lambda: np.float32(1))
    for call, text in [
        (lambda: strategy.scope().__enter__(), "cannot be entered inside Strategy.run"),
        (
            lambda: strategy.run(lambda: 1),
            r"strategy.run was called inside a replica.*\n.*replica context of Mirrored",
        ),
        (
            lambda: strategy.reduce("SUM", value, axis=None),
            r"strategy.reduce was called inside(.|\n)*Fix: .*all_reduce",
        ),
        (
            lambda: strategy.gather(value, axis=0),
            r"strategy.gather was called inside(.|\n)*Fix: .*all_gather",
        ),
        (
            lambda: strategy.extended.reduce_to("SUM", value, None),
            "reduce_to was called inside",
        ),
        (
            lambda: kd.experimental_set_strategy(None),
            "cannot be changed inside a scope",
        ),
    ]:
        with pytest.raises(errors.ContextError, match=text):
            in_run(call)()
    context = kd.ReplicaContext(strategy)
    with pytest.raises(
        errors.ContextError,
        match=r"all_reduce was called outside Strategy.run.*\n(.|\n)*Fix: strategy.reduce",
    ):
        context.all_reduce("SUM", 1.0)
    with (
        strategy.scope(),
        pytest.raises(errors.ContextError, match="merge_call was called outside"),
    ):
        context.merge_call(lambda s: None)


def test_fit_inside_run_is_refused(strategy):
    model = dense_model(strategy, 2)
    with pytest.raises(
        errors.ContextError,
        match="fit, evaluate and predict run on all replicas by themselves",
    ):
        strategy.run(lambda: model.predict(np.ones((2, 2)), verbose=0))


def test_the_default_strategy_runs_functions_as_they_are():
    variable = keras.Variable(1.0)
    assert type(variable) is keras.Variable
    result = kd.get_strategy().run(
        lambda x: (variable.assign_add(x), kd.in_cross_replica_context()), args=(2.0,)
    )
    assert float(result[0]) == 3.0
    assert result[1] is False
    assert kd.get_strategy().experimental_local_results(5) == (5,)


def test_values_from_a_function_are_plain_in_the_default_strategy():
    """As in TensorFlow."""
    default, made = kd.get_strategy(), {"x": np.ones((3, 2))}
    value = default.experimental_distribute_values_from_function(
        lambda context: made if context == kd.experimental.ValueContext() else None
    )
    assert value is made
    assert default.run(lambda v: v["x"].T.shape, args=(value,)) == (2, 3)
    assert default.reduce("SUM", value["x"], axis=0).tolist() == [3, 3]
    with pytest.raises(errors.StructureTypeError, match="made by a function"):
        default.experimental_distribute_values_from_function(np.ones(2))


def test_get_loss_reduction():
    assert kd.get_loss_reduction() is kd.ReduceOp.SUM


def test_a_keras_distribution_around_a_strategy_is_refused(strategy):
    model = dense_model(strategy, 2)
    with keras.distribution.DataParallel(devices=["cpu:0", "cpu:1"]).scope():
        with pytest.raises(
            errors.ContextError,
            match="(?s)cannot both say where.*DataParallel.*around.*Fix: keras",
        ):
            strategy.scope()
        with pytest.raises(errors.ContextError, match="cannot both say where"):
            model.predict(np.ones((2, 2)), verbose=0)
    assert not kd.has_strategy()
    assert model.predict(np.ones((2, 2)), verbose=0).shape == (2, 1)


def test_a_keras_distribution_inside_a_scope_is_the_inner_one(strategy):
    with (
        strategy.scope(),
        keras.distribution.DataParallel(devices=["cpu:0", "cpu:1"]).scope(),
    ):
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        assert type(model.weights[0]) is keras.Variable
        model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)


def test_methods_of_a_strategy_in_the_scope_of_another(strategy, other):
    values = [s.run(lambda: np.ones(1, "float32")) for s in (strategy, other)]
    with other.scope():
        variable = keras.Variable(1.0)
    dataset = kd.ArrayDataset(np.arange(4), batch_size=2)
    pairs = [(values[1], None)]
    calls = {
        "strategy.reduce": lambda: other.reduce("SUM", values[1], axis=None),
        "strategy.gather": lambda: other.gather(values[1], axis=0),
        "reduce_to": lambda: other.extended.reduce_to("SUM", values[1], None),
        "reduce_to ": lambda: other.extended.batch_reduce_to("SUM", pairs),
        "update": lambda: other.extended.update(variable, lambda v: v.assign(2.0)),
        "experimental_distribute_values_from_function": lambda: (
            other.experimental_distribute_values_from_function(lambda context: 1.0)
        ),
        "experimental_distribute_dataset": lambda: (
            other.experimental_distribute_dataset(dataset)
        ),
        "distribute_datasets_from_function": lambda: (
            other.distribute_datasets_from_function(lambda context: dataset)
        ),
    }
    for name, call in calls.items():
        text = f"(?s)^{name.strip()} was called inside the scope of another strategy"
        text += r".*Received: a method of .*cpu:2.* in the cross-replica context of .*"
        with strategy.scope(), pytest.raises(errors.ContextError, match=text):
            call()
        with pytest.raises(errors.ContextError, match="scope of another strategy"):
            strategy.run(call)
    assert float(variable.numpy()) == 1.0
    default = kd.get_strategy()
    with strategy.scope():
        with pytest.raises(RuntimeError, match="scope of another strategy"):
            default.experimental_distribute_dataset(dataset)
        with pytest.raises(RuntimeError, match="scope of another strategy"):
            default.reduce("MEAN", 1.0, axis=None)
        assert strategy.reduce("SUM", values[0], axis=None).tolist() == [2.0]
    for call in list(calls.values())[:4]:
        with other.scope():
            call()
        call()


def test_the_strategy_of_the_process_while_a_thread_is_in_a_scope(strategy, other):
    inside, done = threading.Event(), threading.Event()

    def work():
        with strategy.scope():
            inside.set()
            done.wait(timeout=60)

    thread = threading.Thread(target=work, name="a worker")
    thread.start()
    try:
        assert inside.wait(timeout=60)
        for given in (other, strategy, None):
            with pytest.raises(
                errors.ContextError, match="thread 'a worker' in the cro"
            ):
                kd.experimental_set_strategy(given)
        assert not kd.has_strategy()
    finally:
        done.set()
        thread.join()
    try:
        kd.experimental_set_strategy(other)
        assert kd.get_strategy() is other
    finally:
        kd.experimental_set_strategy(None)

    def dies_in_a_scope():
        strategy.scope().__enter__()

    thread = threading.Thread(target=dies_in_a_scope)
    thread.start()
    thread.join()
    kd.experimental_set_strategy(None)


@pytest.mark.parametrize("given", [kd.MirroredStrategy, object(), 3, "mirrored"])
def test_only_a_strategy_can_be_the_strategy_of_the_process(given):
    with pytest.raises(
        errors.StructureTypeError, match="(?s)takes a strategy.*Fix: kd"
    ):
        kd.experimental_set_strategy(given)
