"""The resolvers of Ray without Ray: a module in its place says what Ray would."""

import os
import sys
import threading
import types

import pytest

import keras_distribute as kd
from keras_distribute.cluster import signing
from keras_distribute.remote.credentials import Credentials

CR = kd.cluster_resolver
ERRORS = kd.errors


class RayError(Exception):
    """What Ray raises."""


class ActorDiedError(RayError):
    """What it raises of an actor that it does not start again."""


class Actor:
    """An actor that answers at once, or never, or has failed."""

    def __init__(self, address):
        self.said = address
        self.address = types.SimpleNamespace(remote=lambda: (self, self.said))


class Ray(types.ModuleType):
    """What of Ray the resolver uses; `started` has what each actor was made with."""

    def __init__(self, addresses):
        super().__init__("ray")
        self.addresses, self.started, self.killed = list(addresses), [], []
        self.runs, self.waited = True, []
        self.exceptions = types.SimpleNamespace(
            RayError=RayError, ActorDiedError=ActorDiedError
        )

    def is_initialized(self):
        return self.runs

    def remote(self, cls):
        def options(**given):
            return types.SimpleNamespace(remote=lambda *args: self.actor(given, *args))

        return types.SimpleNamespace(options=options)

    def actor(self, options, *args):
        self.started.append((options, args))
        return Actor(self.addresses[len(self.started) - 1])

    def wait(self, asked, num_returns, timeout):
        self.waited.append(timeout)
        return [each for each in asked if each[1] is not None], []

    def get(self, asked):
        if isinstance(asked[1], Exception):
            raise asked[1]
        return asked[1]

    def kill(self, actor):
        self.killed.append(actor)

    def available_resources(self):
        return {"CPU": 1.0, "node:10.0.0.1": 1.0}


@pytest.fixture
def ray(monkeypatch):
    for name in (signing.TOKEN, signing.TOKEN_FILE, "KERAS_DISTRIBUTE_ENCRYPT"):
        monkeypatch.delenv(name, raising=False)

    def put(*addresses):
        fake = Ray(addresses)
        monkeypatch.setitem(sys.modules, "ray", fake)
        return fake

    return put


@pytest.fixture
def no_ray(monkeypatch):
    """A Python without Ray."""
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setitem(sys.modules, "ray.train", None)


def test_the_tasks_start_when_they_are_asked_for(ray):
    fake = ray("a:1", "a:2", "b:1")
    resolver = CR.RayClusterResolver(
        2,
        1,
        resources_per_worker={"CPU": 2, "GPU": 1},
        resources_per_ps={"memory": 10**9, "tables": 0.5},
        max_restarts=3,
        timeout_seconds=7,
    )
    assert fake.started == []
    assert resolver.cluster_spec().as_dict() == {
        "worker": ["a:1", "a:2"],
        "ps": ["b:1"],
    }
    token = fake.started[0][1][2]
    assert len(token) == 64
    variables = {"KERAS_BACKEND": "jax"}
    worker = {
        "num_cpus": 2,
        "num_gpus": 1,
        "resources": {},
        "max_restarts": 3,
        "runtime_env": {"env_vars": variables},
    }
    server = {
        "num_cpus": 0,
        "memory": 10**9,
        "resources": {"tables": 0.5},
        "max_restarts": 3,
        "runtime_env": {"env_vars": {**variables, "JAX_PLATFORMS": "cpu"}},
    }
    assert fake.started == [
        (worker, ("worker", 0, token, False)),
        (worker, ("worker", 1, token, False)),
        (server, ("ps", 0, token, False)),
    ]
    resolver.cluster_spec()
    assert len(fake.started) == 3
    assert fake.waited == [7.0, 2.0]
    assert (resolver.task_type, resolver.master()) == (None, "")
    proof = Credentials(token).proof("a", "b")
    assert resolver.credentials.accepts("a", "b", proof)


def test_a_task_is_where_it_was_started_last(ray):
    fake = ray("a:1", "a:2", "b:1")
    resolver = CR.RayClusterResolver(2, 1)
    resolver.cluster_spec()
    first, second, server = resolver._actors.values()
    first.said, second.said = "c:9", ActorDiedError("it has died for good")
    assert resolver.cluster_spec().as_dict() == {
        "worker": ["c:9", "a:2"],
        "ps": ["b:1"],
    }
    second.said = None
    assert resolver.cluster_spec().as_dict() == {
        "worker": ["c:9", "a:2"],
        "ps": ["b:1"],
    }
    server.said = ActorDiedError("it has died")
    with pytest.raises(
        ERRORS.ClusterError, match=r"(?s)server\(s\) ps:0 have ended.*it has died"
    ):
        resolver.cluster_spec()
    fake.runs, first.said = False, "d:1"  # Asked now, Ray would start anew.
    assert resolver.cluster_spec().as_dict() == {
        "worker": ["c:9", "a:2"],
        "ps": ["b:1"],
    }


def test_the_token_and_encryption_are_those_of_the_driver(ray, monkeypatch):
    monkeypatch.setenv(signing.TOKEN, "of the driver" * 4)
    monkeypatch.setenv("KERAS_DISTRIBUTE_ENCRYPT", "1")
    fake = ray("a:1", "b:1")
    CR.RayClusterResolver(1, 1).cluster_spec()
    assert {args[2:] for _, args in fake.started} == {("of the driver" * 4, True)}


def test_tasks_that_do_not_start_in_time(ray):
    fake = ray("a:1", None, None)
    resolver = CR.RayClusterResolver(2, 1, resources_per_ps={"moons": 2})
    with pytest.raises(
        ERRORS.ClusterError,
        match=r"(?s)worker:1, ps:0 did not start on Ray within 120 s.*"
        r"\{'worker': \{'CPU': 1\}, 'ps': \{'moons': 2\}\} for each task, while "
        r"\{'CPU': 1.0\} is free.*resources_per_worker and resources_per_ps",
    ):
        resolver.cluster_spec()
    assert len(fake.killed) == 3
    with pytest.raises(ERRORS.ClusterError, match="(?s)The tasks have ended.*another"):
        resolver.cluster_spec()


def test_tasks_that_fail_when_they_start(ray):
    ray("a:1", ActorDiedError("No module named 'zmq'"))
    with pytest.raises(
        ERRORS.ClusterError,
        match=r"(?s)ps:0 did not start on Ray.*No module named 'zmq' from ps:0.*"
        r"keras-distribute\[ray\]' on each node",
    ):
        CR.RayClusterResolver(1, 1).cluster_spec()


def test_close_ends_the_actors_once(ray):
    fake = ray("a:1", "b:1")
    with CR.RayClusterResolver(1, 1) as resolver:
        resolver.cluster_spec()
    resolver.close()
    assert len(fake.killed) == 2
    fake = ray("a:1", "b:1")
    resolver = CR.RayClusterResolver(1, 1)
    resolver.cluster_spec()
    fake.runs = False
    resolver.close()
    assert fake.killed == []


def test_without_ray_the_error_says_what_to_install(no_ray):
    resolver = CR.RayClusterResolver()
    with pytest.raises(
        ERRORS.BackendError, match=r"(?s)needs Ray.*keras-distribute\[ray\]"
    ):
        kd.ParameterServerStrategy(resolver)
    with pytest.raises(
        ERRORS.BackendError, match=r"(?s)needs Ray Train.*keras-distribute\[ray\]"
    ):
        CR.RayTrainClusterResolver()


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        ({"num_workers": 0}, ERRORS.ValueStructureError, "num_workers is an integer"),
        ({"num_ps": 1.5}, ERRORS.StructureTypeError, "num_ps is an integer"),
        ({"max_restarts": -2}, ERRORS.ValueStructureError, "at least -1"),
        ({"timeout_seconds": 0}, ERRORS.ValueStructureError, "timeout_seconds"),
        (
            {"resources_per_ps": ["CPU"]},
            ERRORS.StructureTypeError,
            'resources_per_ps has an amount.*resources_per_ps={"CPU": 1}',
        ),
        ({"resources_per_ps": {1: 1}}, ERRORS.StructureTypeError, "has an amount"),
        (
            {"resources_per_worker": {"CPU": -1}},
            ERRORS.ValueStructureError,
            "resources_per_worker has an amount",
        ),
    ],
)
def test_arguments_that_make_no_sense(arguments, kind, text):
    with pytest.raises(kind, match=f"(?s){text}"):
        CR.RayClusterResolver(**arguments)


def test_these_tasks_do_not_train_in_step():
    with pytest.raises(
        ERRORS.ClusterError,
        match=r"(?s)RayClusterResolver\(2 worker\(s\), 1 server\(s\)\).*JaxTrainer",
    ):
        kd.MultiWorkerMirroredStrategy(CR.RayClusterResolver())


class Train:
    """Ray Train in each of `size` workers, which are threads here."""

    def __init__(self, monkeypatch, size):
        self.here = threading.local()
        barrier, said = threading.Barrier(size), []

        def broadcast(data):
            if data is not None:
                said.append(data)
            barrier.wait()
            return said[0]

        def context():
            if not hasattr(self.here, "rank"):
                raise RuntimeError("`get_context` cannot be used outside.")
            return types.SimpleNamespace(
                get_world_rank=lambda: self.here.rank, get_world_size=lambda: size
            )

        host = types.SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")
        for name, parts in (
            ("ray", {"util": host}),
            ("ray.train", {"get_context": context}),
            ("ray.train.collective", {"broadcast_from_rank_zero": broadcast}),
        ):
            module = types.ModuleType(name)
            vars(module).update(parts)
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.delenv("TF_CONFIG", raising=False)
        monkeypatch.setenv(signing.TOKEN, "")
        monkeypatch.setenv("SLURM_PROCID", "0")  # Of the step that started Ray.
        monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "8")
        self.size = size

    def topologies(self):
        found = [None] * self.size

        def worker(rank):
            self.here.rank = rank
            found[rank] = CR.automatic_resolver().topology()

        threads = [threading.Thread(target=worker, args=(i,)) for i in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found


def test_the_workers_of_ray_train_find_each_other(monkeypatch):
    found = Train(monkeypatch, 3).topologies()
    address = found[0].coordinator
    assert address.startswith("127.0.0.1:")
    assert found == [CR.Topology(i, 3, address) for i in range(3)]
    assert len(os.environ[signing.TOKEN]) == 64


def test_a_single_worker_of_ray_train_is_on_its_own(monkeypatch):
    assert Train(monkeypatch, 1).topologies() == [CR.Topology()]
    assert os.environ[signing.TOKEN] == ""


def test_a_token_of_the_workers_own_stays(monkeypatch):
    train = Train(monkeypatch, 2)
    monkeypatch.setenv(signing.TOKEN, "of the user's" * 4)
    train.topologies()
    assert os.environ[signing.TOKEN] == "of the user's" * 4


def test_outside_of_ray_train(monkeypatch):
    Train(monkeypatch, 2)
    monkeypatch.delenv("SLURM_STEP_NUM_TASKS")
    assert CR.automatic_resolver().topology() == CR.Topology()
    with pytest.raises(
        ERRORS.ClusterError, match="(?s)no worker of Ray Train.*JaxTrainer"
    ):
        CR.RayTrainClusterResolver()


def test_the_former_ray_train_is_left_alone(monkeypatch):
    train = Train(monkeypatch, 2)
    train.here.rank = 1
    monkeypatch.setitem(sys.modules, "ray.train.collective", None)
    monkeypatch.delenv("SLURM_STEP_NUM_TASKS")
    assert CR.automatic_resolver().topology() == CR.Topology()
    with pytest.raises(
        ERRORS.BackendError, match="(?s)Ray Train, version 2.*RAY_TRAIN_V2_ENABLED=0"
    ):
        CR.RayTrainClusterResolver()
