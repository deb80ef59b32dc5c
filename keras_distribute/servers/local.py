"""Workers and parameter servers as processes of this host, for as long as this process
lives.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from keras_distribute import checks
from keras_distribute.cluster import signing
from keras_distribute.cluster.resolvers.base import SimpleClusterResolver
from keras_distribute.cluster.resolvers.cluster_spec import ClusterSpec
from keras_distribute.launch import roles
from keras_distribute.launch.job import Job
from keras_distribute.remote import credentials
from keras_distribute.remote.credentials import Credentials


class LocalResolver(SimpleClusterResolver):
    """Where the tasks of this process are, and what proves that they are.

    Args:
        cluster_spec: Their addresses.
        credentials: Of them.
    """

    def __init__(self, cluster_spec: ClusterSpec, credentials: Credentials) -> None:
        super().__init__(cluster_spec, task_type="chief", task_id=0, rpc_layer="grpc")
        self.credentials = credentials


class ParameterServerCluster:
    """Workers and parameter servers on this host, each a process with CPU devices.

    They end with this process, or with `close`; one that is killed can be started
    again. Also a context manager.

    Args:
        num_workers: How many workers.
        num_ps: How many parameter servers.
        encrypted: Whether all that they say is encrypted.
        devices_per_worker: How many virtual devices each worker has, which divide the
            rows of its batches.

    Attributes:
        cluster_resolver: What `kd.ParameterServerStrategy` takes.

    Example:
        >>> import keras_distribute as kd
        >>> cluster = kd.testing.ParameterServerCluster(num_workers=2, num_ps=1)
        >>> strategy = kd.ParameterServerStrategy(cluster.cluster_resolver)
        >>> strategy.close()
        >>> cluster.close()
    """

    def __init__(
        self,
        num_workers: int = 2,
        num_ps: int = 1,
        *,
        encrypted: bool = False,
        devices_per_worker: int = 1,
    ) -> None:
        checks.count("num_workers", num_workers, 1)
        checks.count("num_ps", num_ps, 1)
        checks.flag("encrypted", encrypted)
        checks.count("devices_per_worker", devices_per_worker, 1)
        self._devices = {"worker": devices_per_worker, "ps": 1}
        self._jobs = roles.addresses(num_workers, num_ps)
        self._token = signing.new_token()
        self._encrypted = encrypted
        self.cluster_resolver = LocalResolver(
            ClusterSpec(self._jobs), Credentials(self._token, encrypted)
        )
        self._tasks: dict[str, Job] = {}
        for job, addresses in self._jobs.items():
            for index in range(len(addresses)):
                self.start(job, index)

    def start(self, job: str, index: int) -> None:
        """Starts a task, or starts it again.

        Args:
            job: `"worker"` or `"ps"`.
            index: Its number.
        """
        name = f"{job}:{index}"
        if name in self._tasks:
            self._tasks[name].stop(grace=0)
        environment = {
            **roles.environment_of(self._jobs, job, index, self._token),
            credentials.ENCRYPT: str(int(self._encrypted)),
            "KERAS_BACKEND": "jax",
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": _flags_but_for_devices(),
            "JAX_NUM_CPU_DEVICES": str(self._devices[job]),
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }
        task = Job(roles.SERVER, 1, environment=lambda _: environment)
        task.start()
        self._tasks[name] = task

    def kill(self, job: str, index: int, number: int = signal.SIGKILL) -> None:
        """Sends a signal to a task, by default one that ends it at once.

        Args:
            job: `"worker"` or `"ps"`.
            index: Its number.
            number: Of the signal.
        """
        task = self._tasks[f"{job}:{index}"]
        task.send(number)
        if number == signal.SIGKILL:
            task.wait(until_failure=False)

    def output_of(self, job: str, index: int) -> str:
        """The last lines that a task has written."""
        return "".join(self._tasks[f"{job}:{index}"].workers[0].lines)

    def close(self) -> None:
        """Ends all."""
        for task in self._tasks.values():
            task.send(signal.SIGKILL)
        for task in self._tasks.values():
            task.stop(grace=0)
        self._tasks.clear()

    def __enter__(self) -> ParameterServerCluster:
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self.close()


def _flags_but_for_devices() -> str:
    """This process's flags of XLA, by which the tasks compute the same bits."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    return " ".join(flag for flag in flags if "device_count" not in flag)
