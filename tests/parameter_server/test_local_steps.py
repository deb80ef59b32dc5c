"""Rounds of local steps: with one worker and an outer optimizer that takes what it is
given the numbers of one device, with several those of DiLoCo written out by hand.
"""

import contextlib
import gc
import signal
import threading
import time
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

import keras_distribute as kd
from keras_distribute.coordinator import ClusterCoordinator
from tests.exactness.harness import (
    assert_close,
    assert_same_outcome,
    fit_evaluate_predict,
    observe,
    table,
)
from tests.parameter_server.test_fit import (
    CountingStep,
    counting_each_row,
    network,
)

X, Y = table(54)
OPTIMIZERS = {
    "momentum": lambda: keras.optimizers.SGD(0.02, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(
        keras.optimizers.schedules.ExponentialDecay(0.02, 3, 0.5), epsilon=1e-2
    ),
}


def linear(optimizer: Any) -> keras.Model:
    """What compiles quickly."""
    model = keras.Sequential([keras.Input((6,)), layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss)
    return model


@pytest.mark.sampled(4)
@pytest.mark.parametrize("steps_per_execution", [1, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_worker_trains_as_one_device(make, name, steps_per_execution):
    """With rounds of four, four, four and two steps, the last on two rows."""
    strategy = make(1, local_steps=4, outer_optimizer=keras.optimizers.SGD(1.0))

    def build() -> keras.Model:
        return network(OPTIMIZERS[name](), steps_per_execution=steps_per_execution)

    run = fit_evaluate_predict(
        X, Y, batch_size=4, validation_data=(X[:9], Y[:9]), sample_weight=X[:, 0] ** 2
    )
    assert_same_outcome(observe(build, run, strategy), observe(build, run))
    steps = strategy.steps_of_workers["worker:0"]
    assert steps > 14


def diloco(model: keras.Model, groups: int, steps: int, epochs: int) -> list[Any]:
    """DiLoCo by one plain model, group after group; returns the metrics of epochs."""
    optimizer, trained = model.optimizer, model.trainable_variables
    optimizer.build(trained)
    rest = [v for v in model.non_trainable_variables if "moving" in v.path]
    own = [v for v in optimizer.variables if len(v.shape)]
    slots = [values(own) for _ in range(groups)]
    velocity = [np.zeros(v.shape) for v in trained]
    history: list[Any] = []
    for _ in range(epochs):
        sums = {"loss": 0.0, "accuracy": 0.0}
        batches = [(X[i : i + 4], Y[i : i + 4]) for i in range(0, len(X), 4)]
        while batches:
            now, batches = batches[: groups * steps], batches[groups * steps :]
            blocks = [now[i : i + steps] for i in range(0, len(now), steps)]
            start = values(trained)
            start_of_rest = values(rest)
            count = int(optimizer.iterations.numpy())
            gradients = [np.zeros(v.shape) for v in trained]
            changes = [np.zeros(v.shape) for v in rest]
            for group, block in enumerate(blocks):
                put(trained, start)
                put(rest, start_of_rest)
                put(own, slots[group])
                optimizer.iterations.assign(count)
                for x, y in block:
                    logs = model.train_on_batch(x, y, return_dict=True)
                    sums = {key: sums[key] + len(x) * logs[key] for key in sums}
                slots[group] = values(own)
                share = len(block) / len(now)
                for total, old, v in zip(gradients, start, trained, strict=True):
                    total += share * (old - v.numpy())
                for total, old, v in zip(changes, start_of_rest, rest, strict=True):
                    total += share * (v.numpy() - old)
            for i, gradient in enumerate(gradients):
                velocity[i] = 0.9 * velocity[i] - 0.7 * gradient
                start[i] = start[i] + 0.9 * velocity[i] - 0.7 * gradient
            put(trained, start)
            put(rest, map(np.add, start_of_rest, changes))
            optimizer.iterations.assign(count + len(blocks[0]))
        history.append({key: float(total) / len(X) for key, total in sums.items()})
    put(own, np.mean(np.array(slots, dtype=object), axis=0))
    return history


def values(variables: Any) -> list[Any]:
    """Copies: a plain model's next step takes the memory."""
    return [np.array(variable.numpy()) for variable in variables]


def put(variables: Any, values: Any) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(np.asarray(value, "float32"))


def assert_diloco(strategy: Any, name: str, steps: int) -> None:
    """Asserts that `fit` gives what DiLoCo does."""
    groups = len(strategy.cluster.workers)
    keras.utils.set_random_seed(5)
    plain = network(OPTIMIZERS[name]())
    keras.utils.set_random_seed(5)
    with strategy.scope():
        model = network(OPTIMIZERS[name]())
    history = model.fit(X, Y, batch_size=4, epochs=3, shuffle=False, verbose=0).history
    expected = diloco(plain, groups, steps, epochs=3)
    for ours, theirs in zip(
        [*model.weights, *model.optimizer.variables],
        [*plain.weights, *plain.optimizer.variables],
        strict=True,
    ):
        assert_close(ours.numpy(), theirs.numpy(), theirs.path, rtol=2e-5, floor=5e-6)
    for key, found in history.items():
        own = [each[key] for each in expected]
        np.testing.assert_allclose(found, own, rtol=2e-5, err_msg=key)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("local_slots", [False, True])
@pytest.mark.parametrize("steps", [2, 5])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_two_groups_train_as_in_diloco(make, name, steps, local_slots):
    """Rounds of two groups; in the last one of an epoch one has fewer steps."""
    strategy = make(local_steps=steps, local_slots=local_slots)
    assert_diloco(strategy, name, steps)


@pytest.mark.parametrize("local_slots", [False, True])
def test_a_second_fit_goes_on(make, local_slots):
    """What an epoch of another `fit` begins with is what the last one has left; also
    where the model was compiled again, which changes no optimizer.
    """
    whole = make(local_steps=3)
    keras.utils.set_random_seed(5)
    with whole.scope():
        model = network(OPTIMIZERS["adam"]())
    model.fit(X, Y, batch_size=4, epochs=2, shuffle=False, verbose=0)
    weights = model.get_weights()
    whole.close()
    parts = make(local_steps=3, local_slots=local_slots)
    keras.utils.set_random_seed(5)
    with parts.scope():
        model = network(OPTIMIZERS["adam"]())
    for _ in range(2):
        model.fit(X, Y, batch_size=4, shuffle=False, verbose=0)
        with parts.scope():
            model.compile(model.optimizer, model.loss, metrics=["accuracy"])
    for ours, theirs in zip(model.get_weights(), weights, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_metrics_count_each_row_once(make):
    strategy = make(local_steps=3)
    counting_each_row(strategy)
    assert sum(strategy.steps_of_workers.values()) == 3 * 15


@pytest.mark.parametrize("local_slots", [False, True])
def test_callbacks_set_the_learning_rate_and_assign_slots(make, local_slots):
    strategy = make(local_steps=2, local_slots=local_slots)
    with strategy.scope():
        model = network(keras.optimizers.SGD(0.1, momentum=0.9))

    def at_the_end(epoch: int, logs: Any) -> None:
        model.optimizer.learning_rate = 0.0
        for variable in model.optimizer.variables:
            if len(variable.shape):
                variable.assign(np.zeros(variable.shape))

    stop = keras.callbacks.LambdaCallback(on_epoch_end=at_the_end)
    model.fit(X, Y, batch_size=4, verbose=0, callbacks=[stop])
    slots = [v for v in model.optimizer.variables if len(v.shape)]
    assert not any(np.any(v.numpy()) for v in slots)
    model.fit(X[:16], Y[:16], batch_size=4, verbose=0)
    assert not any(np.any(v.numpy()) for v in slots)
    model.optimizer.learning_rate = 0.1
    model.fit(X, Y, batch_size=4, verbose=0)
    kept = [strategy.cluster.slots.values_of(v) for v in slots]
    slots[0].assign(np.ones(slots[0].shape))  # The others are what they were.
    model.optimizer.learning_rate = 0.0
    model.fit(X[:4], Y[:4], batch_size=4, verbose=0)
    for variable, (first, other) in zip(slots[1:], kept[1:], strict=True):
        mean = (0.9 * first + other) / 2  # The first group had the batch.
        np.testing.assert_allclose(variable.numpy(), mean, rtol=1e-5, atol=1e-7)


def test_the_learning_rate_of_a_batch_is_not_lost(make):
    """A round has that of its last batch, and leaves what is assigned meanwhile."""
    rates = [0.1, 0.02, 0.05]

    def begun(scope: Any) -> keras.Model:
        keras.utils.set_random_seed(5)
        with scope:
            return linear(keras.optimizers.SGD(0.1))

    outer = keras.optimizers.SGD(1.0)
    ours = begun(make(1, local_steps=3, outer_optimizer=outer).scope())

    def begin(batch: int, logs: Any) -> None:
        ours.optimizer.learning_rate = rates[batch // 3]

    each = keras.callbacks.LambdaCallback(on_train_batch_begin=begin)
    options = {"batch_size": 4, "shuffle": False, "verbose": 0}
    ours.fit(X[:36], Y[:36], callbacks=[each], **options)
    assert float(ours.optimizer.learning_rate) == np.float32(rates[-1])
    theirs = begun(contextlib.nullcontext())
    for i, rate in enumerate(rates):
        theirs.optimizer.learning_rate = rate
        rows = slice(12 * i, 12 * i + 12)
        theirs.fit(X[rows], Y[rows], **options)
    for one, other in zip(ours.weights, theirs.weights, strict=True):
        np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=1e-5, atol=1e-6)


def test_logs_of_a_step_of_the_users_own(make):
    strategy = make(local_steps=3)
    with strategy.scope():
        model = CountingStep()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.0), loss, metrics=["accuracy"])
    expected = model.evaluate(X, Y, verbose=0, return_dict=True)
    for batch_size in (8, 3):  # In one round, by one group; in two.
        run = model.fit(X, Y, batch_size=batch_size, epochs=2, verbose=0)
        assert batch_size == 3 or run.history["rows"] == [6.0, 6.0]
        assert run.history["seen"] == [54.0, 54.0]
        assert run.history.keys() == {"accuracy", "loss", "rows", "seen"}
        for name in ("loss", "accuracy"):
            metric = run.history[name]
            np.testing.assert_allclose(metric, [expected[name]] * 2, rtol=1e-5)


class MixingStep(CountingStep):
    """One that returns what depends on a metric and on its batch."""

    def train_step(self, state: Any, data: Any) -> Any:
        logs, state = super().train_step(state, data)
        return {**logs, "seen": logs["seen"] + data[0].sum()}, state


def test_logs_of_which_no_group_knows_all_are_refused(make):
    with make(local_steps=3).scope():
        model = MixingStep()
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy())
    with pytest.raises(kd.errors.StructureTypeError, match=r"log 'seen'(.|\n)*Fix"):
        model.fit(X, Y, verbose=0)


def test_logs_of_a_batch_are_those_of_whole_rounds(make):
    """Each round is of four steps, and ends when the next one has its batches; also
    where a callback looks at the model, which ends a round."""
    strategy = make(local_steps=2)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((4,)), layers.Dense(1, kernel_initializer="zeros")]
        )
        model.compile(keras.optimizers.SGD(0.0), "mse")
    seen: list[Any] = []
    reads = [False]

    def end(batch: int, logs: Any) -> None:
        seen.append(logs)
        if reads[0] and batch == 0:
            model.get_metrics_result()
            model.jax_state_sync()

    notes = keras.callbacks.LambdaCallback(on_train_batch_end=end)
    x = np.ones((48, 4))
    run = model.fit(x, x[:, 0], batch_size=4, epochs=2, verbose=0, callbacks=[notes])
    assert seen == 2 * ([{}] * 7 + [{"loss": 1.0}] * 5)
    assert run.history["loss"] == [1.0, 1.0]
    seen.clear()
    reads[0] = True
    model.fit(x, x[:, 0], batch_size=4, verbose=0, callbacks=[notes])
    assert seen == [{}] + [{"loss": 1.0}] * 11


def test_metrics_know_nothing_of_a_round_that_is_under_way(make):
    """Also where all of its groups have ended; the loss of batch n is n."""
    strategy = make(local_steps=2)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((1,)), layers.Dense(1, kernel_initializer="zeros")]
        )
        model.compile(keras.optimizers.SGD(0.0), "mse")
    seen: list[Any] = []

    def end(batch: int, logs: Any) -> None:
        queue = strategy.cluster.queue
        look = strategy.cluster.look
        assert queue.wait(lambda: not queue.num_pending, look=look)
        seen.append(logs.get("loss"))

    notes = keras.callbacks.LambdaCallback(on_train_batch_end=end)
    numbers = np.arange(12.0).repeat(2)[:, None]
    model.fit(numbers, numbers**0.5, 2, shuffle=False, verbose=0, callbacks=[notes])
    assert seen[:7] == [None] * 7
    np.testing.assert_allclose(seen[7:], [1.5] * 4 + [3.5], rtol=1e-6)


def test_embeddings_and_batches_one_by_one(make):
    """A table travels whole; `train_on_batch` is a round of one step."""
    strategy = make(local_steps=3)
    with strategy.scope():
        model = keras.Sequential([layers.Embedding(50, 4), layers.Dense(1)])
        model.compile("sgd", "mse")
    ids = np.random.default_rng(0).integers(0, 50, (40, 3))
    model.fit(ids, np.ones((40, 3, 1)), batch_size=4, verbose=0)
    before = model.layers[0].embeddings.numpy()
    model.train_on_batch(ids[:4], np.ones((4, 3, 1)))
    assert np.any(model.layers[0].embeddings.numpy() != before)
    assert sum(strategy.steps_of_workers.values()) == 11


def test_divided_weights_and_replay(make):
    """The updates of the outer optimizer are logged, and computed again to the bit."""

    def partitioner(shape: Any, dtype: Any) -> list[int]:
        return [min(2, shape[0]), *[1] * (len(shape) - 1)]

    found: list[Any] = []
    for options in {"variable_partitioner": partitioner}, {}:
        strategy = make(local_steps=3, **options)
        keras.utils.set_random_seed(5)
        with strategy.scope():
            model = network(OPTIMIZERS["momentum"]())
        with kd.testing.RecordedUpdates(strategy) as updates:
            model.fit(X, Y, batch_size=4, epochs=2, shuffle=False, verbose=0)
        again = updates.replayed()
        for weight in model.trainable_variables:
            np.testing.assert_array_equal(again[weight.path], weight.numpy())
        found.append(model.get_weights())
        assert "2 group(s) of 3 steps" in str(strategy.summary(model))
        strategy.close()
    for divided, whole in zip(*found, strict=True):
        np.testing.assert_allclose(divided, whole, rtol=1e-5, atol=1e-6)


def test_functions_are_scheduled_as_ever(make):
    strategy = make(local_steps=4)
    with strategy.scope():
        v = keras.Variable(0.0)
    coordinator = ClusterCoordinator(strategy)
    for _ in range(10):
        coordinator.schedule(lambda: v.assign_add(1.0))
    coordinator.join()
    assert float(v.numpy()) == 10.0


UNDISTURBED: list[Any] = []
"""What two workers of which none goes end with, when it has been computed."""


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ["SIGKILL", "SIGSTOP"])
def test_a_worker_that_goes_changes_no_number(own_cluster, make, name):
    """What it had is run by the other one, with the slots of its group."""

    def weights(strategy: Any, during: Any) -> list[Any]:
        keras.utils.set_random_seed(5)
        with strategy.scope():
            model = network(OPTIMIZERS["adam"]())
        model.fit(X, Y, batch_size=4, epochs=2, shuffle=False, verbose=0)
        thread = threading.Thread(target=during)
        thread.start()
        model.fit(X, Y, batch_size=4, epochs=40, shuffle=False, verbose=0)
        thread.join()
        found = values([*model.weights, *model.optimizer.variables])
        strategy.close()
        return found

    def kill() -> None:
        time.sleep(0.1)
        own_cluster.kill("worker", 0, getattr(signal, name))

    if not UNDISTURBED:
        UNDISTURBED.extend(weights(make(local_steps=3), lambda: None))
    strategy = make(local_steps=3)
    for ours, theirs in zip(weights(strategy, kill), UNDISTURBED, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    done = strategy.steps_of_workers
    assert sum(done.values()) == 42 * 14
    assert done["worker:0"] < done["worker:1"]


def slots_of(model: keras.Model) -> list[Any]:
    return [v for v in model.optimizer.variables if len(v.shape)]


def test_local_slots_stay_until_they_are_read(make):
    """Between rounds nothing of them comes; whoever reads them gets the newest, and so
    does who closes the strategy.
    """
    found: list[Any] = []
    for local_slots in (False, True):
        strategy = make(local_steps=2, local_slots=local_slots)
        keras.utils.set_random_seed(5)
        with strategy.scope():
            model = network(OPTIMIZERS["adam"]())
        asked: list[Any] = []
        ask = strategy.cluster._slots_on_worker
        strategy.cluster.slots._ask = lambda *key, a=asked, b=ask: (
            a.append(key) or b(*key)
        )
        model.fit(X, Y, batch_size=4, epochs=2, shuffle=False, verbose=0)
        assert not asked
        found.append(values(slots_of(model)))
        assert len(asked) == 2 * local_slots
        values(slots_of(model))
        assert len(asked) == 2 * local_slots
        model.fit(X, Y, batch_size=4, shuffle=False, verbose=0)
        strategy.close()
        found[-1] += values(slots_of(model))
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_slots_that_are_read_in_a_round_are_those_before_it(make):
    """As the weights are, whether or not the slots stay on workers."""
    found: list[Any] = []
    for local_slots in (False, True):
        strategy = make(local_steps=2, local_slots=local_slots)
        keras.utils.set_random_seed(5)
        with strategy.scope():
            model = linear(OPTIMIZERS["momentum"]())
        seen: list[Any] = []

        def look(batch: int, logs: Any, model: Any = model, seen: Any = seen) -> None:
            seen.append(values([*model.optimizer.variables, *model.weights]))

        each = keras.callbacks.LambdaCallback(on_train_batch_end=look)
        options = {"batch_size": 4, "shuffle": False, "verbose": 0}
        model.fit(X, Y, callbacks=[each], **options)
        found.append(seen)
    for ours, theirs in zip(*found, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(one, other)


def test_a_round_that_is_broken_off_leaves_the_slots(make):
    """The next one begins with the weights and the slots of the last that ended."""
    found: list[Any] = []
    for breaks in (False, True):
        strategy = make(local_steps=2, local_slots=True)
        keras.utils.set_random_seed(5)
        with strategy.scope():
            model = linear(OPTIMIZERS["momentum"]())
        options = {"batch_size": 4, "shuffle": False, "verbose": 0}
        model.fit(X, Y, **options)
        if breaks:

            def end(batch: int, logs: Any, strategy: Any = strategy) -> None:
                if batch == 3:
                    strategy.cluster.join()
                    (steps,) = strategy.unfinished.values()
                    steps.drop()
                    raise RuntimeError("broken off")

            ends = keras.callbacks.LambdaCallback(on_train_batch_end=end)
            with pytest.raises(RuntimeError, match="broken off"):
                model.fit(X[32:], Y[32:], callbacks=[ends], **options)
        found.append(values(slots_of(model)))
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ["SIGKILL", "SIGSTOP"])
@pytest.mark.parametrize("is_read", [False, True])
def test_a_worker_that_goes_takes_local_slots_along(
    own_cluster, make, caplog, name, is_read
):
    """Its groups go on with those that were read last: at first, none."""

    def begun() -> tuple[Any, keras.Model, Any]:
        strategy = make(local_steps=3, local_slots=True)
        for worker in strategy.cluster.workers:
            assert strategy.cluster.queue.wait(
                lambda worker=worker: worker.is_ready, 60.0, look=strategy.cluster.look
            )
        keras.utils.set_random_seed(5)
        with strategy.scope():
            model = network(OPTIMIZERS["adam"]())
        model.fit(X, Y, batch_size=4, shuffle=False, verbose=0)
        return strategy, model, strategy.cluster.slots_of(slots_of(model))

    def numbers(strategy: Any, model: keras.Model) -> list[Any]:
        model.fit(X, Y, batch_size=4, shuffle=False, verbose=0)
        assert sum(strategy.steps_of_workers.values()) == 2 * 14
        found = values([*model.weights, *slots_of(model)])
        strategy.close()
        return found

    strategy, model, held = begun()
    gone = [group for group in (0, 1) if held.holder_of(group) == 0]
    assert gone
    if is_read:
        values(slots_of(model))
    own_cluster.kill("worker", 0, getattr(signal, name))
    ours = numbers(strategy, model)
    warned = "worker:0 took the optimizer's slots of group" in caplog.text
    assert warned is not is_read

    own_cluster.kill("worker", 0, signal.SIGCONT)
    if name == "SIGKILL":
        own_cluster.start("worker", 0)
    strategy, expected, _ = begun()
    for variable in [] if is_read else slots_of(expected):
        for group in gone:
            zeros = np.zeros(variable.shape, "float32")
            strategy.cluster.slots.set(variable, group, zeros)
    for one, other in zip(ours, numbers(strategy, expected), strict=True):
        np.testing.assert_array_equal(one, other)


def test_slots_of_a_worker_that_is_frozen(own_cluster, make, caplog):
    """Whoever reads them waits for seconds, and gets those that came last."""
    strategy = make(1, local_steps=3, local_slots=True)
    with strategy.scope():
        model = network(OPTIMIZERS["adam"]())
    model.fit(X, Y, batch_size=4, verbose=0)
    own_cluster.kill("worker", 0, signal.SIGSTOP)
    start = time.monotonic()
    assert not any(map(np.any, values(slots_of(model))))
    assert time.monotonic() - start < 30
    assert "took the optimizer's slots of group 0 along" in caplog.text


def test_a_worker_that_comes_late_gets_a_group(own_cluster, make):
    """From one that has several; its slots travel once, and are dropped there."""
    own_cluster.kill("worker", 0)
    strategy = make(local_steps=2, local_slots=True)
    keras.utils.set_random_seed(5)
    with strategy.scope():
        model = network(OPTIMIZERS["adam"]())
    model.fit(X, Y, batch_size=4, shuffle=False, verbose=0)
    held = strategy.cluster.slots_of(slots_of(model))
    assert [held.holder_of(group) for group in (0, 1)] == [1, 1]
    before = [held.round_of(group, 1) for group in (0, 1)]
    own_cluster.start("worker", 0)
    first = strategy.cluster.workers[0]
    assert strategy.cluster.queue.wait(
        lambda: first.is_ready, 60.0, look=strategy.cluster.look
    )
    model.fit(X, Y, batch_size=4, shuffle=False, verbose=0)
    assert {held.holder_of(group) for group in (0, 1)} == {0, 1}
    moved = 0 if held.holder_of(0) == 0 else 1
    with pytest.raises(kd.errors.UnavailableError, match=f"no slots of group {moved}"):
        strategy.cluster._slots_on_worker(1, held.number, moved, before[moved])
    ours = values([*model.weights, *slots_of(model)])
    strategy.close()
    strategy = make(local_steps=2)
    keras.utils.set_random_seed(5)
    with strategy.scope():
        model = network(OPTIMIZERS["adam"]())
    model.fit(X, Y, batch_size=4, epochs=2, shuffle=False, verbose=0)
    theirs = values([*model.weights, *slots_of(model)])
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(one, other)


def test_workers_drop_the_slots_of_an_optimizer_that_is_gone(make):
    strategy = make(1, local_steps=2, local_slots=True)
    with strategy.scope():
        model = network(OPTIMIZERS["adam"]())
    model.fit(X, Y, batch_size=4, verbose=0)
    held = strategy.cluster.slots_of(slots_of(model))
    number, last = held.number, held.round_of(0, 0)
    assert strategy.cluster._slots_on_worker(0, number, 0, last)
    with strategy.scope():
        model.compile(OPTIMIZERS["adam"](), model.loss)
    model.fit(X, Y, batch_size=4, verbose=0)
    del held
    gc.collect()
    model.fit(X, Y, batch_size=4, verbose=0)
    with pytest.raises(kd.errors.UnavailableError, match="no slots of group 0"):
        strategy.cluster._slots_on_worker(0, number, 0, last)


def classifier(optimizer: Any) -> keras.Model:
    model = keras.Sequential(
        [
            keras.Input((64,)),
            layers.Dense(128, activation="relu"),
            layers.Dense(10),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
    return model


@pytest.fixture(scope="module")
def four_workers():
    with kd.testing.ParameterServerCluster(num_workers=4, num_ps=2) as cluster:
        yield cluster.cluster_resolver


def test_four_groups_train_as_in_diloco(four_workers):
    """In the last round of an epoch one group has no batch, and another fewer."""
    strategy = kd.ParameterServerStrategy(four_workers, local_steps=4)
    assert_diloco(strategy, "adam", 4)
    strategy.close()


def test_digits_with_a_fraction_of_the_bytes(four_workers):
    """As good as synchronous steps on the same samples, four batches a step; and all
    that travels but the batches, which are the same, is a fifteenth of what single
    steps on these take.
    """
    datasets = pytest.importorskip("sklearn.datasets")
    x, y = datasets.load_digits(return_X_y=True)
    order = np.random.default_rng(7).permutation(len(x))
    x, y = (x[order] / 16).astype("float32"), y[order]
    train, test = (x[:1280], y[:1280]), (x[1280:], y[1280:])
    keras.utils.set_random_seed(5)
    plain = classifier(keras.optimizers.Adam(1e-3))
    plain.fit(*train, batch_size=64, epochs=12, verbose=0)
    expected = plain.evaluate(*test, verbose=0)[1]
    bytes_of_steps: list[float] = []
    local = {"local_steps": 20, "local_slots": True}
    for options, epochs in ({}, 1), (local, 12):
        strategy = kd.ParameterServerStrategy(four_workers, **options)
        keras.utils.set_random_seed(5)
        with strategy.scope():
            model = classifier(keras.optimizers.Adam(1e-3))
        before = strategy.bytes_of_servers + strategy.bytes_of_workers
        model.fit(*train, batch_size=16, epochs=epochs, verbose=0)
        used = strategy.bytes_of_servers + strategy.bytes_of_workers - before
        batches = (train[0].nbytes + train[1].astype("int32").nbytes) * epochs
        bytes_of_steps.append((used - batches) / (80 * epochs))
        accuracy = model.evaluate(*test, verbose=0)[1]
        strategy.close()
    assert accuracy > 0.9
    assert accuracy > expected - 0.01
    single, local = bytes_of_steps
    assert local < single / 15


@pytest.mark.parametrize("kind", ["callback", "thread"])
def test_another_model_ends_no_round_of_this_one(make, kind):
    strategy = make(local_steps=3)

    found: list[Any] = []
    options = {"batch_size": 4, "shuffle": False, "verbose": 0}
    for others in (False, True):
        keras.utils.set_random_seed(5)
        with strategy.scope():
            model, other = (linear(keras.optimizers.SGD(0.1)) for _ in range(2))

        def train(other: Any = other) -> None:
            other.fit(X[:16], Y[:16], **options)

        def end(batch: int, logs: Any, train: Any = train) -> None:
            if batch == 1:
                thread = threading.Thread(target=train)
                thread.start()
                thread.join()

        def nested(batch: int, logs: Any, train: Any = train) -> None:
            if batch == 1:
                train()

        act = end if kind == "thread" else nested
        each = keras.callbacks.LambdaCallback(on_train_batch_end=act)
        model.fit(X[:32], Y[:32], callbacks=[each] if others else [], **options)
        found.append(values(model.weights))
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_fit_that_is_broken_off(make):
    """The round that it was in ends with the batches that were there."""
    strategy = make(local_steps=3)
    with strategy.scope():
        model = network(keras.optimizers.SGD(0.01))

    def end(batch: int, logs: Any) -> None:
        raise RuntimeError("broken off")

    ends = keras.callbacks.LambdaCallback(on_train_batch_end=end)
    with pytest.raises(RuntimeError, match="broken off"):
        model.fit(X, Y, batch_size=4, verbose=0, callbacks=[ends])
    assert sum(strategy.steps_of_workers.values()) == 1
    model.fit(X, Y, batch_size=4, verbose=0)
    assert sum(strategy.steps_of_workers.values()) == 15
    assert all(strategy.steps_of_workers.values())
