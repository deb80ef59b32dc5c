"""Clusters of `mpirun`: Open MPI's, and that of MPICH.

Their environment gives numbers; the address of process 0 is worked out here. MPI itself
is not used.
"""

from __future__ import annotations

import os
import pathlib
import re
import socket
import zlib

from keras_distribute import checks
from keras_distribute.cluster import addresses
from keras_distribute.cluster.resolvers import environment
from keras_distribute.cluster.resolvers.launched import NumberedResolver, number
from keras_distribute.cluster.resolvers.slurm import gpus, share_of_gpus
from keras_distribute.cluster.resolvers.topology import Topology
from keras_distribute.errors import ClusterError

_OPEN_MPI = "OMPI_COMM_WORLD_"
_COMMAND = "mpirun -n 2 python script.py"
_PORTS = 4096  # The last ports, from which a job's number chooses one; as JAX does.
_HERE = "127.0.0.1"
_PROCESSES = pathlib.Path("/proc")
_MOST_PARENTS = 20


class _MPIResolver(NumberedResolver):
    """A process of `mpirun`, with its share of the GPUs of its host."""

    def __init__(
        self,
        rank: str,
        size: str,
        local: tuple[str, str],
        coordinator: str | None,
        auto_set_gpu: bool,
    ) -> None:
        what, fix = "The coordinator is an address.", '"10.0.0.1:1234"'
        checks.instance("coordinator", coordinator, str | None, what, fix)
        checks.flag("auto_set_gpu", auto_set_gpu)
        self._auto_set_gpu, self._local = auto_set_gpu, local
        num_processes, process_id = number(size, _COMMAND), number(rank, _COMMAND)
        self._is_guess = not coordinator and num_processes > 1
        if not coordinator:
            coordinator = (
                self._found(num_processes) if self._is_guess else "localhost:0"
            )
        super().__init__(process_id, [coordinator], num_processes)

    def _found(self, num_processes: int) -> str:
        """The address of process 0."""
        raise NotImplementedError

    def topology(self) -> Topology:
        """The place of this process among those that train together. Gives it its
        share of the GPUs of this host.

        Raises:
            ClusterError: In process 0, where `mpirun` was started on another host.
        """
        found = super().topology()
        if self._is_guess and found.process_id == 0 and found.coordinator:
            host, _ = addresses.parts(found.coordinator)
            if not _is_this_host(host):
                raise ClusterError(
                    "Process 0 does not run on the host that mpirun was started on.",
                    received=f"{host} as the address of mpirun, and this host is "
                    f"{socket.gethostname()}.",
                    fix=f'kd.cluster_resolver.{type(self).__name__}("host0:1234"), '
                    "with the name of this host.",
                )
        if self._auto_set_gpu and all(name in os.environ for name in self._local):
            rank, size = map(environment.number, self._local)
            self._auto_set_gpu = False  # Once: the share is not divided again.
            os.environ.update(share_of_gpus(gpus(), rank, size) if rank < size else {})
        return found


class OpenMPIClusterResolver(_MPIResolver):
    """Reads the cluster from the environment of Open MPI's `mpirun`.

    Where all processes are on one host, they find each other at 127.0.0.1; otherwise
    the first process is looked for on the host that `mpirun` was started on. The port
    is chosen by the number or the name of the job. Where process 0 runs on another
    host, or Open MPI does not say, name its address.

    Args:
        coordinator: The address of process 0, `host:port`.
        auto_set_gpu: Whether the processes of a host share the GPUs that
            `CUDA_VISIBLE_DEVICES` or `nvidia-smi` names; each takes its own when
            `topology` is called. `False` where each has its own already.

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

    def __init__(
        self, coordinator: str | None = None, auto_set_gpu: bool = True
    ) -> None:
        names = [f"{_OPEN_MPI}{name}" for name in ("LOCAL_RANK", "LOCAL_SIZE")]
        rank, size = f"{_OPEN_MPI}RANK", f"{_OPEN_MPI}SIZE"
        super().__init__(rank, size, (names[0], names[1]), coordinator, auto_set_gpu)

    def _found(self, num_processes: int) -> str:
        uri = os.environ.get("OMPI_MCA_orte_hnp_uri", "")  # noqa: SIM112 - Open MPI's spelling.
        match = re.match(
            r"([0-9]{1,18})\.\d+;.*?(?:tcp://([^,:]+)|tcp6://\[([^,\]]+))", uri
        )
        if os.environ.get(f"{_OPEN_MPI}LOCAL_SIZE") == str(num_processes):
            job = os.environ.get("PMIX_NAMESPACE", "0")
            return f"{_HERE}:{_port(zlib.crc32(job.encode()))}"
        if match is not None:
            job, host, host6 = match.groups()
            return addresses.joined(host or host6, _port(int(job) // _PORTS))
        # Newer versions do not say where they were started.
        raise ClusterError(
            "Open MPI does not say on which host process 0 runs.",
            received=f"OMPI_MCA_orte_hnp_uri={uri!r}.",
            fix='kd.cluster_resolver.OpenMPIClusterResolver("host0:1234")',
        )


class MPICHClusterResolver(_MPIResolver):
    """Reads the cluster from the environment of MPICH's `mpirun` (`mpiexec.hydra`).

    Where all processes are on one host, they find each other at 127.0.0.1; otherwise
    the first process is looked for on the host that `mpirun` was started on, which the
    command line of its proxy names. The port is chosen by that of `mpirun`. Where
    process 0 runs on another host, name its address.

    Args:
        coordinator: The address of process 0, `host:port`.
        auto_set_gpu: Whether the processes of a host share the GPUs that
            `CUDA_VISIBLE_DEVICES` or `nvidia-smi` names; each takes its own when
            `topology` is called. `False` where each has its own already.

    Raises:
        ClusterError: Outside of `mpirun`, and where the address of the first process is
            not known.

    Example:
        >>> import os, keras_distribute as kd
        >>> os.environ |= {"PMI_SIZE": "2", "PMI_RANK": "1"}
        >>> kd.cluster_resolver.MPICHClusterResolver("10.0.0.1:1234").topology()
        Topology(process_id=1, num_processes=2, coordinator='10.0.0.1:1234')
        >>> del os.environ["PMI_SIZE"], os.environ["PMI_RANK"]
    """

    def __init__(
        self, coordinator: str | None = None, auto_set_gpu: bool = True
    ) -> None:
        local = "MPI_LOCALRANKID", "MPI_LOCALNRANKS"
        super().__init__("PMI_RANK", "PMI_SIZE", local, coordinator, auto_set_gpu)

    def _found(self, num_processes: int) -> str:
        launcher = _launcher_of_proxy()
        if os.environ.get("MPI_LOCALNRANKS") == str(num_processes):
            return f"{_HERE}:{_port(launcher[1] if launcher else os.getppid())}"
        if launcher is None:
            raise ClusterError(
                "MPICH does not say on which host process 0 runs.",
                received="no --control-port of a proxy among the parents of this "
                "process.",
                fix='kd.cluster_resolver.MPICHClusterResolver("host0:1234")',
            )
        return f"{launcher[0]}:{_port(launcher[1])}"


def _launcher_of_proxy() -> tuple[str, int] | None:
    """Where `mpirun` listens, by the command line of its proxy on this host."""
    process = os.getpid()
    for _ in range(_MOST_PARENTS):
        try:
            words = (_PROCESSES / f"{process}/cmdline").read_text().split("\0")
            state = (_PROCESSES / f"{process}/stat").read_text()
        except (OSError, UnicodeDecodeError):
            return None
        if "--control-port" in words[:-1]:
            address = words[words.index("--control-port") + 1]
            host, _, port = address.rpartition(":")
            return (host, int(port)) if host and port.isdecimal() else None
        # After the name, which may hold spaces and brackets: a state, and the parent.
        process = int(state.rpartition(")")[2].split()[1])
        if process <= 1:
            return None
    return None


def _port(job: int) -> int:
    return 2**16 - _PORTS + job % _PORTS


def _is_this_host(host: str) -> bool:
    try:
        for family, kind, _, _, address in socket.getaddrinfo(
            host, 0, type=socket.SOCK_STREAM
        ):
            with socket.socket(family, kind) as server:
                server.bind(address)
                return True
    except (OSError, UnicodeError):
        pass
    return False
