"""What the servers have after asynchronous training is what their log says, bit for
bit.
"""

import os

import keras
import numpy as np
import pytest
from keras import layers

import keras_distribute as kd
from keras_distribute.scheduling.servers import Server
from tests.exactness.harness import table
from tests.parameter_server.conftest import resolver_of
from tests.parameter_server.test_fit import network

EVERY_CASE = os.environ.get("EVERY_CASE")
EPOCHS = 32 if EVERY_CASE else 4


def divided(shape, dtype):
    """Large variables in two parts."""
    return [2 if shape[0] > 4 else 1, *[1] * (len(shape) - 1)]


@pytest.mark.parametrize("partitioner", [None, divided])
@pytest.mark.parametrize("workers", [1, 2])
def test_asynchronous_training_is_computed_again(cluster, workers, partitioner):
    computed_again(cluster, workers, partitioner)


@pytest.mark.skipif(not EVERY_CASE, reason="EVERY_CASE starts four workers.")
def test_four_workers():
    with kd.testing.ParameterServerCluster(num_workers=4, num_ps=2) as cluster:
        computed_again(cluster, 4, divided)


def computed_again(cluster, workers, partitioner):
    strategy = kd.ParameterServerStrategy(resolver_of(cluster, workers), partitioner)
    x, y = table(256)
    with strategy.scope():
        model = network()

    class Slows(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.model.optimizer.learning_rate = 0.02 / (epoch + 1)

    with kd.testing.RecordedUpdates(strategy) as updates:
        model.fit(x, y, batch_size=8, epochs=EPOCHS, verbose=0, callbacks=[Slows()])
    pushes = [[entry for entry in log if entry[0] == "push"] for log in updates.log]
    assert [len(log) for log in pushes] == [32 * EPOCHS] * 2
    assert {entry[3] for entry in pushes[0]} == set(range(workers))
    again = updates.replayed()
    compared = 0
    for variable in [*model.weights, *model.optimizer.variables]:
        if variable.path in again:
            np.testing.assert_array_equal(again[variable.path], variable.numpy())
            compared += 1
    assert compared >= len(model.weights)
    strategy.close()


def test_convolutions(strategy):
    """Sums of their gradients depend on how many threads a process has."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(32, 12, 12, 3)).astype("float32"), np.arange(32) % 4
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((12, 12, 3)), layers.Conv2D(8, 3), layers.Flatten()]
        )
        model.add(layers.Dense(4))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("sgd", loss)
    with kd.testing.RecordedUpdates(strategy) as updates:
        model.fit(x, y, batch_size=8, epochs=2, verbose=0)
    again = updates.replayed()
    for variable in model.weights:
        np.testing.assert_array_equal(again[variable.path], variable.numpy())


def test_several_steps_in_a_function(strategy):
    x, y = table(64)
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), layers.Dense(3)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, steps_per_execution=4)
    model.fit(x, y, batch_size=4, verbose=0)
    with kd.testing.RecordedUpdates(strategy) as updates:
        model.fit(x, y, batch_size=4, epochs=2, verbose=0)
    again = updates.replayed()
    for variable in model.weights:
        np.testing.assert_array_equal(again[variable.path], variable.numpy())


def test_what_workers_read_cannot_be_computed_again(strategy):
    with strategy.scope():
        v = keras.Variable(0.0)
    coordinator = kd.coordinator.ClusterCoordinator(strategy)
    dataset = coordinator.create_per_worker_dataset(lambda: iter(np.ones(9, "float32")))
    with kd.testing.RecordedUpdates(strategy) as updates:
        coordinator.schedule(lambda it: v.assign_add(next(it)), (iter(dataset),))
    with pytest.raises(kd.errors.ContextError, match=r"workers read themselves"):
        updates.replayed()


@pytest.mark.parametrize("is_own", [True, False])
def test_after_an_error_nothing_is_recorded(own_cluster, is_own):
    """Neither here nor on the servers that are left, and it is the first error."""
    strategy = kd.ParameterServerStrategy(own_cluster.cluster_resolver)
    coordinator = kd.coordinator.ClusterCoordinator(strategy)
    dataset = coordinator.create_per_worker_dataset(lambda: iter(np.ones(1, "float32")))
    iterator = iter(dataset)
    first = KeyError("own") if is_own else kd.errors.OutOfRangeError("at its end")
    with (
        pytest.raises(type(first), match=str(first.args[0])),
        kd.testing.RecordedUpdates(strategy) as updates,
    ):
        if is_own:
            own_cluster.kill("ps", 0)
            raise first
        for _ in range(3):
            coordinator.schedule(lambda it: next(it), (iterator,))
    assert [server.told for server in strategy.cluster.servers] == [None, None]
    assert len(updates.log) == (1 if is_own else 2)
    server = strategy.cluster.servers[1]
    server.call({"op": "set", "keys": [7]}, [1.0])
    assert server.call({"op": "log", "keep": False})[0]["log"] == []
    strategy.close()


def test_answers_that_are_lost(one_worker, monkeypatch):
    """What is asked once more is answered, and done, as the first time."""
    with one_worker.scope():
        v = keras.Variable(np.ones(3, "float32"))
    coordinator = kd.coordinator.ClusterCoordinator(one_worker)

    def add(x):
        v.assign_add(x)

    coordinator.schedule(add, (np.ones(3, "float32"),)).fetch()
    asked = Server._asked

    def twice(server, header, arrays):
        asked(server, header, arrays)
        return asked(server, header, arrays)

    monkeypatch.setattr(Server, "_asked", twice)
    with kd.testing.RecordedUpdates(one_worker) as updates:
        for i in range(3):
            v.assign(np.full(3, i, "float32"))
            coordinator.schedule(add, (np.full(3, 0.5, "float32"),)).fetch()
    again = updates.replayed()
    np.testing.assert_array_equal(v.numpy(), np.full(3, 2.5))
    np.testing.assert_array_equal(again[v.path], v.numpy())
