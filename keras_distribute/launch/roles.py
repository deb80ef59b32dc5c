"""The tasks of a cluster with parameter servers on this host: the chief runs the
script, workers and servers run `kd.Server`.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from keras_distribute import config
from keras_distribute.cluster import signing
from keras_distribute.cluster.ports import free_ports
from keras_distribute.cluster.resolvers.slurm import gpus, share_of_gpus
from keras_distribute.launch.job import Job

Jobs = dict[str, list[str]]
SERVER = [sys.executable, "-W", "ignore", "-m", "keras_distribute.servers"]
_POLL_SECONDS = 0.05
_SECONDS_UNTIL_RESTART = 1.0


def addresses(num_workers: int, num_ps: int, with_chief: bool = False) -> Jobs:
    """Free ports of this host for all tasks."""
    ports = free_ports(num_workers + num_ps + with_chief)
    found = [f"127.0.0.1:{port}" for port in ports]
    jobs = {"worker": found[:num_workers], "ps": found[num_workers:][:num_ps]}
    return jobs | ({"chief": found[-1:]} if with_chief else {})


def environment_of(jobs: Jobs, job: str, index: int, token: str) -> dict[str, str]:
    """What a task is told: who all are, who it is, the token, and how many threads."""
    told = {"cluster": jobs, "task": {"type": job, "index": index}}
    environment = {"TF_CONFIG": json.dumps(told), signing.TOKEN: token}
    if job == "chief":
        return environment
    # Servers compute in between, and need few.
    sharing = len(jobs["worker"]) + (len(jobs["ps"]) if job == "ps" else 0)
    threads = str(config.threads_of_one_of(sharing))
    return environment | {"NPROC": threads, config.SET_HERE: ""}


class Roles:
    """A job of a chief, workers and parameter servers on this host.

    Args:
        cpu_devices: How many virtual CPU devices each worker has; `None` for the
            devices of the host.
        max_restarts: How often all are started again after the chief or a server has
            failed. A worker that ends is started again by itself, each time.
        grace: Seconds from a signal until all are killed.
        on_line: Called with the name of a task and each line that it writes.
        tell: Called with what happens.
    """

    def __init__(
        self,
        command: Sequence[str],
        num_workers: int,
        num_ps: int,
        *,
        cpu_devices: int | None,
        max_restarts: int,
        grace: float,
        on_line: Callable[[str, str], None],
        tell: Callable[[str], None],
    ) -> None:
        self._command, self._sizes = list(command), (num_workers, num_ps)
        self._cpu_devices = cpu_devices
        self._gpus = [] if cpu_devices is not None else gpus()
        self._max_restarts, self._grace = max_restarts, grace
        self._on_line, self._tell = on_line, tell
        self.signals: list[int] = []  # Which would have ended this process.
        self._jobs: Jobs = {}
        self._token = ""
        self._tasks: dict[str, Job] = {}
        self._ended: dict[str, float] = {}

    def run(self) -> int:
        """Runs the job; returns the exit code of the chief, or a failed server's."""
        code = 0
        for attempt in range(self._max_restarts + 1):
            code = self._attempt(attempt)
            if code == 0 or self.signals:
                return code
            if attempt < self._max_restarts:
                self._tell(f"starts all tasks again ({attempt + 1}).")
        return code

    def _attempt(self, attempt: int) -> int:
        self._jobs = addresses(*self._sizes, with_chief=True)
        self._token, self._ended = signing.new_token(), {}
        restarts = {"KERAS_DISTRIBUTE_RESTARTS": str(attempt)}
        try:
            for job in ("ps", "worker", "chief"):
                for index in range(len(self._jobs[job])):
                    self._start(job, index, restarts)
            return self._watch(restarts)
        finally:
            for name, task in self._tasks.items():
                task.stop(1.0 if name == "chief:0" else 0.0)

    def _start(self, job: str, index: int, more: Mapping[str, str]) -> None:
        name = f"{job}:{index}"
        told = environment_of(self._jobs, job, index, self._token)
        told |= self._devices_of(job, index)
        command = self._command if job == "chief" else SERVER
        task = Job(
            command,
            1,
            environment=lambda _: {**told, **more},
            on_line=lambda _, line: self._on_line(name, line),
        )
        self._tasks[name] = task
        task.start()

    def _devices_of(self, job: str, index: int) -> Mapping[str, str]:
        """The workers have the devices; others would keep a TPU from a worker."""
        if job == "worker" and self._cpu_devices is None:
            return share_of_gpus(self._gpus, index, self._sizes[0])
        if self._cpu_devices is None:
            return {"JAX_PLATFORMS": "cpu"}
        count = self._cpu_devices if job == "worker" else 1
        return {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(count)}

    def _watch(self, more: Mapping[str, str]) -> int:
        """Looks after the tasks until the chief, a server or a signal ends it."""
        while not self.signals:
            for name, task in list(self._tasks.items()):
                code = task.workers[0].exit_code
                if code is None:
                    continue
                if name == "chief:0":
                    if code:
                        self._tell(f"chief:0 has failed (exit code {code}).")
                    return code
                if code == 0:
                    continue  # The chief has said goodbye.
                if name.startswith("ps:"):
                    self._tell(f"{name} has ended (exit code {code}).")
                    return code
                if self._is_due(name, code):
                    task.stop(0.0)  # What it had started goes with it.
                    self._start("worker", int(name.partition(":")[2]), more)
            time.sleep(_POLL_SECONDS)
        return self._stopped()

    def _is_due(self, name: str, code: int) -> bool:
        """Whether a worker that has ended is to be started again now."""
        if name not in self._ended:
            self._ended[name] = time.monotonic()
            self._tell(f"{name} has ended (exit code {code}), and is started again.")
        if time.monotonic() - self._ended[name] < _SECONDS_UNTIL_RESTART:
            return False
        del self._ended[name]
        return True

    def _stopped(self) -> int:
        name = signal.Signals(self.signals[0]).name
        self._tell(f"passes on {name}; what runs after {self._grace:.0f} s is killed.")
        chief = self._tasks["chief:0"]
        chief.send(self.signals[0])
        chief.wait(
            self._grace, until_failure=False, until=lambda: len(self.signals) > 1
        )
        code = chief.workers[0].exit_code
        return 128 + self.signals[0] if code is None else code
