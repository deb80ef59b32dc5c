"""Threads that schedule, assign and wait at the same time: nothing is lost."""

import threading
import types
from collections import deque

import keras
import numpy as np
import pytest

from keras_distribute.coordinator import ClusterCoordinator
from keras_distribute.scheduling import queue as queues
from keras_distribute.scheduling.cluster import Cluster
from keras_distribute.scheduling.kept import Kept
from keras_distribute.scheduling.queue import Closure, Queue
from keras_distribute.scheduling.servers import Server
from keras_distribute.scheduling.values import RemoteValue
from keras_distribute.threads import condition
from keras_distribute.threads.condition import Condition
from keras_distribute.variables import Blocks


def meanwhile(monkeypatch, owner, name, act, when=lambda *args: True):
    """Lets `act` happen in another thread right after a method has done its work, once;
    it may have to wait until the caller has gone on. Returns the thread.
    """
    method, thread = getattr(owner, name), threading.Thread(target=act)
    left = [thread]

    def slow(*args, **kwargs):
        result = method(*args, **kwargs)
        if left and when(*args):
            left[0].start()
            left.pop().join(0.2)
        return result

    monkeypatch.setattr(owner, name, slow)
    return thread


def test_what_is_assigned_while_an_older_value_travels(strategy, monkeypatch):
    coordinator = ClusterCoordinator(strategy)
    with strategy.scope():
        v = keras.Variable(1.0)

    def read():
        return v.value + 0.0

    coordinator.schedule(read).fetch()
    meanwhile(
        monkeypatch,
        Server,
        "call",
        lambda: v.assign(3.0),
        lambda server, header, *_: header["op"] == "set",
    )
    v.assign(2.0)
    coordinator.schedule(read).fetch()
    assert v.numpy() == 3.0
    assert coordinator.schedule(read).fetch() == 3.0
    assert v.numpy() == 3.0


def test_what_is_assigned_while_rows_are_restored(strategy, monkeypatch):
    coordinator = ClusterCoordinator(strategy)
    with strategy.scope():
        v = keras.Variable(np.zeros((4, 2), "float32"))

    def read():
        return v.value + 0.0

    coordinator.schedule(read).fetch()
    meanwhile(
        monkeypatch,
        Server,
        "call",
        lambda: v.assign(np.full((4, 2), 3.0)),
        lambda server, header, *_: header["op"] == "set_rows",
    )
    rows = Blocks((4, 2), "float32", lambda a, b: np.ones((b - a, 2), "float32"))
    assert strategy.cluster.assign_blocks(v, rows, ())
    np.testing.assert_array_equal(v.numpy(), np.full((4, 2), 3.0))
    fetched = coordinator.schedule(read).fetch()
    np.testing.assert_array_equal(fetched, np.full((4, 2), 3.0))


def test_what_is_assigned_while_the_coordinator_takes_a_count(strategy, monkeypatch):
    coordinator = ClusterCoordinator(strategy)
    with strategy.scope():
        count = keras.Variable(0, dtype="int32", trainable=False)
    other = meanwhile(monkeypatch, Kept, "_first", lambda: count.assign(3))

    def read():
        return count.value + 0

    coordinator.schedule(read).fetch()
    other.join(10)
    assert coordinator.schedule(read).fetch() == 3
    assert count.numpy() == 3


def test_an_older_number_of_writes_does_not_come_back(monkeypatch):
    """A fence of a worker's thread, whose answer has none, beside an assignment."""
    server = Server(0, "nowhere:1", None, None)

    class Answer(dict):
        """Whose methods can be replaced."""

    def asked(header, arrays):
        return Answer({"writes": 1} if header["op"] == "set" else {}), []

    monkeypatch.setattr(server, "_asked", asked)
    writing = {"op": "set", "keys": []}
    other = meanwhile(monkeypatch, Answer, "get", lambda: server.call(writing))
    server.call({"op": "fence"})
    other.join(10)
    assert server.writes == 1


def test_steps_of_two_threads_count_once_each(one_worker, monkeypatch):
    """Also of one that has to wait on its way into the queue."""
    coordinator = ClusterCoordinator(one_worker)
    with one_worker.scope():
        v = keras.Variable(0.0)

    def add():
        v.assign_add(1.0)

    coordinator.schedule(add).fetch()
    queue, held, is_open = (
        one_worker.cluster.queue,
        threading.Event(),
        threading.Event(),
    )
    put = queue.put

    def slow(closure):
        if threading.current_thread() is thread:
            held.set()
            assert is_open.wait(10)
        put(closure)

    monkeypatch.setattr(queue, "put", slow)
    thread = threading.Thread(target=coordinator.schedule, args=(add,))
    thread.start()
    assert held.wait(10)
    coordinator.schedule(add).fetch()
    is_open.set()
    thread.join()
    coordinator.join()
    assert v.numpy() == 3.0
    assert sum(one_worker.steps_of_workers.values()) == 3


def test_join_waits_for_what_was_scheduled_before():
    """Not until another thread schedules nothing any more."""
    queue = Queue(Condition())

    def put() -> None:
        result = RemoteValue(Condition(), lambda is_late: None, lambda: None)
        queue.put(Closure(None, None, [], None, 1, [], [], result, None))

    put()
    put()
    cluster = types.SimpleNamespace(
        queue=queue, send_changed=put, look=lambda is_late: None, synchronize=int
    )
    assert not Cluster.join(cluster, timeout=0.01)
    queue.finished(queue.take(0), None)
    queue.finished(queue.take(0), None)
    queue.finished(queue.take(0), None)
    assert Cluster.join(cluster, timeout=0.01)
    assert queue.num_pending == 1


def test_ctrl_c_before_workers_know_of_a_function(one_worker, monkeypatch):
    """Who waits next does so for seconds, not for ever."""
    monkeypatch.setattr(condition, "_SECONDS_TO_LOOK", 0.1)
    coordinator, queue = ClusterCoordinator(one_worker), one_worker.cluster.queue
    coordinator.schedule(lambda: 1.0).fetch()

    def interrupted(is_urgent: bool = False) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(queue, "wake_all", interrupted)
        with pytest.raises(KeyboardInterrupt):
            coordinator.schedule(lambda: 2.0)
    assert queue.num_pending == 1
    assert one_worker.cluster.join(timeout=20.0)


def test_ctrl_c_on_the_way_into_the_queue():
    queue = Queue(Condition())

    class Interrupted(deque):
        def append(self, each):
            raise KeyboardInterrupt

    queue._waiting = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        queue.put(Closure(None, None, [], None, 1, [], [], None, None))
    assert queue.done_below > queue.last


def test_ctrl_c_while_workers_let_go(monkeypatch):
    monkeypatch.setattr(queues, "_SECONDS_TO_END", 0.0)
    queue = Queue(Condition())
    queue.put(Closure(None, None, [], None, 1, [], [], None, None))
    queue.take(0)
    queue.failed(ValueError("first"))

    def interrupted(is_urgent: bool) -> None:
        raise KeyboardInterrupt

    queue.on_work(interrupted)
    with pytest.raises(KeyboardInterrupt):
        queue.check()
    assert not queue.gives_up


def test_an_error_is_raised_in_one_of_the_threads_that_wait():
    queue = Queue(Condition())
    result = RemoteValue(Condition(), lambda is_late: None, lambda: None)
    queue.put(Closure(None, None, [], None, 1, [], [], result, None))
    running = queue.take(0)
    queue.failed(ValueError("first"))
    raised = []

    def check():
        try:
            queue.check()
            raised.append(None)
        except ValueError as error:
            raised.append(str(error))

    threads = [threading.Thread(target=check) for _ in range(2)]
    for thread in threads:
        thread.start()
    threads[1].join(0.2)
    queue.finished(running, None)
    for thread in threads:
        thread.join(10)
    assert sorted(raised, key=str) == [None, "first"]
