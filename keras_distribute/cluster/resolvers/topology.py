"""Which process of how many this one is, by TensorFlow's rules for task types."""

from __future__ import annotations

import dataclasses
import re

from keras_distribute import checks
from keras_distribute.cluster.resolvers.cluster_spec import ClusterSpec
from keras_distribute.errors import ClusterError

_ADDRESS = re.compile(r"(?:\[[0-9A-Fa-f:.%\w]+\]|[^\s:/,\[\]]+):([0-9]{1,5})")
TASK_TYPES = ("chief", "worker", "evaluator", "ps")


@dataclasses.dataclass(frozen=True)
class Topology:
    """The place of this process among those that train together.

    Args:
        process_id: Its number; 0 is the chief.
        num_processes: How many they are.
        coordinator: The address on the chief's host where they find each other; `None`
            for a single process.
    """

    process_id: int = 0
    num_processes: int = 1
    coordinator: str | None = None

    def __post_init__(self) -> None:
        for name in ("process_id", "num_processes"):
            checks.count(name, getattr(self, name), error=ClusterError)
        fix = 'coordinator="10.0.0.1:1234", or None.'
        what, given = "The coordinator is an address.", self.coordinator
        checks.instance("coordinator", given, str | None, what, fix, ClusterError)
        own = f"process {self.process_id} of {self.num_processes}"
        if not 0 <= self.process_id < self.num_processes:
            raise ClusterError(
                f"The number of a process is from 0 to {self.num_processes - 1}.",
                received=f"{own}.",
                fix="check the environment variables of this process.",
            )
        if self.num_processes == 1:
            return
        if not self.coordinator:
            raise ClusterError(
                "Several processes need the address of the first one to find each "
                "other.",
                received=f"{own}, without an address.",
                fix="name the address of process 0, host:port.",
            )
        if not is_address(self.coordinator):
            raise ClusterError(
                "The address of the first process is that of a host and a port.",
                received=f"coordinator={checks.shown(self.coordinator)}.",
                fix='"10.0.0.1:1234", or "[::1]:1234".',
            )


def is_address(text: str) -> bool:
    """Whether it is `host:port`, of a port that others can be told."""
    match = _ADDRESS.fullmatch(text)
    return match is not None and 0 < int(match.group(1)) < 2**16


def topology_of(
    cluster: ClusterSpec, task_type: str | None, task_id: int | None
) -> Topology:
    """The number of a task among the chief and the workers, in this order.

    An evaluator is on its own, as in TensorFlow.
    """
    check_cluster(cluster, task_type, task_id)
    if task_type == "evaluator" or not cluster:
        return Topology()
    addresses: list[str | None] = []
    for job in ("chief", "worker"):
        if job in cluster.jobs:
            addresses += cluster.job_tasks(job)
    if task_type == "ps" or not addresses:
        raise ClusterError(
            "Parameter servers take no part in synchronous training.",
            received=f"the task {task_type}:{task_id} of {cluster!r}.",
            fix="run this strategy on the chief and the workers alone.",
        )
    if None in addresses:
        raise ClusterError(
            "The addresses of all workers must be known.",
            received=f"{cluster!r}.",
            fix='list them in order: {"worker": ["host0:2222", "host1:2222"]}',
        )
    if len(addresses) == 1:
        return Topology()
    if task_type is None or task_id is None:
        raise ClusterError(
            f"The cluster has {len(addresses)} processes, and nothing says which of "
            "them this is.",
            received=f"the task {task_type}:{task_id} of {cluster!r}.",
            fix='"task": {"type": "worker", "index": 0} in TF_CONFIG, or '
            "resolver.task_type and resolver.task_id.",
        )
    with_chief = task_type == "worker" and "chief" in cluster.jobs
    before = cluster.num_tasks("chief") if with_chief else 0
    return Topology(before + task_id, len(addresses), addresses[0])


def check_cluster(
    cluster: ClusterSpec, task_type: str | None, task_id: int | None
) -> None:
    """Raises `ClusterError` for a cluster or a task that TensorFlow would refuse."""
    unknown = [job for job in cluster.jobs if job not in TASK_TYPES]
    if unknown or task_type not in (*TASK_TYPES, None):
        raise ClusterError(
            f"There is no task type {checks.shown((unknown or [task_type])[0])}.",
            received=f"the task {task_type}:{task_id} of {cluster!r}.",
            fix=f"the types are {', '.join(TASK_TYPES)}.",
        )
    for single in ("chief", "evaluator"):
        if single in cluster.jobs and cluster.num_tasks(single) > 1:
            raise ClusterError(
                f"A cluster has at most one {single}.",
                received=f"{cluster!r}.",
                fix=f"one {single}.",
            )
    known = task_type in cluster.jobs
    if task_type is None or not cluster or (task_type == "evaluator" and not known):
        return
    known = known and checks.is_integer(task_id)
    # Of a job that names its tasks by number not all need to be known.
    last = max(cluster.task_indices(task_type), default=-1) if known else -1
    if task_id is None or not 0 <= task_id <= last:
        raise ClusterError(
            f"The task {task_type}:{task_id} is not in the cluster.",
            received=f"{cluster!r}.",
            fix="a task that is; numbers begin with 0.",
        )
