"""The processes of a job on this host: started, heard, signalled and ended. Knows
nothing of JAX or what they run.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from keras_distribute.cluster import signing

_KEPT_LINES = 400
_POLL_SECONDS = 0.05
_PR_SET_PDEATHSIG = 1


@dataclasses.dataclass(eq=False)
class Worker:
    """One process of a job.

    Args:
        index: Its number among all processes, of other hosts too.
        process: The process.
        lines: The last lines that it wrote.
    """

    index: int
    process: subprocess.Popen[str]
    lines: deque[str]

    @property
    def exit_code(self) -> int | None:
        """`None` while it runs; 128 and the number of the signal for one that was
        killed, as shells have it.
        """
        code = self.process.poll()
        return 128 - code if code is not None and code < 0 else code


class Job:
    """Processes that run the same command, each with the environment of its place in a
    cluster.

    Args:
        command: What each runs.
        num_local: How many run on this host.
        first: The number of the first of them.
        num_processes: How many there are on all hosts; as many as here by default.
        coordinator: The address of process 0; a free port of this host by default.
        environment: Further variables, for each, or a function from the place on this
            host to them.
        on_line: Called with the number of a process and each line that it writes, in a
            thread of its own.
        token: Of the job, where other hosts start some of its processes. Where all are
            started here, they get a new one, that only they know.
    """

    def __init__(
        self,
        command: Sequence[str],
        num_local: int,
        *,
        first: int = 0,
        num_processes: int | None = None,
        coordinator: str | None = None,
        environment: Mapping[str, str]
        | Callable[[int], Mapping[str, str]]
        | None = None,
        on_line: Callable[[int, str], None] | None = None,
        token: str | None = None,
    ) -> None:
        self._command = list(command)
        self._places = range(first, first + num_local)
        self._num_processes = num_processes or num_local
        if self._num_processes == num_local:
            token = signing.new_token()
        self._token = {} if token is None else {signing.TOKEN: token}
        self._coordinator = coordinator or f"127.0.0.1:{free_port()}"
        self._environment = (
            environment if callable(environment) else lambda place: environment or {}
        )
        self._ended: list[Worker] = []
        self._on_line = on_line or (lambda index, line: None)
        self._threads: list[threading.Thread] = []
        self.workers: list[Worker] = []

    def start(self) -> None:
        """Starts all."""
        for index in self._places:
            process = subprocess.Popen(
                self._command,
                env=self._environment_of(index),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,  # So that their own children are ended with them.
                preexec_fn=_die_with_parent if sys.platform == "linux" else None,
            )
            worker = Worker(index, process, deque(maxlen=_KEPT_LINES))
            self.workers.append(worker)
            thread = threading.Thread(
                target=self._hear,
                args=(worker,),
                name=f"output of process {index}",
                daemon=True,
            )
            thread.start()
            self._threads.append(thread)

    def _environment_of(self, index: int) -> dict[str, str]:
        place = {
            "KERAS_DISTRIBUTION_JOB_ADDRESSES": self._coordinator,
            "KERAS_DISTRIBUTION_NUM_PROCESSES": str(self._num_processes),
            "KERAS_DISTRIBUTION_PROCESS_ID": str(index),
            "KERAS_DISTRIBUTE_LOCAL_PROCESS_ID": str(index - self._places.start),
            **self._token,
            "PYTHONUNBUFFERED": "1",
        }
        return {**os.environ, **place, **self._environment(index - self._places.start)}

    def _hear(self, worker: Worker) -> None:
        assert worker.process.stdout is not None
        failure: Exception | None = None
        for line in (
            worker.process.stdout
        ):  # To the end, whatever happens to it here: the process waits for that.
            worker.lines.append(line)
            if failure is None:
                try:
                    self._on_line(worker.index, line)
                except Exception as error:
                    failure = error
                    worker.lines.append(
                        f"[The output from here on could not be shown: {error!r}]\n"
                    )

    def first_failure(self, following: int | None = None) -> Worker | None:
        """The process that ended first with an error, of those that have.

        Args:
            following: The exit code of those that ended because of another one; one of
                them only if there is no other.
        """
        self.running()
        failed = [worker for worker in self._ended if worker.exit_code]
        return next(
            (worker for worker in failed if worker.exit_code != following),
            failed[0] if failed else None,
        )

    def running(self) -> list[Worker]:
        """Those that have not ended."""
        self._ended += [
            w for w in self.workers if w.exit_code is not None and w not in self._ended
        ]
        return [worker for worker in self.workers if worker not in self._ended]

    def wait(
        self,
        timeout: float | None = None,
        *,
        until_failure: bool = True,
        until: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Waits until all have ended, or one has failed.

        Args:
            timeout: Seconds; `None` for ever.
            until_failure: Whether a failure ends the waiting.
            until: Ends it, too, when it says so.

        Returns:
            Whether that came before the time was up.
        """
        end = None if timeout is None else time.monotonic() + timeout
        while (
            self.running()
            and not (until_failure and self.first_failure())
            and not until()
        ):
            if end is not None and time.monotonic() > end:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def send(self, number: int, index: int | None = None) -> None:
        """Sends a signal to one process, or to all, and to their children."""
        for worker in self.running():
            if index in (None, worker.index):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(worker.process.pid, number)

    def stop(self, grace: float = 5.0) -> None:
        """Ends all: asks them to, and kills those that have not ended after `grace`
        seconds, and their children.
        """
        if grace and self.running():
            self.send(signal.SIGTERM)
            self.send(signal.SIGCONT)  # A frozen process would not hear it.
            self.wait(grace, until_failure=False)
        for worker in self.workers:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(worker.process.pid, signal.SIGKILL)
            worker.process.wait()
        for thread in self._threads:
            thread.join(5.0)


def free_port() -> int:
    """A port that nobody listens at, at this moment."""
    with socket.socket() as server:
        server.bind(("", 0))
        return int(server.getsockname()[1])


def _die_with_parent() -> None:
    """In the new process: ends with the one that started it, even if that one is
    killed.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
