"""Clusters whose environment gives numbers: `KERAS_DISTRIBUTION_*` and Open MPI."""

from __future__ import annotations

import os
import re

from keras_distribute import checks
from keras_distribute.cluster.resolvers import environment
from keras_distribute.cluster.resolvers.base import ClusterResolver, check_task
from keras_distribute.cluster.resolvers.cluster_spec import ClusterSpec
from keras_distribute.cluster.resolvers.topology import Topology
from keras_distribute.errors import ClusterError

_KERAS = "KERAS_DISTRIBUTION_"
_MPI = "OMPI_COMM_WORLD_"
_PORTS = 4096  # The last ports, from which a job's number chooses one; as JAX does.


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
            raise _missing(f"{_KERAS}JOB_ADDRESSES")
        count = f"{_KERAS}NUM_PROCESSES"
        num_processes = _number(count) if count in os.environ else len(addresses)
        if len(addresses) not in (1, num_processes):
            raise ClusterError(
                f"{len(addresses)} addresses do not fit {num_processes} processes.",
                received=f"{_KERAS}JOB_ADDRESSES={','.join(addresses)}.",
                fix="the address of every process, or that of the first one alone.",
            )
        super().__init__(_number(f"{_KERAS}PROCESS_ID"), addresses, num_processes)


class OpenMPIClusterResolver(NumberedResolver):
    """Reads the cluster from the environment of Open MPI's `mpirun`.

    The first process is looked for on the host that `mpirun` was started on, at a port
    chosen by the number of the job: JAX's convention. Where process 0 runs on another
    host, or Open MPI does not say, name its address.

    Args:
        coordinator: The address of process 0, `host:port`.

    Raises:
        ClusterError: Outside of `mpirun`, and where the address of the first process is
            not known.

    Example:
        >>> import os, keras_distribute as kd
        >>> os.environ |= {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}
        >>> kd.cluster_resolver.OpenMPIClusterResolver("10.0.0.1:1234").topology()
        Topology(process_id=1, num_processes=2, coordinator='10.0.0.1:1234')
        >>> del os.environ["OMPI_COMM_WORLD_SIZE"], os.environ["OMPI_COMM_WORLD_RANK"]
    """

    def __init__(self, coordinator: str | None = None) -> None:
        what, fix = "The coordinator is an address.", '"10.0.0.1:1234"'
        checks.instance("coordinator", coordinator, str | None, what, fix)
        num_processes = _number(f"{_MPI}SIZE")
        if not coordinator:
            coordinator = _launcher_address() if num_processes > 1 else "localhost:0"
        super().__init__(_number(f"{_MPI}RANK"), [coordinator], num_processes)


def _launcher_address() -> str:
    uri = os.environ.get("OMPI_MCA_orte_hnp_uri", "")  # noqa: SIM112 - Open MPI's spelling.
    match = re.match(
        r"([0-9]{1,18})\.\d+;.*?(?:tcp://([^,:]+)|tcp6://\[([^,\]]+))", uri
    )
    if match is not None:
        job, host, host6 = match.groups()
        port = 65536 - _PORTS + int(job) // _PORTS % _PORTS
        return f"{host}:{port}" if host else f"[{host6}]:{port}"
    local = os.environ.get(f"{_MPI}LOCAL_SIZE") == os.environ.get(f"{_MPI}SIZE")
    if local:
        # Newer versions do not say where they were started. On one host it is here.
        job = os.environ.get("PMIX_NAMESPACE", "0")
        return f"localhost:{65536 - _PORTS + sum(map(ord, job)) % _PORTS}"
    raise ClusterError(
        "Open MPI does not say on which host process 0 runs.",
        received=f"OMPI_MCA_orte_hnp_uri={uri!r}.",
        fix='kd.cluster_resolver.OpenMPIClusterResolver("host0:1234")',
    )


def _number(name: str) -> int:
    if name not in os.environ:
        raise _missing(name)
    return environment.number(name)


def _missing(name: str) -> ClusterError:
    return ClusterError(
        f"{name} is not in the environment.",
        received="a process that was not started as one of several.",
        fix="python -m keras_distribute.launch --nproc 2 script.py",
    )
