"""A Ray of this machine for the tests of a file, which is a cluster of one node."""

import os
import pathlib
from collections.abc import Iterator

import pytest

TESTS = str(pathlib.Path(__file__).parents[1])  # Of which actors import modules.


@pytest.fixture(scope="module")
def local_ray(light_processes) -> Iterator[None]:
    """Starts it, with eight CPUs that are not there, and a resource of its own."""
    import ray

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", TESTS, prepend=os.pathsep)
        patch.setenv("TESTS_WITHOUT", "sklearn matplotlib tensorflow")
        ray.init(address="local", num_cpus=8, resources={"tables": 4})
        yield
        ray.shutdown()
