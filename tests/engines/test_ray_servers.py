"""Parameter servers on a real Ray: its actors host the tasks, and it starts workers
again.
"""

import os
import signal
import time

import keras
import numpy as np
import psutil
import pytest

import keras_distribute as kd
from keras_distribute.coordinator import ClusterCoordinator
from keras_distribute.remote.channel import Channel
from keras_distribute.remote.credentials import Credentials
from keras_distribute.servers.local import LocalResolver

ray = pytest.importorskip(
    "ray", reason="needs Ray: pip install 'keras-distribute[ray]'"
)
pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("local_ray")]
CR = kd.cluster_resolver


@pytest.fixture(scope="module")
def resolver(local_ray):
    """Two workers and two parameter servers."""
    with CR.RayClusterResolver(2, 2, resources_per_ps={"tables": 1}) as resolver:
        yield resolver


def process_of(resolver, job, index):
    """The number of the process that hosts a task."""
    actor = resolver._actors[job, index]
    return ray.get(actor.__ray_call__.remote(lambda task: os.getpid()))


def end_of(processes, seconds=30):
    """Those that have not ended after some seconds."""
    _, alive = psutil.wait_procs([p for p in processes if p.is_running()], seconds)
    return [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]


def wait(condition, seconds=120):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    assert condition()


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
    np.testing.assert_array_equal(v.numpy(), np.full(1000, count))
    assert n.numpy() == count


def a_model():
    keras.utils.set_random_seed(1)
    layers = [keras.Input((8,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


X = np.random.default_rng(0).normal(size=(240, 8)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


def trained(model, callbacks=()):
    options = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}
    history = model.fit(X, Y, callbacks=list(callbacks), **options).history
    return history["loss"], model.get_weights()


def test_each_task_has_a_process_and_the_resources_that_were_asked_for(resolver):
    spec = resolver.cluster_spec()
    assert sorted(spec.jobs) == ["ps", "worker"]
    addresses = spec.job_tasks("worker") + spec.job_tasks("ps")
    host = ray.util.get_node_ip_address()
    assert len(set(addresses)) == 4
    assert all(address.startswith(f"{host}:") for address in addresses)
    processes = {process_of(resolver, *task) for task in resolver._actors}
    assert len(processes) == 4
    wait(lambda: ray.available_resources()["tables"] == 2.0)
    assert ray.available_resources()["CPU"] == 6.0


def test_fit_by_one_worker_has_the_numbers_of_one_device(resolver):
    tasks = resolver.cluster_spec().as_dict() | {"worker": [None]}
    tasks["worker"] = resolver.cluster_spec().job_tasks("worker")[:1]
    one_worker = LocalResolver(CR.ClusterSpec(tasks), resolver.credentials)
    strategy = kd.ParameterServerStrategy(one_worker)
    with strategy.scope():
        model = a_model()
    losses, weights = trained(model)
    strategy.close()
    expected, expected_weights = trained(a_model())
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    for value, right in zip(weights, expected_weights, strict=True):
        np.testing.assert_allclose(value, right, rtol=1e-4, atol=1e-6)


def test_functions_run_on_the_actors(resolver):
    strategy = kd.ParameterServerStrategy(resolver)
    coordinator = ClusterCoordinator(strategy)
    v, n, add = counting(strategy)
    values = [coordinator.schedule(add, (np.ones(1000, "float32"),)) for _ in range(50)]
    assert coordinator.fetch(values) == [1.0] * 50
    coordinator.join()
    assert_counts(v, n, 50)
    strategy.close()


def test_a_worker_that_is_killed_comes_back_elsewhere_and_each_step_counts_once(
    resolver,
):
    strategy = kd.ParameterServerStrategy(resolver)
    coordinator = ClusterCoordinator(strategy)
    v, n, add = counting(strategy)
    x = np.ones(1000, "float32")
    for _ in range(20):
        coordinator.schedule(add, (x,))
    coordinator.join()
    before = resolver.cluster_spec().task_address("worker", 0)
    process = process_of(resolver, "worker", 0)
    values = [coordinator.schedule(add, (x,)) for _ in range(400)]
    time.sleep(0.05)
    os.kill(process, signal.SIGKILL)
    start = time.monotonic()
    coordinator.join()
    assert time.monotonic() - start < 10
    assert coordinator.fetch(values) == [1.0] * 400
    assert_counts(v, n, 420)
    worker = strategy.cluster.workers[0]
    wait(lambda: worker.is_ready)
    assert resolver.cluster_spec().task_address("worker", 0) != before
    steps = worker.steps
    for _ in range(200):
        coordinator.schedule(add, (x,))
    coordinator.join()
    assert_counts(v, n, 620)
    assert worker.steps > steps
    strategy.close()


def test_fit_goes_on_where_a_worker_is_killed(resolver):
    strategy = kd.ParameterServerStrategy(resolver)
    with strategy.scope():
        model = a_model()
    process = process_of(resolver, "worker", 1)

    class Kill(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                os.kill(process, signal.SIGKILL)

    losses, _ = trained(model, [Kill()])
    assert int(model.optimizer.iterations) == 60
    assert sum(strategy.steps_of_workers.values()) == 60
    assert losses[1] < losses[0]
    strategy.close()


def test_who_does_not_have_the_token_is_refused(resolver):
    address = resolver.cluster_spec().task_address("ps", 0)
    with pytest.raises(kd.errors.UnavailableError, match="refuses the token"):
        Channel(address, "ps:0", Credentials("another" * 8), timeout=20.0)


def test_a_server_that_is_killed_is_named_and_its_actor_stays_dead(monkeypatch):
    monkeypatch.setenv("KERAS_DISTRIBUTE_JOB_TOKEN", "of the driver" * 4)
    monkeypatch.setenv("KERAS_DISTRIBUTE_ENCRYPT", "1")
    with CR.RayClusterResolver(1, 1) as resolver:
        strategy = kd.ParameterServerStrategy(resolver)
        address = resolver.cluster_spec().task_address("ps", 0)
        Channel(address, "ps:0", Credentials("of the driver" * 4, True), 20.0).close()
        coordinator = ClusterCoordinator(strategy)
        v, n, add = counting(strategy)
        coordinator.schedule(add, (np.ones(1000, "float32"),))
        coordinator.join()
        os.kill(process_of(resolver, "ps", 0), signal.SIGKILL)
        start = time.monotonic()
        with pytest.raises(
            kd.errors.UnavailableError, match=f"(?s)parameter server ps:0.*{address}"
        ):
            for _ in range(1000):
                coordinator.schedule(add, (np.ones(1000, "float32"),))
            coordinator.join()
        assert time.monotonic() - start < 10
        strategy.reconnect(120)
        v.assign(np.zeros(1000))
        n.assign(5.0)
        for _ in range(20):
            coordinator.schedule(add, (np.ones(1000, "float32"),))
        coordinator.join()
        assert (v.numpy().tolist(), n.numpy()) == ([20.0] * 1000, 25.0)
        assert resolver.cluster_spec().task_address("ps", 0) != address
        strategy.close()
    with pytest.raises(kd.errors.ClusterError, match="The tasks have ended"):
        resolver.cluster_spec()


def test_a_server_that_is_not_started_again(local_ray):
    with CR.RayClusterResolver(1, 1, max_restarts=0) as resolver:
        resolver.cluster_spec()
        os.kill(process_of(resolver, "ps", 0), signal.SIGKILL)
        actor = resolver._actors["ps", 0]
        with pytest.raises(ray.exceptions.RayActorError):
            ray.get(actor.address.remote())
        with pytest.raises(
            kd.errors.ClusterError, match="ps:0 have ended; what they had is lost"
        ):
            kd.ParameterServerStrategy(resolver)


def test_the_actors_end_with_the_goodbye_of_the_coordinator(local_ray):
    resolver = CR.RayClusterResolver(1, 1)
    strategy = kd.ParameterServerStrategy(resolver)
    tasks = list(resolver._actors)
    processes = [psutil.Process(process_of(resolver, *task)) for task in tasks]
    strategy.close(end_tasks=True)
    assert end_of(processes) == []
    time.sleep(1.0)
    with pytest.raises(ray.exceptions.RayActorError):
        process_of(resolver, "worker", 0)  # Ray has not started it again.
    resolver.close()


def test_resources_that_no_node_has_are_an_error_that_names_the_tasks(local_ray):
    missing = {"CPU": 1, "moons": 2}
    resolver = CR.RayClusterResolver(1, 1, resources_per_ps=missing, timeout_seconds=5)
    with pytest.raises(
        kd.errors.ClusterError,
        match=r"(?s)ps:0 did not start on Ray within 5 s.*'moons': 2.*'tables': .*"
        "resources_per_ps",
    ):
        kd.ParameterServerStrategy(resolver)
    with pytest.raises(kd.errors.ClusterError, match="The tasks have ended"):
        resolver.cluster_spec()


def is_of_ray(process):
    try:
        return "ray" in " ".join(process.cmdline())
    except psutil.Error:  # It has ended meanwhile.
        return False


def test_nothing_is_left_after_the_end_of_ray(resolver):
    strategy = kd.ParameterServerStrategy(resolver)
    children = psutil.Process().children(recursive=True)
    named = [p for p in children if is_of_ray(p)]
    assert len(named) > 5
    ray.shutdown()
    assert end_of(named) == []
    time.sleep(3.0)  # The coordinator looks for its workers, which starts no other Ray.
    assert not ray.is_initialized()
    strategy.close()
    resolver.close()
    assert not ray.is_initialized()
