"""The cases of TensorFlow's own test of failures (`fault_tolerance_test_base.py` of
TensorFlow 2.21) that are not in `test_kill_matrix.py`.

Those of functions that are placed on a worker by hand have no counterpart: here
functions are scheduled. What TensorFlow counts as "at least", is exact here.
"""

import threading
import time

import keras
import numpy as np
import pytest

import keras_distribute as kd
from keras_distribute.coordinator import ClusterCoordinator
from tests.parameter_server.test_kill_matrix import behind_a_gate


@pytest.fixture
def strategy(own_cluster):
    """A strategy on tasks that may be ended."""
    strategy = kd.ParameterServerStrategy(own_cluster.cluster_resolver)
    yield strategy
    strategy.close()


class Model:
    """A weight, a count, and a function that takes a batch of each of two iterators,
    the second of which waits at a gate.
    """

    def __init__(self, strategy, gate):
        self.coordinator, self.gate = ClusterCoordinator(strategy), gate
        with strategy.scope():
            self.w = keras.Variable(np.zeros((10, 10), "float32"))
            self.iterations = keras.Variable(0, dtype="float32")
        self.rebuild_iterators()

    def rebuild_iterators(self, use_dataset_fn=True):
        data = np.full((10, 10), 0.1, "float32")

        def forever():
            while True:
                yield data

        def dataset():
            return forever()

        made = self.coordinator.create_per_worker_dataset(
            dataset if use_dataset_fn else [data] * 100
        )
        gated = self.coordinator.create_per_worker_dataset(behind_a_gate(self.gate))
        self.iterator, self.iterator2 = iter(made), iter(gated)

    def train(self, iterator, iterator2):
        self.w.assign_add(next(iterator) @ keras.ops.ones((10, 10)))
        self.w.assign_add(next(iterator2)[:100].reshape(10, 10))
        self.iterations.assign_add(1.0)

    def schedule(self, count):
        for _ in range(count):
            self.coordinator.schedule(self.train, (self.iterator, self.iterator2))

    def running(self, count):
        """Schedules, and waits until each worker is in a function."""
        self.schedule(count)
        queue = self.coordinator.strategy.cluster.queue
        while len(queue._running) < 2:
            time.sleep(0.01)
        time.sleep(0.2)
        assert not self.coordinator.done()

    def join(self, count):
        """Lets all functions end; each counts once."""
        self.gate.touch()
        self.coordinator.join()
        assert self.iterations.numpy() == count
        np.testing.assert_allclose(self.w.numpy(), np.full((10, 10), 2.0 * count), 1e-5)


@pytest.fixture
def model(strategy, tmp_path):
    return Model(strategy, tmp_path / "gate")


def restart(cluster, job, downtime):
    cluster.kill(job, 0)
    time.sleep(downtime)
    cluster.start(job, 0)


def test_both_workers_are_preempted(own_cluster, model):
    model.running(10)
    for index in (0, 1):
        own_cluster.kill("worker", index)
    time.sleep(0.5)
    for index in (0, 1):
        own_cluster.start("worker", index)
    model.join(10)


def test_a_worker_fails_again_and_again(own_cluster, model):
    model.running(10)
    for _ in range(2):
        restart(own_cluster, "worker", 0.3)
        time.sleep(1.0)
    model.join(10)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("use_dataset_fn", [True, False])
def test_datasets_are_created_while_a_worker_is_away(
    own_cluster, model, use_dataset_fn
):
    model.gate.touch()
    away = threading.Thread(target=restart, args=(own_cluster, "worker", 1.0))
    away.start()
    model.schedule(3)
    for _ in range(2):
        model.rebuild_iterators(use_dataset_fn)
        model.schedule(3)
    model.join(9)
    away.join()


def test_a_worker_is_preempted_and_a_function_fails(own_cluster, strategy, model):
    """The error is the function's; what waited is cancelled; all can be used again."""
    coordinator = model.coordinator

    gate = model.gate

    def broken():
        yield np.ones(1000, "float32")
        while not gate.exists():
            time.sleep(0.01)
        raise ValueError("no more data")

    iterator = iter(coordinator.create_per_worker_dataset(broken))

    def step(iterator):
        return next(iterator)[0]

    made = [coordinator.schedule(step, (iterator,)) for _ in range(8)]
    time.sleep(0.5)
    own_cluster.kill("worker", 0)
    model.gate.touch()
    with pytest.raises(kd.errors.RemoteError, match="no more data"):
        coordinator.join()
    with pytest.raises(kd.errors.CancelledError):
        made[-1].fetch()
    own_cluster.start("worker", 0)
    model.schedule(3)
    model.join(3)


def test_a_server_fails_while_a_worker_comes_back(own_cluster, model):
    model.running(10)
    away = [
        threading.Thread(target=restart, args=(own_cluster, job, 0.5))
        for job in ("worker", "ps")
    ]
    for thread in away:
        thread.start()
    with pytest.raises(kd.errors.UnavailableError, match="parameter server ps:0"):
        model.join(10)
    for thread in away:
        thread.join()


def test_results_are_there_without_workers(own_cluster, strategy):
    """`fetch` and `get` of what has finished."""
    coordinator = ClusterCoordinator(strategy)
    with strategy.scope():
        v = keras.Variable(0.0)
    value = coordinator.schedule(lambda: (v + 1.0, v - 1.0))
    assert value.fetch() == (1.0, -1.0)
    late = coordinator.schedule(lambda: (v + 1.0, v - 1.0))
    coordinator.join()
    for index in (0, 1):
        own_cluster.kill("worker", index)
    assert value.fetch() == value.get() == (1.0, -1.0)
    assert late.fetch() == (1.0, -1.0)
    assert v.numpy() == 0.0


def test_a_server_is_read_while_a_worker_comes_and_goes(own_cluster, model):
    model.gate.touch()
    worker = model.coordinator.strategy.cluster.workers[0]
    away = threading.Timer(0.3, restart, args=(own_cluster, "worker", 0.5))
    away.start()
    done, after = 0, 0
    while after < 3:
        model.schedule(1)
        done += 1
        model.join(done)
        before = worker.steps
        end = time.monotonic() + 0.1
        while time.monotonic() < end:
            assert model.iterations.numpy() == done
        after += not away.is_alive() and worker.is_ready
        assert worker.steps == before
