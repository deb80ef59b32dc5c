"""One cluster for all tests of a process: starting its tasks takes seconds, and each
strategy begins with empty servers.
"""

import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import keras_distribute as kd
from keras_distribute.servers.local import LocalResolver


@pytest.fixture(scope="package")
def cluster() -> Iterator[kd.testing.ParameterServerCluster]:
    """Two workers and two parameter servers."""
    with kd.testing.ParameterServerCluster(num_workers=2, num_ps=2) as cluster:
        yield cluster


@pytest.fixture
def strategy(cluster) -> Iterator[kd.ParameterServerStrategy]:
    """A strategy on the cluster."""
    strategy = kd.ParameterServerStrategy(cluster.cluster_resolver)
    yield strategy
    strategy.close()


@pytest.fixture
def one_worker(cluster) -> Iterator[kd.ParameterServerStrategy]:
    """A strategy that uses one of the workers, and both servers."""
    strategy = kd.ParameterServerStrategy(resolver_of(cluster, num_workers=1))
    yield strategy
    strategy.close()


@pytest.fixture
def make(cluster) -> Iterator[Callable[..., kd.ParameterServerStrategy]]:
    """From the number of workers and options to a strategy."""
    made: list[kd.ParameterServerStrategy] = []

    def strategy(num_workers: int = 2, **options: Any) -> kd.ParameterServerStrategy:
        resolver = resolver_of(cluster, num_workers)
        made.append(kd.ParameterServerStrategy(resolver, **options))
        return made[-1]

    yield strategy
    for each in made:
        each.close()


@pytest.fixture
def own_cluster(cluster):
    """The cluster, whose tasks a test may end: they are started again."""
    yield cluster
    for name, task in cluster._tasks.items():
        task.send(signal.SIGCONT)
        if not task.running():
            job, _, index = name.partition(":")
            cluster.start(job, int(index))


def resolver_of(cluster, num_workers, num_ps=2):
    """The cluster with fewer of its tasks."""
    jobs = cluster.cluster_resolver.cluster_spec().as_dict()
    spec = {"worker": jobs["worker"][:num_workers], "ps": jobs["ps"][:num_ps]}
    return LocalResolver(
        kd.cluster_resolver.ClusterSpec(spec), cluster.cluster_resolver.credentials
    )
