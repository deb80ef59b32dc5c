"""The cluster of a Slurm job step, from its environment variables."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any

from keras_distribute import checks
from keras_distribute.cluster import addresses
from keras_distribute.cluster.resolvers import environment
from keras_distribute.cluster.resolvers.base import (
    ClusterResolver,
    check_port,
    check_task,
)
from keras_distribute.cluster.resolvers.cluster_spec import ClusterSpec
from keras_distribute.cluster.resolvers.topology import Topology
from keras_distribute.errors import ClusterError, ValueStructureError

_HOSTS = re.compile(r"([^,\[\]]*)(?:\[([^\[\]]+)\])?(?:,|$)")
_TASKS = re.compile(r"([0-9]{1,6})(?:\(x([0-9]{1,9})\))?$")
_DIGITS = re.compile(r"[0-9]{1,18}")
_MOST = 2**20  # Hosts or tasks: a larger number is a typing error.
_PORT = 8888
_PORTS = 4096  # The last ports, of which each step has its own; as JAX chooses.
_OF_JOB = 64  # How far the ports of a job are from those of the next one.
_ASK_SECONDS = 60
_NO_GPU = ("-1", "NoDevFiles")  # The user's word in CUDA_VISIBLE_DEVICES, and Slurm's.


def expand_hostlist(hostlist: str) -> list[str]:
    """The hosts of a Slurm node list: `n[1-2],m[08-10]` is n1, n2, m08, m09, m10."""
    hosts: list[str] = []
    start = 0
    while start < len(hostlist):
        match = _HOSTS.match(hostlist, start)
        if match is None or not match.group().strip(","):
            raise _malformed("node list", hostlist)
        prefix, ranges = match.groups()
        numbers = [""] if ranges is None else _numbers(ranges, hostlist)
        hosts += [prefix + number for number in numbers]
        start = match.end()
    return hosts


def _numbers(ranges: str, hostlist: str) -> Iterator[str]:
    for part in ranges.split(","):
        first, *last = part.split("-")
        ends = (first, *last)
        if len(last) > 1 or not all(map(_DIGITS.fullmatch, ends)):
            raise _malformed("node list", hostlist)
        begin, end = int(first), int(ends[-1])
        if not begin <= end < begin + _MOST:
            raise _malformed("node list", hostlist)
        for number in range(begin, end + 1):
            yield str(number).zfill(len(first))


def expand_tasks_per_node(tasks_per_node: str) -> list[int]:
    """The number of tasks of each node: `3(x2),2` is 3, 3, 2."""
    counts: list[int] = []
    for part in tasks_per_node.split(","):
        match = _TASKS.match(part)
        if match is None:
            raise _malformed("list of tasks per node", tasks_per_node)
        counts += [int(match.group(1))] * min(int(match.group(2) or 1), _MOST)
    return counts


class SlurmClusterResolver(ClusterResolver):
    """Reads the cluster from the environment of a Slurm job step (`srun`).

    Tasks are numbered as Slurm numbers them: node after node in the order of its node
    list, or as `--distribution` says. Source:
    `tf.distribute.cluster_resolver.SlurmClusterResolver`. Differs from TF: nodes are
    not sorted by their names, where `n10` comes before `n9` and Slurm's task 0 would be
    looked for on another node; nodes without GPUs work; where `CUDA_VISIBLE_DEVICES`
    names GPUs, tasks share those, not the first ones of the node, and where Slurm gives
    each task its own (`--gpus-per-task`), it keeps them; ports are of the job's own; a
    node whose name has no address is asked for with `scontrol`; and each task gets its
    place in the constructor.

    Args:
        jobs: The number of tasks of each job; by default all are workers. Jobs take the
            tasks in the order of their names.
        port_base: The port of the first task of a node; the others have the ports that
            follow. By default a port that the numbers of the job and of the step
            choose, so that jobs that share a node do not meet; 8888 where Slurm says
            none.
        gpus_per_node: By default what `CUDA_VISIBLE_DEVICES` or `nvidia-smi` names.
        gpus_per_task: By default those that Slurm gives this task, or an even share.
        tasks_per_node: A number, or a dict by host; by default what Slurm says.
        auto_set_gpu: Whether to set `CUDA_VISIBLE_DEVICES` to the GPUs of this task, if
            there are any, when `cluster_spec` is called.
        rpc_layer: The protocol that `master` puts in front.

    Raises:
        ClusterError: Outside of a job step; where more GPUs are asked for than there
            are; and where the jobs do not have as many tasks as the step.

    Example:
        >>> import os, keras_distribute as kd
        >>> step = {"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "3",
        ...         "SLURM_STEP_NODELIST": "n[08-09]",
        ...         "SLURM_STEP_TASKS_PER_NODE": "2,1"}
        >>> os.environ |= step
        >>> resolver = kd.cluster_resolver.SlurmClusterResolver(gpus_per_node=0)
        >>> resolver.cluster_spec(), resolver.task_id
        (ClusterSpec({'worker': ['n08:8888', 'n08:8889', 'n09:8888']}), 2)
        >>> for name in step:
        ...     del os.environ[name]
    """

    def __init__(
        self,
        jobs: dict[str, int] | None = None,
        port_base: int | None = None,
        gpus_per_node: int | None = None,
        gpus_per_task: int | None = None,
        tasks_per_node: int | dict[str, int] | None = None,
        auto_set_gpu: bool = True,
        rpc_layer: str | None = "grpc",
    ) -> None:
        if port_base is not None:
            check_port("port_base", port_base)
        checks.flag("auto_set_gpu", auto_set_gpu)
        self._set_task(None, None, rpc_layer)
        _check_tasks("jobs", jobs)
        for name, count in (("node", gpus_per_node), ("task", gpus_per_task)):
            if count is not None:
                checks.count(f"gpus_per_{name}", count, most=_MOST)
        self._rank = _number("PROCID")
        self._jobs = {"worker": _number("STEP_NUM_TASKS")} if jobs is None else jobs
        self._jobs = dict(sorted(self._jobs.items()))
        self._auto_set_gpu = auto_set_gpu
        self._tasks_of_host = _tasks_of_hosts(tasks_per_node)
        self._nodes: dict[str, str] = {}
        most = max(self._tasks_of_host.values())
        port_base = _port_of_step(most) if port_base is None else port_base
        self._port_base = port_base
        self._share_gpus(gpus_per_node, gpus_per_task, most)
        tasks, of_jobs = sum(self._tasks_of_host.values()), sum(self._jobs.values())
        if of_jobs != tasks:
            raise ClusterError(
                f"The jobs have {of_jobs} tasks, and the job step has {tasks}.",
                received=f"jobs={self._jobs} on {self._tasks_of_host}.",
                fix=f"jobs whose tasks add up to {tasks}, or None.",
            )
        if not self._rank < tasks:
            raise ClusterError(
                f"The tasks of the job step are 0 to {tasks - 1}.",
                received=f"SLURM_PROCID={self._rank}.",
                fix="start the program with srun.",
            )
        if port_base + most > 2**16:
            raise ClusterError(
                f"There are not {most} ports from {port_base} on.",
                received=f"port_base={port_base}.",
                fix="port_base=8888",
            )
        first = 0
        for job, count in self._jobs.items():
            if first <= self._rank < first + count:
                self._task_type, self._task_id = job, self._rank - first
            first += count

    def _share_gpus(
        self, per_node: int | None, per_task: int | None, most: int
    ) -> None:
        """Notes the GPUs of this node and of each task; `most` tasks share a node."""
        visible: list[str] = []
        if per_node is None or "CUDA_VISIBLE_DEVICES" in os.environ:
            visible = gpus()
        if per_node is None and per_task is None and _are_of_this_task(visible):
            self._auto_set_gpu = False
            self._gpus, self._gpus_per_task = visible, len(visible)
            return
        per_node = len(visible) if per_node is None else per_node
        enough = len(visible) >= per_node
        self._gpus = visible if enough else [str(i) for i in range(per_node)]
        self._gpus_per_task = per_node // most if per_task is None else per_task
        if most * self._gpus_per_task > per_node:
            raise ClusterError(
                "A node has fewer GPUs than its tasks ask for.",
                received=f"{most} tasks of {self._gpus_per_task} GPUs on nodes of "
                f"{per_node}.",
                fix="fewer gpus_per_task, or fewer tasks: srun --ntasks-per-node.",
            )

    def cluster_spec(self) -> ClusterSpec:
        tasks = _in_order(self._tasks_of_host)
        left = [f"{host}:{self._port_base + index}" for host, index in tasks]
        if self._auto_set_gpu and self._gpus_per_task:
            first = tasks[self._rank][1] * self._gpus_per_task
            own = self._gpus[first : first + self._gpus_per_task]
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(own)
        cluster: dict[str, list[str]] = {}
        for job, count in self._jobs.items():
            cluster[job], left = left[:count], left[count:]
        return ClusterSpec(cluster)

    def topology(self) -> Topology:
        """The place of this process among those that train together.

        Raises:
            ClusterError: Where the first one's node has no address that is known here.
        """
        found = super().topology()
        if found.coordinator is None:
            return found
        node, _, port = found.coordinator.rpartition(":")
        if node not in self._nodes:
            self._nodes[node] = _address_of(node)
        address = addresses.joined(self._nodes[node], port)
        return dataclasses.replace(found, coordinator=address)

    def get_task_info(self) -> tuple[str | None, int | None]:
        """The type and the number of this task."""
        return self.task_type, self.task_id

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: Any = None,
    ) -> dict[str, int]:
        check_task(task_type, task_id)
        return {"GPU": self._gpus_per_task}


def _port_of_step(most: int) -> int:
    """The port of the first of at most so many tasks on a node."""
    job, step = (os.environ.get(f"SLURM_{name}") for name in ("JOB_ID", "STEP_ID"))
    if job is None or most > _PORTS:
        return _PORT
    number = environment.number("SLURM_JOB_ID", job) * _OF_JOB
    number += environment.number("SLURM_STEP_ID", step or "0")
    return 2**16 - _PORTS + number % (_PORTS - most + 1)


def _are_of_this_task(visible: list[str]) -> bool:
    """Whether Slurm lets this task see but a part of what the step has on the node."""
    on_node = os.environ.get("SLURM_GPUS_ON_NODE")
    if not visible or on_node is None:
        return False
    # The only task of a node sees all that the step has there.
    per_task = os.environ.get("SLURM_GPUS_PER_TASK", "").rpartition(":")[2]
    if per_task == str(len(visible)):
        return True
    return len(visible) < environment.number("SLURM_GPUS_ON_NODE", on_node)


def _in_order(tasks_of_host: dict[str, int]) -> list[tuple[str, int]]:
    """The host of each task, and its place there, as `srun --distribution` has them:
    all tasks of a node, then those of the next, or some at a time in turns.
    """
    kind = os.environ.get("SLURM_DISTRIBUTION", "").partition(":")[0]
    at_once = _MOST
    if kind == "cyclic":
        at_once = 1
    elif kind == "plane":
        at_once = max(_number("DIST_PLANESIZE"), 1)
    tasks: list[tuple[str, int]] = []
    placed = dict.fromkeys(tasks_of_host, 0)
    while len(tasks) < sum(tasks_of_host.values()):
        for host, count in tasks_of_host.items():
            first = placed[host]
            placed[host] = min(first + at_once, count)
            tasks += [(host, index) for index in range(first, placed[host])]
    return tasks


def _address_of(node: str) -> str:
    """The name of a node, or where it has no address, what Slurm says that it is."""
    if _has_address(node):
        return node
    address = _said_by_slurm(node)
    if address is None:
        raise ClusterError(
            f"The first task is on the node {node!r}, and this name has no address "
            "here.",
            received="none from the resolver of this host, nor from scontrol.",
            fix="name an address that all nodes reach: "
            'KERAS_DISTRIBUTION_JOB_ADDRESSES="10.0.0.1:1234", with _NUM_PROCESSES='
            "$SLURM_NTASKS and _PROCESS_ID=$SLURM_PROCID.",
        )
    return address


def _has_address(host: str) -> bool:
    try:
        socket.getaddrinfo(host, None)
    except socket.gaierror as error:
        return error.errno == socket.EAI_AGAIN  # It is too busy to say.
    except UnicodeError:
        return False
    return True


def _said_by_slurm(node: str) -> str | None:
    scontrol = shutil.which("scontrol")
    if scontrol is None:
        return None
    command = [scontrol, "--oneliner", "show", "node", node]
    options: Any = {"capture_output": True, "text": True, "timeout": _ASK_SECONDS}
    try:
        said = subprocess.run(command, check=True, **options).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r"(?:^|\s)NodeAddr=(\S+)", said)
    return found[1] if found and _has_address(found[1]) else None


def _tasks_of_hosts(tasks_per_node: int | dict[str, int] | None) -> dict[str, int]:
    if isinstance(tasks_per_node, dict):
        _check_tasks("tasks_per_node", tasks_per_node)
        return dict(tasks_per_node)
    if tasks_per_node is not None:
        checks.count("tasks_per_node", tasks_per_node, 1, most=_MOST)
    hosts = expand_hostlist(_variable("STEP_NODELIST"))
    listed = "STEP_TASKS_PER_NODE"
    if tasks_per_node is None:
        counts = expand_tasks_per_node(_variable(listed))
    else:
        counts = [int(tasks_per_node)] * len(hosts)
    if not hosts or len(counts) != len(hosts):
        raise ClusterError(
            "The list of nodes and that of their tasks do not fit.",
            received=f"{len(hosts)} node(s) and {len(counts)} number(s) of tasks.",
            fix=f"check SLURM_STEP_NODELIST and SLURM_{listed}.",
        )
    return dict(zip(hosts, counts, strict=True))


def _check_tasks(name: str, tasks: Any) -> None:
    what, fix = f"{name} has a number for each name.", f'{name}={{"worker": 2}}'
    checks.instance(name, tasks, dict | None, what, fix)
    if tasks is not None and not tasks:
        raise ValueStructureError(what, received=f"{name}={{}}.", fix=fix)
    for key, number in (tasks or {}).items():
        checks.instance(name, key, str, what, fix)
        checks.count(name, number, most=_MOST, what=what, fix=fix)


def _number(name: str) -> int:
    return environment.number(f"SLURM_{name}", _variable(name))


def _variable(name: str) -> str:
    value = os.environ.get(f"SLURM_{name}")
    if value is None:
        raise ClusterError(
            f"SLURM_{name} is not in the environment.",
            received="no job step of Slurm.",
            fix="start the program with srun, also after salloc or sbatch.",
        )
    return value


def gpus() -> list[str]:
    """The NVIDIA GPUs of this node, by `CUDA_VISIBLE_DEVICES` or by the driver."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        devices = [device.strip() for device in visible.split(",") if device.strip()]
        # CUDA shows those before the first that there is not.
        none = [i for i, each in enumerate(devices) if each in _NO_GPU]
        return devices[: none[0]] if none else devices
    command: Any = ["nvidia-smi", "--list-gpus"]
    options: Any = {"capture_output": True, "text": True, "check": True, "timeout": 60}
    try:
        listed = subprocess.run(command, **options).stdout
    except FileNotFoundError:
        return []
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        raise ClusterError(
            f"The number of GPUs could not be read from nvidia-smi: {error}.",
            received="gpus_per_node=None.",
            fix="SlurmClusterResolver(gpus_per_node=8)",
        ) from error
    count = sum(line.startswith("GPU ") for line in listed.splitlines())
    return [str(i) for i in range(count)]


def share_of_gpus(
    gpus: Sequence[str], local_index: int, num_local: int
) -> dict[str, str]:
    """The variables that give a process its share of the GPUs of this host."""
    each = len(gpus) // num_local
    if num_local == 1 or not each:
        return {}
    first = local_index * each
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus[first : first + each])}


def _malformed(what: str, text: str) -> ClusterError:
    return ClusterError(
        f"This is no {what} of Slurm.",
        received=f"{text!r}.",
        fix="n[1-2],m5,o[3-4,6,7-9] for nodes, 3(x2),2,1 for their tasks.",
    )
