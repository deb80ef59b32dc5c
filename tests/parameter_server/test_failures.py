"""Tasks that die, freeze, are told to end, or come back: exact counts or a named error,
never a hang.
"""

import os
import threading
import time

import keras
import numpy as np
import pytest

import keras_distribute as kd
from keras_distribute.scheduling import queue, workers
from keras_distribute.servers.local import LocalResolver
from keras_distribute.threads import condition
from tests.exactness.harness import table
from tests.exactness.test_layers_optimizers_metrics import classifier
from tests.parameter_server.conftest import resolver_of
from tests.parameter_server.test_kill_matrix import Counting


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
    counting = Counting(strategy)
    counting.scheduled(1)
    counting.coordinator.join()
    resolver.now = kd.cluster_resolver.ClusterSpec(tasks | {"worker": [other]})
    resolver.num_failures = 1
    own_cluster.kill("worker", 0)
    counting.scheduled(100)
    assert strategy.cluster.join(timeout=30)
    counting.assert_counts(101)
    assert strategy.cluster.workers[0].address == other
    strategy.close()


def test_nobody_works_until_a_worker_comes(own_cluster, caplog):
    strategy = kd.ParameterServerStrategy(own_cluster.cluster_resolver)
    counting = Counting(strategy)
    counting.scheduled(1)[0].fetch()
    for index in range(2):
        own_cluster.kill("worker", index)
    counting.scheduled(10)
    assert not strategy.cluster.join(timeout=1.0)
    strategy.cluster.look(True)
    assert "none of 2 is there" in caplog.text
    own_cluster.start("worker", 1)
    counting.coordinator.join()
    counting.assert_counts(11)
    strategy.close()


def test_a_function_that_ends_each_worker_is_given_up(own_cluster, monkeypatch):
    monkeypatch.setattr(workers, "_MOST_ENDS", 2)
    strategy = kd.ParameterServerStrategy(resolver_of(own_cluster, 1))
    counting, here = Counting(strategy), os.getpid()
    counting.scheduled(1)[0].fetch()

    def ending():
        if os.getpid() != here:
            os._exit(1)
        yield np.ones(1000, "float32")

    iterator = iter(counting.coordinator.create_per_worker_dataset(ending))
    made = [
        counting.coordinator.schedule(counting.add_next, (iterator,)) for _ in range(4)
    ]
    assert not strategy.cluster.join(timeout=2.0)
    own_cluster.start("worker", 0)
    message = r"each of 2 workers that ran it has ended(.|\n)*worker:0(.|\n)*process;"
    with pytest.raises(kd.errors.ClusterError, match=message):
        counting.coordinator.join()
    with pytest.raises(kd.errors.ClusterError, match=message):
        made[0].fetch()
    for each in made[1:]:
        with pytest.raises(kd.errors.CancelledError):
            each.fetch()
    own_cluster.start("worker", 0)
    counting.scheduled(10)
    counting.coordinator.join()
    counting.assert_counts(11)
    strategy.close()


def test_who_waits_for_room_in_the_queue_notices_a_server_that_is_gone(
    own_cluster, monkeypatch
):
    """Though no worker is there that would."""
    monkeypatch.setattr(queue, "_MOST", 2)
    monkeypatch.setattr(condition, "_SECONDS_TO_LOOK", 0.1)
    strategy = kd.ParameterServerStrategy(own_cluster.cluster_resolver)
    counting = Counting(strategy)
    counting.scheduled(5)[-1].fetch()
    counting.coordinator.join()  # What runs would be put back, and there is room for 2.
    for index in range(2):
        own_cluster.kill("worker", index)
    counting.scheduled(2)
    ending = threading.Timer(1.0, own_cluster.kill, ("ps", 0))
    ending.start()
    with pytest.raises(kd.errors.UnavailableError, match="parameter server ps:0"):
        counting.scheduled(1)
    ending.join()
    strategy.close()


def test_what_does_not_end_after_an_error_is_given_up(strategy, tmp_path, monkeypatch):
    monkeypatch.setattr(queue, "_SECONDS_TO_END", 0.5)
    counting, here = Counting(strategy), os.getpid()
    begun, gate = tmp_path / "begun", tmp_path / "gate"

    def waiting():
        if os.getpid() != here:
            begun.touch()
            while not gate.exists():
                time.sleep(0.01)
        yield np.ones(1000, "float32")

    def failing():
        if os.getpid() != here:
            raise ValueError("no data")
        yield np.ones(1000, "float32")

    def scheduled(dataset):
        iterator = iter(counting.coordinator.create_per_worker_dataset(dataset))
        return counting.coordinator.schedule(counting.add_next, (iterator,))

    late = scheduled(waiting)
    while not begun.exists():
        time.sleep(0.01)
    with pytest.raises(kd.errors.RemoteError, match="no data"):
        for _ in range(3):
            scheduled(failing)
        counting.coordinator.join()
    with pytest.raises(kd.errors.CancelledError):
        late.fetch()
    counting.scheduled(10)
    counting.coordinator.join()
    counting.assert_counts(10)
    gate.touch()
    end = time.monotonic() + 60
    while not all(each.is_ready for each in strategy.cluster.workers):
        assert time.monotonic() < end
        time.sleep(0.05)
    counting.scheduled(10)
    counting.coordinator.join()
    counting.assert_counts(20)  # What it pushed late was refused.


def test_what_the_coordinator_cannot_take_is_an_error(strategy, monkeypatch):
    counting = Counting(strategy)
    counting.scheduled(5)[-1].fetch()

    def full(*given):
        raise MemoryError("no room")

    with monkeypatch.context() as broken:
        broken.setattr(strategy.cluster.kept, "finish", full)
        value = counting.scheduled(1)[0]
        with pytest.raises(MemoryError, match="no room"):
            counting.coordinator.join()
        with pytest.raises(MemoryError, match="no room"):
            value.fetch()
    counting.scheduled(3)
    counting.coordinator.join()


@pytest.mark.parametrize("method", ["fit", "predict"])
def test_steps_say_that_they_wait_for_a_worker(
    method, own_cluster, caplog, monkeypatch
):
    monkeypatch.setattr(condition, "_SECONDS_TO_LOOK", 0.1)
    strategy = kd.ParameterServerStrategy(resolver_of(own_cluster, 1))
    x, y = table(40)
    with strategy.scope():
        model = classifier("sgd")
    calls = {
        "fit": lambda: model.fit(x, y, batch_size=5, verbose=0),
        "predict": lambda: model.predict(x, verbose=0),
    }
    calls[method]()
    own_cluster.kill("worker", 0)
    comes = threading.Timer(3.0, own_cluster.start, ("worker", 0))
    comes.start()
    calls[method]()
    comes.join()
    assert "waits for a worker" in caplog.text
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


@pytest.mark.parametrize("method", ["fit", "predict", "fetch", "done"])
def test_a_server_that_is_gone_while_no_worker_is_there(method, own_cluster):
    strategy = kd.ParameterServerStrategy(resolver_of(own_cluster, 1))
    x, y = table(40)
    with strategy.scope():
        model = classifier("sgd")
    counting = Counting(strategy)

    def done():
        counting.scheduled(1)
        while not counting.coordinator.done():
            assert time.monotonic() - start < 15
            time.sleep(0.1)

    start = time.monotonic()
    calls = {
        "fit": lambda: model.fit(x, y, batch_size=5, verbose=0),
        "predict": lambda: model.predict(x, batch_size=5, verbose=0),
        "fetch": lambda: counting.scheduled(1)[0].fetch(),
        "done": done,
    }
    calls[method]()
    own_cluster.kill("worker", 0)
    own_cluster.kill("ps", 0)
    start = time.monotonic()
    expected = "CancelledError" if method == "fetch" else "UnavailableError"
    with pytest.raises(getattr(kd.errors, expected), match="ps:0"):
        calls[method]()
    assert time.monotonic() - start < 15
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
    of_first = Counting(first)
    of_first.scheduled(50)
    second = kd.ParameterServerStrategy(own_cluster.cluster_resolver)
    of_second = Counting(second)
    of_second.scheduled(50)
    of_second.coordinator.join()
    of_second.assert_counts(50)
    taken = r"another coordinator(.|\n)*Fix: strategy\.close\(\)(.|\n)*for each"
    with pytest.raises(kd.errors.ClusterError, match=taken):
        of_first.v.numpy()
    with pytest.raises(kd.errors.ClusterError, match=taken):
        of_first.scheduled(5)
        of_first.coordinator.join()
    first.close()
    second.close()


@pytest.mark.parametrize("is_mistake", [True, False])
def test_what_could_not_be_sent_is_not_lost(is_mistake, strategy, monkeypatch):
    """A function on its way to a worker: an error, or on its way once more."""
    counting = Counting(strategy)
    counting.scheduled(1)[0].fetch()
    told, failures = workers.Worker._told, iter([True])
    failed = kd.errors.RemoteError if is_mistake else kd.errors.UnavailableError

    def failing(*args):
        if next(failures, False):
            raise failed("IndexError in the task ps:0: out of range")
        return told(*args)

    monkeypatch.setattr(workers.Worker, "_told", failing)
    result = counting.scheduled(1)[0]
    if is_mistake:
        with pytest.raises(kd.errors.RemoteError, match="IndexError in the task ps:0"):
            counting.coordinator.join()
        with pytest.raises((kd.errors.RemoteError, kd.errors.CancelledError)):
            result.fetch()
    counting.scheduled(1)
    assert strategy.cluster.join(timeout=30)
    counting.assert_counts(2 if is_mistake else 3)
