"""`ClusterSpec`: the addresses of the tasks of a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from keras_distribute import checks
from keras_distribute.errors import ClusterError, StructureTypeError

Tasks = dict[int, str]
_MOST_TASKS = 2**20


class ClusterSpec:
    """The tasks of a cluster, by job and number, with their addresses.

    Source: `tf.train.ClusterSpec`. Differs from TF: there is no `as_cluster_def`, since
    there is no TensorFlow to read one; TensorFlow's own `ClusterSpec` and `ClusterDef`
    are taken as an argument.

    Args:
        cluster: A dict from job names to lists of addresses, or to dicts from task
            numbers to addresses where not all are known; or another `ClusterSpec`.

    Raises:
        StructureTypeError: For anything else.

    Example:
        >>> import keras_distribute as kd
        >>> jobs = {"worker": ["a:1", "b:1"], "ps": {3: "c:1"}}
        >>> cluster = kd.cluster_resolver.ClusterSpec(jobs)
        >>> cluster
        ClusterSpec({'ps': {3: 'c:1'}, 'worker': ['a:1', 'b:1']})
        >>> cluster.task_address("worker", 1)
        'b:1'
    """

    def __init__(self, cluster: Any) -> None:
        theirs = not isinstance(cluster, Mapping | type)
        if theirs and hasattr(cluster, "as_dict"):  # Ours, or TensorFlow's.
            cluster = cluster.as_dict()
        elif theirs and hasattr(cluster, "job"):  # TensorFlow's protocol buffer.
            cluster = {job.name: dict(job.tasks) for job in cluster.job}
        what = "A cluster is a dict from job names to addresses."
        fix = 'ClusterSpec({"worker": ["host0:2222", "host1:2222"]})'
        checks.instance("cluster", cluster, Mapping, what, fix)
        self._jobs: dict[str, Tasks] = {}
        for job, tasks in cluster.items():
            if isinstance(tasks, list | tuple):
                tasks = dict(enumerate(tasks))
            if not isinstance(job, str) or not isinstance(tasks, Mapping):
                raise _not_addresses(job, tasks)
            self._jobs[job] = {_index(i, job, tasks): a for i, a in tasks.items()}
            if not all(isinstance(a, str) for a in self._jobs[job].values()):
                raise _not_addresses(job, tasks)

    def __bool__(self) -> bool:
        """Whether there is any job."""
        return bool(self._jobs)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, ClusterSpec):
            return self._jobs == other._jobs
        return self._jobs == other

    def __hash__(self) -> int:
        return hash(repr(self))

    def __repr__(self) -> str:
        jobs = self.as_dict()
        return f"ClusterSpec({dict(sorted(jobs.items()))!r})"

    @property
    def jobs(self) -> list[str]:
        """The names of the jobs."""
        return list(self._jobs)

    def as_dict(self) -> dict[str, Any]:
        """By job a list of addresses; where numbers are missing, a dict from those that
        are known.
        """
        return {
            job: self.job_tasks(job) if _dense(tasks) else dict(sorted(tasks.items()))
            for job, tasks in self._jobs.items()
        }

    def num_tasks(self, job_name: str) -> int:
        """How many tasks of a job have an address.

        Raises:
            ClusterError: For a job that is not there.
        """
        return len(self._tasks(job_name))

    def task_indices(self, job_name: str) -> list[int]:
        """Their numbers, ascending."""
        return sorted(self._tasks(job_name))

    def task_address(self, job_name: str, task_index: int) -> str:
        """The address of a task.

        Raises:
            ClusterError: For a job or a number that is not there.
        """
        tasks = self._tasks(job_name)
        if not checks.is_integer(task_index) or task_index not in tasks:
            raise ClusterError(
                f"There is no task {checks.shown(task_index)} in the job {job_name!r}.",
                received=f"{self!r}.",
                fix=f"one of {sorted(tasks)}.",
            )
        return tasks[task_index]

    def job_tasks(self, job_name: str) -> list[Any]:
        """The addresses of a job in order; `None` for a number that is missing.

        Raises:
            ClusterError: For a job that is not there.
        """
        tasks = self._tasks(job_name)
        return [tasks.get(index) for index in range(max(tasks, default=-1) + 1)]

    def _tasks(self, job_name: str) -> Tasks:
        if not isinstance(job_name, str) or job_name not in self._jobs:
            raise ClusterError(
                f"There is no job {checks.shown(job_name)} in the cluster.",
                received=f"{self!r}.",
                fix=f"one of {self.jobs}.",
            )
        return self._jobs[job_name]


def _dense(tasks: Tasks) -> bool:
    return bool(tasks) and max(tasks) + 1 == len(tasks)


def _index(index: Any, job: Any, tasks: Any) -> int:
    """The number of a task, which JSON has as text."""
    written = isinstance(index, str) and index.isdecimal() and len(index) < 10
    number: Any = int(index) if written else index
    if not checks.is_integer(number) or not 0 <= number < _MOST_TASKS:
        raise _not_addresses(job, tasks)
    return int(number)


def _not_addresses(job: Any, tasks: Any) -> StructureTypeError:
    return StructureTypeError(
        f"The tasks of the job {checks.shown(job)} are a list of addresses, or a dict "
        "from numbers to addresses.",
        received=f"{checks.shown(tasks)}.",
        fix='{"worker": ["host0:2222", "host1:2222"]}',
    )
