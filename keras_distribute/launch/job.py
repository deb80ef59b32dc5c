"""The processes of a job on this host: started, read, signalled and ended."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future

from keras_distribute.cluster import signing
from keras_distribute.cluster.ports import free_port

_KEPT_LINES = 400
_POLL_SECONDS = 0.05
_START_SECONDS = 10.0  # Until a process has an ID.
_WITH_PARENT = pathlib.Path(__file__).with_name("with_parent.py")


@dataclasses.dataclass(eq=False)
class Worker:
    """One process of a job, with its number on all hosts and its last lines."""

    index: int
    process: subprocess.Popen[str]
    lines: deque[str]

    @property
    def exit_code(self) -> int | None:
        """As in shells: 128 and the number of a signal that killed it."""
        code = self.process.poll()
        return 128 - code if code is not None and code < 0 else code


class Job:
    """Processes that run the same command, each with its own environment.

    Args:
        num_local: How many run on this host.
        first: The number of the first of them.
        num_processes: How many there are on all hosts; as many as here by default.
        coordinator: The address of process 0; a free port of this host by default.
        environment: From the index on this host to further variables.
        on_line: Called with the number of a process and each line that it writes, in a
            thread for each process.
        token: The token of a job of several hosts. A job of one host gets a new one.
    """

    def __init__(
        self,
        command: Sequence[str],
        num_local: int,
        *,
        first: int = 0,
        num_processes: int | None = None,
        coordinator: str | None = None,
        environment: Callable[[int], Mapping[str, str]] = lambda index: {},
        on_line: Callable[[int, str], None] | None = None,
        token: str | None = None,
    ) -> None:
        self._command = list(command)
        self._indices = range(first, first + num_local)
        self._num_processes = num_processes or num_local
        if self._num_processes == num_local:
            token = signing.new_token()
        self._token = {} if token is None else {signing.TOKEN: token}
        self._coordinator = coordinator or f"127.0.0.1:{free_port()}"
        self._environment = environment
        self._ended: list[Worker] = []
        self._on_line = on_line or (lambda index, line: None)
        self._threads: list[threading.Thread] = []
        self.workers: list[Worker] = []

    def start(self) -> None:
        """Starts all; where one cannot be, or this is interrupted, none is left."""
        started: list[Future[Worker]] = []
        try:
            for index in self._indices:
                started.append(Future())
                follow = functools.partial(self._follow, index, started[-1])
                thread = threading.Thread(target=follow, daemon=True)
                thread.start()
                self._threads.append(thread)
                self.workers.append(started[-1].result())
        except BaseException:
            # An interruption may have come while the last one was being started.
            with contextlib.suppress(Exception):
                self.workers = [each.result(_START_SECONDS) for each in started]
            self.stop(0.0)
            raise

    def _follow(self, index: int, started: Future[Worker]) -> None:
        """Starts a process, and lives as long as it: its parent is the thread that
        started it, with which it would end.
        """
        try:
            process = subprocess.Popen(
                _with_parent(self._command),
                env=self._environment_of(index),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,  # Their children are ended with them.
            )
        except BaseException as error:
            started.set_exception(error)
            return
        worker = Worker(index, process, deque(maxlen=_KEPT_LINES))
        started.set_result(worker)
        with process:  # Waits for its end, and closes the pipe.
            self._read(worker)

    def _environment_of(self, index: int) -> dict[str, str]:
        local_index = index - self._indices.start
        return {
            **os.environ,
            "KERAS_DISTRIBUTION_JOB_ADDRESSES": self._coordinator,
            "KERAS_DISTRIBUTION_NUM_PROCESSES": str(self._num_processes),
            "KERAS_DISTRIBUTION_PROCESS_ID": str(index),
            "KERAS_DISTRIBUTE_LOCAL_PROCESS_ID": str(local_index),
            **self._token,
            "PYTHONUNBUFFERED": "1",
            **self._environment(local_index),
        }

    def _read(self, worker: Worker) -> None:
        assert worker.process.stdout is not None
        shown = True
        # To the end, even after an error here: a full pipe would stop the process.
        for line in worker.process.stdout:
            worker.lines.append(line)
            if shown:
                try:
                    self._on_line(worker.index, line)
                except Exception as error:
                    shown = False
                    text = f"[The output from here on could not be shown: {error!r}]\n"
                    worker.lines.append(text)

    def first_failure(self, following: int | None = None) -> Worker | None:
        """The process that failed first; one with the exit code `following`, which
        failed because of another one, only where there is no other.
        """
        self.running()
        failed = [worker for worker in self._ended if worker.exit_code]
        own = [worker for worker in failed if worker.exit_code != following]
        return next(iter(own or failed), None)

    def running(self) -> list[Worker]:
        """The processes that have not ended; notes the order in which they do."""
        known = [worker for worker in self.workers if worker not in self._ended]
        self._ended += [worker for worker in known if worker.exit_code is not None]
        return [worker for worker in known if worker not in self._ended]

    def wait(
        self,
        timeout: float | None = None,
        *,
        until_failure: bool = True,
        until: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Waits until all have ended, or one has failed, or `until` returns `True`.

        Returns:
            Whether that came within `timeout` seconds.
        """
        start = time.monotonic()
        while self.running() and not until():
            if until_failure and self.first_failure():
                break
            if timeout is not None and time.monotonic() > start + timeout:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def send(self, number: int, index: int | None = None) -> None:
        """Sends a signal to one process, or to all, and to their children. Returns
        after `SIGSTOP` when they have stopped.
        """
        for worker in self.running():
            if index in (None, worker.index):
                pid = worker.process.pid
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, number)
                if number == signal.SIGSTOP and hasattr(os, "waitid"):
                    # Its threads go on until one of them has seen the signal.
                    with contextlib.suppress(ChildProcessError):
                        states = os.WSTOPPED | os.WEXITED | os.WNOWAIT
                        os.waitid(os.P_PID, pid, states)

    def stop(self, grace: float = 5.0) -> None:
        """Asks all and their children to end; kills them after `grace` seconds."""
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


def _with_parent(command: Sequence[str]) -> list[str]:
    """A command that ends with this process, where the system can do that."""
    if shutil.which(command[0]) is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), command[0])
    if sys.platform != "linux":
        return list(command)
    wrapper = [sys.executable, "-I", "-S", str(_WITH_PARENT), str(os.getpid())]
    return [*wrapper, *command]
