"""Runs a function in several processes of this host, and returns their results."""

from __future__ import annotations

import builtins
import dataclasses
import inspect
import operator
import os
import pickle
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from keras_distribute import checks, config
from keras_distribute.cluster.liveness import FOLLOWING_CODE
from keras_distribute.cluster.resolvers.slurm import gpus, share_of_gpus
from keras_distribute.errors import ClusterError, StructureTypeError
from keras_distribute.launch.folders import check_private
from keras_distribute.launch.job import Job
from keras_distribute.launch.modules import MAIN, file_of_main, loaded

_MOST = 2**12  # Processes, or virtual devices of each: more are a typing error.
_STOP_SECONDS = 2.0
_FOLLOWING_SECONDS = 10.0  # Until the others have heard of a failure, and ended.


@dataclasses.dataclass(frozen=True)
class ProcessResult:
    """The result of one process.

    Args:
        index: Its number.
        exit_code: 0 where the function returned; 128 and the number of the signal for
            one that was killed.
        value: What the function returned, else `None`.
        error: The exception that it raised, as text, else `None`.
        log: The last lines that it wrote.
    """

    index: int
    exit_code: int
    value: Any
    error: str | None
    log: str


class MultiProcessRunner:
    """Runs a function in several processes of this host, as in a cluster.

    In each, `kd.MultiWorkerMirroredStrategy()` spans all of them. Used as a `with`
    block, it never leaves a process behind.

    Args:
        function: A named function at the top of a module: each process imports it.
        num_processes: The number of processes.
        args: The function's arguments; picklable, as its result.
        kwargs: The function's keyword arguments; picklable.
        cpu_devices: The virtual CPU devices of each; `None` for the accelerators of
            this host, shared by all.
        timeout: Seconds until all are killed.
        environment: Further environment variables.
        echo: Whether to print their output, with the number of the process in front.
        by_value: Whether to send the function itself, by `cloudpickle`, and not its
            name: for a function without a file, such as one of a notebook. Arguments
            and results may then be of classes without a file.

    Raises:
        BackendError: For `by_value` without `cloudpickle`.
        StructureTypeError: For a function that cannot be found by its name.
        ClusterError: Where others may write in the folder that the processes share.

    Example:
        >>> import math, keras_distribute as kd
        >>> with kd.testing.MultiProcessRunner(math.factorial, 2, args=(4,)) as runner:
        ...     [result.value for result in runner.join()]
        [24, 24]
    """

    def __init__(
        self,
        function: Callable[..., Any],
        num_processes: int = 2,
        *,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        cpu_devices: int | None = 1,
        timeout: float = 120.0,
        environment: Mapping[str, str] | None = None,
        echo: bool = False,
        by_value: bool = False,
    ) -> None:
        fix = "run_in_processes(function, 2)"
        checks.function("function", function, "Processes run a function.", fix)
        checks.count("num_processes", num_processes, 1, most=_MOST)
        checks.instance("args", args, list | tuple, "Arguments come as a tuple.", fix)
        for given, names in (("kwargs", kwargs), ("environment", environment)):
            of_texts = ", of texts" if given == "environment" else ""
            what = f"{given} is a dict by name{of_texts}."
            checks.instance(given, names, Mapping | None, what, fix)
            for key, value in (names or {}).items():
                checks.instance(given, key, str, what, fix)
                if given == "environment":
                    checks.instance(given, value, str, what, fix)
        if cpu_devices is not None:
            checks.count("cpu_devices", cpu_devices, 1, most=_MOST)
        checks.number("timeout", timeout)
        for given, flag in (("echo", echo), ("by_value", by_value)):
            checks.flag(given, flag)
        name = getattr(function, "__qualname__", "")
        module = inspect.getmodule(function)
        if not by_value and not _is_found(function, module, name):
            raise StructureTypeError(
                "The processes find a function by its module and its name.",
                received=f"{function!r}.",
                fix="define it with def at the top of a module that is a file; one of "
                "a notebook is run by kd.notebook_launcher.",
            )
        self._timeout, self._num_processes, self._name = timeout, num_processes, name
        dumps = _dumps_by_value() if by_value else pickle.dumps
        call = {
            "path": [os.getcwd(), *sys.path],
            "module": getattr(module, "__name__", "builtins"),
            "main": file_of_main(),
            "name": name,
            "arguments": dumps((tuple(args), dict(kwargs or {}))),
            "function": dumps(function) if by_value else None,
        }
        self._folder = Path(tempfile.mkdtemp(prefix="keras_distribute_"))
        check_private(self._folder)
        (self._folder / "call").write_bytes(pickle.dumps(call))
        self._job = Job(
            [sys.executable, "-m", "keras_distribute.launch.child", str(self._folder)],
            num_processes,
            environment=_environment_of(num_processes, cpu_devices, environment or {}),
            on_line=_echo if echo else None,
        )

    def start(self) -> MultiProcessRunner:
        """Starts the processes."""
        try:
            self._job.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __enter__(self) -> MultiProcessRunner:
        return self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    @property
    def num_running(self) -> int:
        """The number of processes that have not ended."""
        return len(self._job.running())

    def kill(self, index: int, number: int = signal.SIGKILL) -> None:
        """Sends a signal to one process."""
        self._job.send(number, index)

    def freeze(self, index: int) -> None:
        """Stops one process, as if its host were frozen."""
        self._job.send(signal.SIGSTOP, index)

    def thaw(self, index: int) -> None:
        """Continues a process that `freeze` has stopped."""
        self._job.send(signal.SIGCONT, index)

    def log(self, index: int) -> str:
        """The last lines that a process has written so far."""
        return "".join(self._job.workers[index].lines)

    def join(
        self, timeout: float | None = None, *, until_failure: bool = False
    ) -> list[ProcessResult]:
        """Waits until all have ended; kills the rest when the time is up.

        Args:
            timeout: Seconds; by default that of the runner.
            until_failure: Whether to kill the rest, too, some seconds after one failed.

        Returns:
            One result for each process.

        Raises:
            ClusterError: When the time was up; with the logs of all.
        """
        timeout = self._timeout if timeout is None else timeout
        in_time = self._job.wait(timeout, until_failure=until_failure)
        if until_failure and self._job.first_failure():
            self._job.wait(_FOLLOWING_SECONDS, until_failure=False)
        running = [worker.index for worker in self._job.running()]
        self._job.stop(0.0)
        results = [self._result(index) for index in range(self._num_processes)]
        if not in_time:
            names = ", ".join(map(str, running))
            limits = f"{self._num_processes} processes, {timeout:g} seconds."
            raise ClusterError(
                f"{self._name} did not end in time in process {names}.",
                received=limits + _logs(results),
                fix="look at the logs; the process that waits is not always the one "
                "that is wrong.",
            )
        return results

    def stop(self) -> None:
        """Kills what still runs, and deletes the runner's files."""
        self._job.stop(_STOP_SECONDS if self._job.running() else 0.0)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _result(self, index: int) -> ProcessResult:
        worker = self._job.workers[index]
        file = self._folder / f"result-{index}"
        value, error = None, None
        if file.exists():
            check_private(self._folder)
            value, error = loaded(file.read_bytes())
        return ProcessResult(
            index, worker.exit_code or 0, value, error, "".join(worker.lines)
        )


def run_in_processes(
    function: Callable[..., Any],
    num_processes: int = 2,
    *args: Any,
    cpu_devices: int = 1,
    timeout: float = 120.0,
    environment: Mapping[str, str] | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Runs a function in several processes, and returns what each returned.

    Args:
        function: A named function at the top of a module: each process imports it.
        num_processes: The number of processes.
        *args: The function's arguments.
        cpu_devices: The virtual CPU devices of each process.
        timeout: Seconds until all are killed.
        environment: Further environment variables.
        **kwargs: The function's keyword arguments.

    Raises:
        ClusterError: Where one failed or the time was up; with the error and the logs.

    Example:
        >>> import math, keras_distribute as kd
        >>> kd.testing.run_in_processes(math.factorial, 2, 3)
        [6, 6]
    """
    runner = MultiProcessRunner(
        function,
        num_processes,
        args=args,
        kwargs=kwargs,
        cpu_devices=cpu_devices,
        timeout=timeout,
        environment=environment,
    )
    with runner:
        results = runner.join()
    return values_of(results)


def values_of(results: Sequence[ProcessResult]) -> list[Any]:
    """What each process returned.

    Raises:
        ClusterError: Where one failed; with its error, and the logs of all that did.
    """
    failed = [result for result in results if result.exit_code]
    if failed:
        own = [each for each in failed if each.exit_code != FOLLOWING_CODE] or failed
        first = next((each for each in own if each.error), own[0])
        raise ClusterError(
            f"{len(failed)} of {len(results)} processes failed; process {first.index} "
            f"with exit code {first.exit_code}.",
            received=(first.error or "no exception.") + _logs(failed),
            fix="look at the first exception; the others often follow from it.",
        )
    return [result.value for result in results]


def _is_found(function: Callable[..., Any], module: Any, name: str) -> bool:
    """Whether another process finds this very function in its module by its name."""
    if getattr(module, "__name__", "builtins") == MAIN:
        file = file_of_main()
        if file is None or not os.path.exists(file):
            return False
    try:
        return operator.attrgetter(name)(module or builtins) == function
    except AttributeError:
        return False


def _environment_of(
    num_processes: int, cpu_devices: int | None, environment: Mapping[str, str]
) -> Callable[[int], Mapping[str, str]]:
    """A function from the index of a process to its environment variables."""
    common = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    if cpu_devices is not None:
        common |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(cpu_devices)}
        common |= {"XLA_FLAGS": "", "NPROC": ""}
    if "NPROC" in environment:
        common |= {config.SET_HERE: ""}
    visible = gpus() if cpu_devices is None else []
    return lambda index: {
        **common,
        **share_of_gpus(visible, index, num_processes),
        **environment,
    }


def _dumps_by_value() -> Callable[[Any], bytes]:
    what = "A function without a file is sent to other processes by cloudpickle."
    return checks.imported("cloudpickle", what, "pip install cloudpickle").dumps


def _logs(results: Sequence[ProcessResult]) -> str:
    return "".join(
        f"\n--- process {r.index} (exit code {r.exit_code}) ---\n{r.log}"
        for r in results
    )


def _echo(index: int, line: str) -> None:
    sys.stdout.write(f"[{index}] {line}")
