"""Tasks that die, freeze, are told to end, or come back: exact counts or a named error,
never a hang.
"""

import signal
import time

import keras
import numpy as np
import pytest

import keras_distribute as kd
from keras_distribute.coordinator import ClusterCoordinator
from keras_distribute.servers.local import LocalResolver
from tests.exactness.harness import table

MOMENTS = ["idle", "in a step", "at random"]


def counting(strategy):
    """A large variable, a count, and a function that adds to both."""
    with strategy.scope():
        v = keras.Variable(np.zeros(1000, "float32"))
        n = keras.Variable(0.0)

    def add(x):
        v.assign_add(x)
        n.assign_add(1.0)
        return x[0]

    return v, n, add


def assert_counts(v, n, count):
    """Each step counts once on each server."""
    np.testing.assert_array_equal(v.numpy(), np.full(1000, count))
    assert n.numpy() == count


@pytest.mark.sampled(3)
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("name", ["SIGKILL", "SIGSTOP", "SIGTERM"])
def test_a_worker_that_goes_and_comes_back(own_cluster, name, moment):
    number = getattr(signal, name)
    strategy = kd.ParameterServerStrategy(own_cluster.cluster_resolver)
    coordinator = ClusterCoordinator(strategy)
    v, n, add = counting(strategy)
    x = np.ones(1000, "float32")
    for _ in range(20):
        coordinator.schedule(add, (x,))
    coordinator.join()
    if moment == "idle":
        own_cluster.kill("worker", 0, number)
    values = [coordinator.schedule(add, (x,)) for _ in range(400)]
    if moment != "idle":
        time.sleep(0.02 if moment == "in a step" else 0.11)
        own_cluster.kill("worker", 0, number)
    start = time.monotonic()
    coordinator.join()
    assert time.monotonic() - start < (10 if number == signal.SIGSTOP else 5)
    assert coordinator.fetch(values) == [1.0] * 400
    assert_counts(v, n, 420)
    if number == signal.SIGSTOP:
        own_cluster.kill("worker", 0, signal.SIGCONT)
        time.sleep(1.0)
        assert_counts(v, n, 420)  # What it pushes late is refused.
    else:
        own_cluster.start("worker", 0)
    worker = strategy.cluster.workers[0]
    end = time.monotonic() + 60
    while not worker.is_ready and time.monotonic() < end:
        time.sleep(0.05)
    before = worker.steps
    for _ in range(200):
        coordinator.schedule(add, (x,))
    coordinator.join()
    assert_counts(v, n, 620)
    assert worker.steps > before
    strategy.close()


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSTOP"])
def test_a_server_that_is_gone_is_an_error(own_cluster, name):
    strategy = kd.ParameterServerStrategy(own_cluster.cluster_resolver)
    coordinator = ClusterCoordinator(strategy)
    v, n, add = counting(strategy)
    x = np.ones(1000, "float32")
    coordinator.schedule(add, (x,)).fetch()
    coordinator.join()
    own_cluster.kill("ps", 0, getattr(signal, name))
    start = time.monotonic()
    for method in (
        lambda: [coordinator.schedule(add, (x,)), coordinator.join()],
        coordinator.join,
        coordinator.done,
        lambda: [v.numpy(), n.numpy()],
    ):
        with pytest.raises(
            kd.errors.UnavailableError, match=r"parameter server ps:0 \(127(.|\n)*again"
        ):
            method()
    assert time.monotonic() - start < 10
    strategy.close()


class Moving(LocalResolver):
    """Says where the worker is now, if the service that knows it answers."""

    def __init__(self, cluster_spec, credentials):
        super().__init__(cluster_spec, credentials)
        self.now, self.num_failures = cluster_spec, 0

    def cluster_spec(self):
        if self.num_failures:
            self.num_failures -= 1
            raise OSError("no answer")
        return self.now


def test_a_worker_comes_back_at_another_address(own_cluster):
    here = own_cluster.cluster_resolver
    tasks = here.cluster_spec().as_dict()
    first, other = tasks["worker"]
    spec = kd.cluster_resolver.ClusterSpec(tasks | {"worker": [first]})
    resolver = Moving(spec, here.credentials)
    strategy = kd.ParameterServerStrategy(resolver)
    coordinator = ClusterCoordinator(strategy)
    v, n, add = counting(strategy)
    x = np.ones(1000, "float32")
    coordinator.schedule(add, (x,))
    coordinator.join()
    resolver.now = kd.cluster_resolver.ClusterSpec(tasks | {"worker": [other]})
    resolver.num_failures = 1
    own_cluster.kill("worker", 0)
    for _ in range(100):
        coordinator.schedule(add, (x,))
    assert strategy.cluster.join(timeout=30)
    assert_counts(v, n, 101)
    assert strategy.cluster.workers[0].address == other
    strategy.close()


def test_nobody_works_until_a_worker_comes(own_cluster, caplog):
    strategy = kd.ParameterServerStrategy(own_cluster.cluster_resolver)
    coordinator = ClusterCoordinator(strategy)
    v, n, add = counting(strategy)
    x = np.ones(1000, "float32")
    coordinator.schedule(add, (x,)).fetch()
    for index in range(2):
        own_cluster.kill("worker", index)
    for _ in range(10):
        coordinator.schedule(add, (x,))
    assert not strategy.cluster.join(timeout=1.0)
    strategy.cluster.remind()
    assert "none of 2 is there" in caplog.text
    own_cluster.start("worker", 1)
    coordinator.join()
    assert_counts(v, n, 11)
    strategy.close()


def test_fit_goes_on_where_a_worker_dies(own_cluster):
    """Each batch counts once in the weights' steps, and in the metrics."""
    strategy = kd.ParameterServerStrategy(own_cluster.cluster_resolver)
    x, y = table(600)
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        rows = keras.metrics.Sum(name="rows")
        model.compile("sgd", loss, metrics=[_Rows(rows)])

    class Kills(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                own_cluster.kill("worker", 0)
            elif epoch == 2:
                own_cluster.start("worker", 0)

    history = model.fit(
        x, y, batch_size=7, epochs=3, verbose=0, callbacks=[Kills()]
    ).history
    assert history["rows"] == [600.0] * 3
    assert int(model.optimizer.iterations.numpy()) == 3 * 86
    strategy.close()


class _Rows(keras.metrics.Metric):
    """How many rows were seen."""

    def __init__(self, total):
        super().__init__(name="rows")
        self.total = total

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.update_state(keras.ops.ones(keras.ops.shape(y_true)[0]))

    def result(self):
        return self.total.result()


def test_the_next_coordinator_begins_anew(own_cluster):
    """Of a coordinator that is gone without a word."""
    first = kd.ParameterServerStrategy(own_cluster.cluster_resolver)
    v, _, add = counting(first)
    x = np.ones(1000, "float32")
    coordinator = ClusterCoordinator(first)
    for _ in range(50):
        coordinator.schedule(add, (x,))
    second = kd.ParameterServerStrategy(own_cluster.cluster_resolver)
    w, m, add_second = counting(second)
    other = ClusterCoordinator(second)
    for _ in range(50):
        other.schedule(add_second, (x,))
    other.join()
    assert_counts(w, m, 50)
    with pytest.raises(kd.errors.DistributeError, match="another coordinator"):
        v.numpy()
    first.close()
    second.close()
