"""Who is killed, frozen or told to end, and when: exact counts or a named error, never
a hang.
"""

import contextlib
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time

import keras
import numpy as np
import pytest

import keras_distribute as kd
from keras_distribute.coordinator import ClusterCoordinator
from keras_distribute.scheduling.served import Served

EVERY_CASE = os.environ.get("EVERY_CASE")
SIGNALS = ["SIGKILL", "SIGSTOP", "SIGTERM"]
MOMENTS = ["idle", "in a step", "in a push", "at random", "in a save"]
X = np.ones(1000, "float32")


class Counting:
    """A large variable and a count on two servers, and a function that adds to both."""

    def __init__(self, strategy):
        self.strategy = strategy
        self.coordinator = ClusterCoordinator(strategy)
        with strategy.scope():
            self.v = keras.Variable(np.zeros(1000, "float32"))
            self.n = keras.Variable(0.0)
        self.checkpoint = kd.Checkpoint(v=self.v, n=self.n)

    def add(self, x):
        self.v.assign_add(x)
        self.n.assign_add(1.0)
        return x[0]

    def add_next(self, iterator):
        return self.add(next(iterator))

    def scheduled(self, count):
        return [self.coordinator.schedule(self.add, (X,)) for _ in range(count)]

    def assert_counts(self, count):
        """Each step counts once on each server."""
        np.testing.assert_array_equal(self.v.numpy(), np.full(1000, count))
        assert self.n.numpy() == count


def begun(cluster):
    """A count on the cluster that has come to 20."""
    counting = Counting(kd.ParameterServerStrategy(cluster.cluster_resolver))
    counting.scheduled(20)
    counting.coordinator.join()
    return counting


def behind_a_gate(gate):
    """A dataset function whose second batch waits until there is the file."""

    def batches():
        yield np.ones(1000, "float32")
        while not os.path.exists(gate):
            time.sleep(0.01)
        while True:
            yield np.ones(1000, "float32")

    return batches


def scheduled_around(hit, moment, counting, cluster, tmp_path):
    """Schedules functions, and does something to a task at some moment; returns the
    results. A save raises its own errors.
    """
    if moment == "idle":
        hit()
        return counting.scheduled(200)
    if moment == "in a step":
        gate = tmp_path / "gate"
        dataset = counting.coordinator.create_per_worker_dataset(behind_a_gate(gate))
        iterator = iter(dataset)
        made = [
            counting.coordinator.schedule(counting.add_next, (iterator,))
            for _ in range(200)
        ]
        time.sleep(0.5)
        hit()
        gate.touch()
        return made
    if moment == "in a push":
        cluster.kill("ps", 1, signal.SIGSTOP)  # To which both workers now push.
        made = counting.scheduled(200)
        time.sleep(0.3)
        hit()
        cluster.kill("ps", 1, signal.SIGCONT)
        return made
    made = counting.scheduled(200)
    if moment == "at random":
        time.sleep(random.uniform(0.0, 0.15))
        hit()
    else:
        with hitting_in_a_read(hit):
            counting.checkpoint.save(str(tmp_path / "hit"))
    return made


@contextlib.contextmanager
def hitting_in_a_read(hit):
    """Does something after the first of the reads of a save."""
    read, left = Served.read, [hit]

    def reading(self, variable):
        value = read(self, variable)
        if left:
            left.pop()()
        return value

    Served.read = reading
    try:
        yield
    finally:
        Served.read = read


@pytest.mark.sampled(5)
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("name", SIGNALS)
def test_a_worker(own_cluster, tmp_path, name, moment):
    number = getattr(signal, name)
    counting = begun(own_cluster)
    strategy = counting.strategy
    start = time.monotonic()
    hit = lambda: own_cluster.kill("worker", 0, number)  # noqa: E731
    made = scheduled_around(hit, moment, counting, own_cluster, tmp_path)
    counting.coordinator.join()
    assert time.monotonic() - start < (20 if number == signal.SIGSTOP else 15)
    assert counting.coordinator.fetch(made) == [1.0] * 200
    counting.assert_counts(220)
    if moment == "in a save":
        counting.checkpoint.restore(str(tmp_path / "hit-1"))
        counting.assert_counts(220)
    if number == signal.SIGSTOP:
        own_cluster.kill("worker", 0, signal.SIGCONT)
        time.sleep(1.0)
        counting.assert_counts(220)  # What it pushes late is refused.
    else:
        own_cluster.start("worker", 0)
    worker = strategy.cluster.workers[0]
    end = time.monotonic() + 60
    while not worker.is_ready and time.monotonic() < end:
        time.sleep(0.05)
    before = worker.steps
    counting.scheduled(200)
    counting.coordinator.join()
    counting.assert_counts(420)
    assert worker.steps > before
    strategy.close()


@pytest.mark.sampled(5)
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("name", SIGNALS)
def test_a_server(own_cluster, tmp_path, name, moment):
    """Each call says so from then on; the last checkpoint has what it had."""
    number = getattr(signal, name)
    counting = begun(own_cluster)
    strategy = counting.strategy
    counting.checkpoint.save(str(tmp_path / "before"))
    hit = lambda: own_cluster.kill("ps", 0, number)  # noqa: E731
    start = time.monotonic()
    gone = pytest.raises(
        kd.errors.UnavailableError, match=r"parameter server ps:0 \(127(.|\n)*again"
    )
    with gone:
        scheduled_around(hit, moment, counting, own_cluster, tmp_path)
        counting.coordinator.join()
        # A save may have read all that the server has, before.
        counting.assert_counts(220)
    for method in (
        lambda: counting.scheduled(1),
        counting.coordinator.join,
        counting.coordinator.done,
        lambda: [counting.v.numpy(), counting.n.numpy()],
        lambda: counting.checkpoint.save(str(tmp_path / "after")),
    ):
        with gone:
            method()
    assert time.monotonic() - start < (22 if number == signal.SIGSTOP else 15)
    strategy.close()
    own_cluster.start("ps", 0)
    strategy = kd.ParameterServerStrategy(own_cluster.cluster_resolver)
    counting = Counting(strategy)
    counting.checkpoint.restore(str(tmp_path / "before-1"))
    counting.scheduled(20)
    counting.coordinator.join()
    counting.assert_counts(40)
    strategy.close()


def test_a_server_that_was_frozen_for_a_while(own_cluster):
    """It has all its values."""
    counting = begun(own_cluster)
    strategy = counting.strategy
    own_cluster.kill("ps", 0, signal.SIGSTOP)
    made = counting.scheduled(20)
    time.sleep(5.5)  # The connections are given up after 5.
    own_cluster.kill("ps", 0, signal.SIGCONT)
    counting.coordinator.join()
    assert counting.coordinator.fetch(made) == [1.0] * 20
    counting.assert_counts(40)
    strategy.close()


COORDINATOR = """
    import os, signal, sys, time
    import keras_distribute as kd
    from tests.parameter_server import test_kill_matrix as here
    from keras_distribute.servers.local import LocalResolver
    from keras_distribute.remote.credentials import Credentials

    jobs, token, moment, folder = eval(sys.argv[1])
    resolver = LocalResolver(kd.cluster_resolver.ClusterSpec(jobs), Credentials(token))
    counting = here.Counting(kd.ParameterServerStrategy(resolver))
    manager = kd.CheckpointManager(counting.checkpoint, folder, max_to_keep=2)
    manager.restore_or_initialize()
    first = int(counting.n.numpy())
    counting.scheduled(20)
    counting.coordinator.join()
    counting.assert_counts(first + 20)
    manager.save()
    manager.wait()
    if moment == "in a save":
        with here.hitting_in_a_read(lambda: [print("now", flush=True), time.sleep(7)]):
            manager.save()
    else:
        made = counting.scheduled(0 if moment == "idle" else 400)
        print("now", flush=True)
        if moment == "idle":
            time.sleep(7)
    counting.coordinator.join()
    count = first + (420 if moment == "in a step" else 20)
    counting.assert_counts(count)
    print("counted", count, flush=True)
    counting.strategy.close()
"""


@pytest.mark.sampled(12)
@pytest.mark.parametrize("moment", ["idle", "in a step", "in a save"])
@pytest.mark.parametrize("name", SIGNALS)
def test_the_coordinator(own_cluster, tmp_path, name, moment):
    """The next one takes the workers and servers, and goes on from its checkpoint; one
    that was frozen goes on by itself.
    """
    script = tmp_path / "coordinator.py"
    script.write_text(textwrap.dedent(COORDINATOR))
    resolver = own_cluster.cluster_resolver
    told = (
        resolver.cluster_spec().as_dict(),
        own_cluster._token,
        moment,
        str(tmp_path / "saved"),
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, str(script), repr(told)]
    options = {"stdout": subprocess.PIPE, "text": True, "env": environment}

    def run(hit):
        with subprocess.Popen(command, **options) as process:
            kill = threading.Timer(100, process.kill)
            kill.start()
            line = process.stdout.readline()
            assert line == "now\n"
            hit(process)
            rest = process.stdout.read()
            kill.cancel()
        return process.returncode, rest

    def freeze(process):
        process.send_signal(signal.SIGSTOP)
        time.sleep(6.5)
        process.send_signal(signal.SIGCONT)

    number = getattr(signal, name)
    if number == signal.SIGSTOP:
        code, rest = run(freeze)
        assert (code, rest) == (0, f"counted {420 if moment == 'in a step' else 20}\n")
        return
    code, rest = run(lambda process: process.send_signal(number))
    assert (code, rest) == (-number, "")
    told = (*told[:2], "idle", told[3])
    command[-1] = repr(told)
    code, rest = run(lambda process: None)
    assert (code, rest) == (0, "counted 40\n")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("turn", range(20 if EVERY_CASE else 1))
def test_workers_are_killed_again_and_again_at_random(own_cluster, turn):
    strategy = kd.ParameterServerStrategy(own_cluster.cluster_resolver)
    counting = Counting(strategy)
    draw = random.Random(turn)

    def slow():
        while True:
            time.sleep(0.1 if EVERY_CASE else 0.05)
            yield np.ones(1000, "float32")

    dataset = counting.coordinator.create_per_worker_dataset(slow)
    iterator = iter(dataset)
    made = [
        counting.coordinator.schedule(counting.add_next, (iterator,))
        for _ in range(200)
    ]
    for _ in range(10 if EVERY_CASE else 4):
        time.sleep(draw.uniform(0.0, 0.5))
        index = draw.randrange(2)
        own_cluster.kill("worker", index)
        own_cluster.start("worker", index)
    counting.coordinator.join()
    assert counting.coordinator.fetch(made) == [1.0] * 200
    counting.assert_counts(200)
    strategy.close()
