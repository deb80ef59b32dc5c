"""Clusters whose environment gives numbers, such as `KERAS_DISTRIBUTION_*`."""

from __future__ import annotations

import os

from keras_distribute.cluster.resolvers import environment
from keras_distribute.cluster.resolvers.base import ClusterResolver, check_task
from keras_distribute.cluster.resolvers.cluster_spec import ClusterSpec
from keras_distribute.cluster.resolvers.topology import Topology
from keras_distribute.errors import ClusterError

_KERAS = "KERAS_DISTRIBUTION_"
_COMMAND = "python -m keras_distribute.launch --nproc 2 script.py"


class NumberedResolver(ClusterResolver):
    """All processes are workers, and at least the first one's address is known."""

    def __init__(
        self, process_id: int, addresses: list[str], num_processes: int
    ) -> None:
        self._set_task("worker", process_id, None)
        self._addresses, self._num_processes = addresses, num_processes

    def cluster_spec(self) -> ClusterSpec:
        """The workers whose addresses are known."""
        return ClusterSpec({"worker": dict(enumerate(self._addresses))})

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """The address of a task; that of the first where the task's is not known."""
        check_task(task_type, task_id, rpc_layer)
        known = task_id is not None and 0 <= task_id < len(self._addresses)
        return super().master(task_type, task_id if known else 0, rpc_layer)

    def topology(self) -> Topology:
        coordinator = self._addresses[0] if self._num_processes > 1 else None
        return Topology(self._task_id or 0, self._num_processes, coordinator)


class KerasClusterResolver(NumberedResolver):
    """Reads the cluster from `KERAS_DISTRIBUTION_JOB_ADDRESSES`, `_NUM_PROCESSES` and
    `_PROCESS_ID`.

    The first holds the addresses of all processes, separated by commas, or that of the
    first process alone. `python -m keras_distribute.launch` sets them. Source:
    `keras.distribution.initialize`.

    Raises:
        ClusterError: Where a variable is missing, or the numbers contradict each other.

    Example:
        >>> import os, keras_distribute as kd
        >>> os.environ |= {"KERAS_DISTRIBUTION_JOB_ADDRESSES": "10.0.0.1:1234",
        ...                "KERAS_DISTRIBUTION_NUM_PROCESSES": "4",
        ...                "KERAS_DISTRIBUTION_PROCESS_ID": "3"}
        >>> kd.cluster_resolver.KerasClusterResolver().topology()
        Topology(process_id=3, num_processes=4, coordinator='10.0.0.1:1234')
        >>> for name in ("JOB_ADDRESSES", "NUM_PROCESSES", "PROCESS_ID"):
        ...     del os.environ["KERAS_DISTRIBUTION_" + name]
    """

    def __init__(self) -> None:
        listed = os.environ.get(f"{_KERAS}JOB_ADDRESSES", "").split(",")
        addresses = [address.strip() for address in listed if address.strip()]
        if not addresses:
            raise _missing(f"{_KERAS}JOB_ADDRESSES", _COMMAND)
        count = f"{_KERAS}NUM_PROCESSES"
        num_processes = number(count) if count in os.environ else len(addresses)
        if len(addresses) not in (1, num_processes):
            raise ClusterError(
                f"{len(addresses)} addresses do not fit {num_processes} processes.",
                received=f"{_KERAS}JOB_ADDRESSES={','.join(addresses)}.",
                fix="the address of every process, or that of the first one alone.",
            )
        super().__init__(number(f"{_KERAS}PROCESS_ID"), addresses, num_processes)


def number(name: str, command: str = _COMMAND) -> int:
    """The number in an environment variable that `command` would set."""
    if name not in os.environ:
        raise _missing(name, command)
    return environment.number(name)


def _missing(name: str, command: str) -> ClusterError:
    return ClusterError(
        f"{name} is not in the environment.",
        received="a process that was not started as one of several.",
        fix=command,
    )
