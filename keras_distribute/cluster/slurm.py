"""The cluster of a Slurm job step, from its environment variables."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any

from keras_distribute import checks
from keras_distribute.cluster import environment
from keras_distribute.cluster.resolver import ClusterResolver, check_port, check_task
from keras_distribute.cluster.spec import ClusterSpec
from keras_distribute.errors import ClusterError, ValueStructureError

_HOSTS = re.compile(r"([^,\[\]]*)(?:\[([^\[\]]+)\])?(?:,|$)")
_TASKS = re.compile(r"([0-9]{1,6})(?:\(x([0-9]{1,9})\))?$")
_DIGITS = re.compile(r"[0-9]{1,18}")
_MOST = 2**20  # Of hosts and tasks; nobody has more.


def expand_hostlist(hostlist: str) -> list[str]:
    """The hosts of a Slurm node list, in its order: `n[1-2],m[08-10]` is n1, n2, m08,
    m09, m10.

    Raises:
        ClusterError: For a list that is none.
    """
    hosts: list[str] = []
    place = 0
    while place < len(hostlist):
        match = _HOSTS.match(hostlist, place)
        if match is None or not match.group().strip(","):
            raise _malformed("node list", hostlist)
        prefix, numbers = match.groups()
        hosts += (
            [prefix]
            if numbers is None
            else [prefix + number for number in _numbers(numbers, hostlist)]
        )
        place = match.end()
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
    """The number of tasks of each node: `3(x2),2` is 3, 3, 2.

    Raises:
        ClusterError: For a list that is none.
    """
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
    list. Source: `tf.distribute.cluster_resolver.SlurmClusterResolver`. Differs from
    TF: nodes are not sorted by their names, where `n10` comes before `n9` and Slurm's
    task 0 would be looked for on another node; nodes without GPUs work; where
    `CUDA_VISIBLE_DEVICES` names GPUs, tasks share those, not the first ones of the
    node; and each task gets its place in the constructor.

    Args:
        jobs: The number of tasks of each job; by default all are workers. Jobs take the
            tasks in the order of their names.
        port_base: The port of the first task of a node; the others have the ports that
            follow.
        gpus_per_node: By default what `CUDA_VISIBLE_DEVICES` or `nvidia-smi` names.
        gpus_per_task: By default an even share of them.
        tasks_per_node: A number, or a dict by host; by default what Slurm says.
        auto_set_gpu: Whether to set `CUDA_VISIBLE_DEVICES` to the GPUs of this task, if
            there are any, when `cluster_spec` is called.
        rpc_layer: The protocol that `master` puts in front.

    Raises:
        ClusterError: Outside of a job step; where more GPUs are asked for than there
            are; and where the jobs do not have as many tasks as the step.

    Example:
        >>> import os, keras_distribute as kd
        >>> step = {"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_NODELIST": "n[08-09]",
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
        port_base: int = 8888,
        gpus_per_node: int | None = None,
        gpus_per_task: int | None = None,
        tasks_per_node: int | dict[str, int] | None = None,
        auto_set_gpu: bool = True,
        rpc_layer: str | None = "grpc",
    ) -> None:
        check_port("port_base", port_base)
        checks.flag("auto_set_gpu", auto_set_gpu)
        check_task(rpc_layer=rpc_layer)
        _check_tasks("jobs", jobs)
        for name, number in (("node", gpus_per_node), ("task", gpus_per_task)):
            if number is not None:
                checks.count(f"gpus_per_{name}", number, most=_MOST)
        self._rank = _number("PROCID")
        own = {"worker": _number("STEP_NUM_TASKS")} if jobs is None else dict(jobs)
        self._jobs = own
        self._port_base, self._auto_set_gpu, self._rpc_layer = (
            port_base,
            auto_set_gpu,
            rpc_layer,
        )
        self._tasks_of_host = _tasks_of_hosts(tasks_per_node)
        most = max(self._tasks_of_host.values())
        visible = (
            gpus()
            if gpus_per_node is None or "CUDA_VISIBLE_DEVICES" in os.environ
            else []
        )
        gpus_per_node = len(visible) if gpus_per_node is None else gpus_per_node
        self._gpus = (
            visible
            if len(visible) >= gpus_per_node
            else [str(i) for i in range(gpus_per_node)]
        )
        self._gpus_per_task = (
            gpus_per_node // most if gpus_per_task is None else gpus_per_task
        )
        if most * self._gpus_per_task > gpus_per_node:
            raise ClusterError(
                "A node has fewer GPUs than its tasks ask for.",
                received=f"{most} tasks of {self._gpus_per_task} GPUs on nodes of "
                f"{gpus_per_node}.",
                fix="fewer gpus_per_task, or fewer tasks on a node: srun "
                "--ntasks-per-node.",
            )
        tasks = sum(self._tasks_of_host.values())
        if sum(self._jobs.values()) != tasks:
            raise ClusterError(
                f"The jobs have {sum(self._jobs.values())} tasks, and the job step has "
                f"{tasks}.",
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
        self._find_own_task()

    def _find_own_task(self) -> None:
        first = 0
        for job, tasks in sorted(self._jobs.items()):
            if first <= self._rank < first + tasks:
                self._task_type, self._task_id = job, self._rank - first
            first += tasks

    def cluster_spec(self) -> ClusterSpec:
        places = [
            (host, place)
            for host, tasks in self._tasks_of_host.items()
            for place in range(tasks)
        ]
        addresses = [f"{host}:{self._port_base + place}" for host, place in places]
        if self._auto_set_gpu and self._gpus_per_task:
            first = places[self._rank][1] * self._gpus_per_task
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(
                self._gpus[first : first + self._gpus_per_task]
            )
        cluster: dict[str, list[str]] = {}
        for job, tasks in sorted(self._jobs.items()):
            cluster[job], addresses = addresses[:tasks], addresses[tasks:]
        return ClusterSpec(cluster)

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


def _tasks_of_hosts(tasks_per_node: int | dict[str, int] | None) -> dict[str, int]:
    if isinstance(tasks_per_node, dict):
        _check_tasks("tasks_per_node", tasks_per_node)
        return dict(tasks_per_node)
    each = tasks_per_node
    if each is not None:
        each = checks.count("tasks_per_node", each, 1, most=_MOST)
    hosts = expand_hostlist(_variable("STEP_NODELIST"))
    listed = "STEP_TASKS_PER_NODE"
    counts = expand_tasks_per_node(_variable(listed)) if each is None else [each]
    if each is not None:
        counts *= len(hosts)
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
            fix="start the program with srun, also inside an allocation of salloc or "
            "sbatch.",
        )
    return value


def gpus() -> list[str]:
    """The NVIDIA GPUs of this node, by the variable that hides some of them, or by the
    driver.

    Raises:
        ClusterError: Where the driver fails.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [device for device in visible.split(",") if device]
    try:
        listed = subprocess.run(
            ["nvidia-smi", "--list-gpus"],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
    except FileNotFoundError:
        return []
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        raise ClusterError(
            f"The number of GPUs could not be had from nvidia-smi: {error}.",
            received="gpus_per_node=None.",
            fix="SlurmClusterResolver(gpus_per_node=8)",
        ) from error
    return [
        str(i)
        for i in range(
            sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
        )
    ]


def share_of_gpus(own: Sequence[str], place: int, num_places: int) -> dict[str, str]:
    """The variables that give a process its share of the GPUs of this host; none where
    there is nothing to share.

    Args:
        own: The GPUs.
        place: Of the process, from 0.
        num_places: How many processes share them.
    """
    each = len(own) // num_places
    if num_places == 1 or not each:
        return {}
    return {"CUDA_VISIBLE_DEVICES": ",".join(own[place * each : (place + 1) * each])}


def _malformed(what: str, text: str) -> ClusterError:
    return ClusterError(
        f"This is no {what} of Slurm.",
        received=f"{text!r}.",
        fix="n[1-2],m5,o[3-4,6,7-9] and 3(x2),2,1 are such.",
    )
