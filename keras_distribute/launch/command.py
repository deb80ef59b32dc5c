"""Starts a script in several processes of this host, and looks after them.

    python -m keras_distribute.launch --nproc 4 train.py --epochs 3
    python -m keras_distribute.launch --nproc 8 --nnodes 2 --node-rank 0 \
        --coordinator host0:1234 train.py
    python -m keras_distribute.launch debug train.py

With parameter servers (`kd.ParameterServerStrategy`) the script is the chief, and the
other tasks need none of its code; a worker that ends is started again alone, all tasks
when a server ends:

    python -m keras_distribute.launch --ps 1 --workers 2 train.py

With `--min-nnodes` the launchers of several hosts meet, with a token that all of them
know:

    (umask 077 && python -c "import secrets; print(secrets.token_hex(32))" > job.token)
    python -m keras_distribute.launch --token-file job.token --min-nnodes 1 ...

In each process `kd.MultiWorkerMirroredStrategy()` spans all of them. Output is shown
with the number of the process in front. When one process fails, the others are stopped,
and the job is started again up to `--max-restarts` times; a script that saves with
`kd.callbacks.BackupAndRestore` then goes on from its checkpoint. With `--min-nproc` it
starts again without the process that failed or froze, with `--min-nnodes` without hosts
that are gone. Global batches stay as they were. Signals are passed on to all processes;
one that does not end within `--grace` seconds is killed. The exit code is that of the
process that failed first, whose traceback is shown last.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import itertools
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from keras_distribute.cluster import signing
from keras_distribute.cluster.liveness import FOLLOWING_CODE
from keras_distribute.cluster.resolvers.slurm import gpus, share_of_gpus
from keras_distribute.cluster.signing import Seal
from keras_distribute.errors import ClusterError
from keras_distribute.launch import rendezvous
from keras_distribute.launch.job import Job, Worker
from keras_distribute.launch.rendezvous import Meeting
from keras_distribute.launch.roles import Roles

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_TAIL_LINES = 30
_CULPRIT_SECONDS = 6.0  # Longer than process 0 waits for the others.
_FIRST_SECONDS = 300.0  # Hosts may start at different times.
_TRACEBACK = "Traceback (most recent call last):"
_HELP = {
    "nproc": (int, "processes on this host"),
    "nnodes": (int, "hosts"),
    "node_rank": (int, "the number of this host, from 0"),
    "coordinator": (str, "address of the first host, host:port"),
    "max_restarts": (int, "how often to start again after a failure"),
    "min_nproc": (int, "start again without those that failed, at least with these"),
    "min_nnodes": (int, "start again without lost hosts, at least with these"),
    "node_timeout": (float, "seconds to wait for the other hosts then"),
    "cpu_devices": (int, "virtual CPU devices of each process"),
    "grace": (float, "seconds from a signal until processes are killed"),
    "log_dir": (Path, "folder for the output of each process"),
    "workers": (int, "workers of parameter servers, on this host"),
    "ps": (int, "parameter servers"),
    "token_file": (Path, f"token of a job of several hosts; else {signing.TOKEN}"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """How a script is started.

    Args:
        nproc: The processes on this host.
        nnodes: The hosts.
        node_rank: The number of this one.
        coordinator: The address of process 0, `host:port`; needed for several hosts.
        max_restarts: How often the job is started again after a failure.
        min_nproc: On one host: starts again without the process that failed, and its
            share of the GPUs, while at least this number is left; `None` starts all of
            them again.
        min_nnodes: On several hosts: starts again without those whose launcher does not
            come back, while at least this number is left, the first host among them.
        node_timeout: Seconds to wait for the launchers of the others before the job is
            started again; before the first start it is five minutes, or longer if this
            is.
        cpu_devices: The virtual CPU devices of each process, which then uses no
            accelerator.
        grace: Seconds from a signal until all are killed; from the failure of a process
            at most five.
        log_dir: A folder for the output of each process.
        workers: On one host: the workers of a job with parameter servers.
        ps: Its parameter servers.
        token_file: A file with the token of a job of several hosts, the same for all of
            them; `None` for that in `KERAS_DISTRIBUTE_JOB_TOKEN`, or for none. Hosts
            meet with a token alone; on one host each job gets its own.

    Raises:
        ClusterError: For invalid numbers, several hosts without an address or with
            `min_nproc`, hosts that are to meet without a token, and an invalid token.
    """

    nproc: int = 1
    nnodes: int = 1
    node_rank: int = 0
    coordinator: str | None = None
    max_restarts: int = 0
    min_nproc: int | None = None
    min_nnodes: int | None = None
    node_timeout: float = 60.0
    cpu_devices: int | None = None
    grace: float = 30.0
    log_dir: Path | None = None
    workers: int = 0
    ps: int = 0
    token_file: Path | None = None

    def __post_init__(self) -> None:
        names = ("max_restarts", "node_timeout", "grace", "workers", "ps")
        least = dict.fromkeys(names, 0)
        least |= dict.fromkeys(("nproc", "nnodes", "cpu_devices"), 1)
        for name, limit in least.items():
            value = getattr(self, name)
            if value is not None and value < limit:
                fix = f"--{name.replace('_', '-')} {max(limit, 1)}"
                _refuse(f"{name} is at least {limit}.", f"{value}", fix)
        several = self.nnodes > 1
        roles = self.workers or self.ps
        if roles and (not (self.workers and self.ps) or self.nproc > 1 or several):
            _refuse(
                "A job with parameter servers has workers and servers, on one host.",
                f"workers={self.workers}, ps={self.ps}, nproc={self.nproc}, "
                f"nnodes={self.nnodes}",
                "--ps 1 --workers 2",
            )
        if self.min_nproc is not None and (
            several or not 1 <= self.min_nproc <= self.nproc
        ):
            _refuse(
                "A job on one host may be started again with fewer processes, at least "
                "one.",
                f"min_nproc={self.min_nproc}, nproc={self.nproc}, nnodes={self.nnodes}",
                "--nproc 4 --min-nproc 2 --max-restarts 2",
            )
        if self.min_nnodes is not None and not 1 <= self.min_nnodes <= self.nnodes:
            _refuse(
                f"Of {self.nnodes} hosts 1 to {self.nnodes} may be needed.",
                f"--min-nnodes {self.min_nnodes}",
                "--nnodes 4 --min-nnodes 2 --max-restarts 2",
            )
        if not 0 <= self.node_rank < self.nnodes:
            _refuse(
                f"The number of this host is from 0 to {self.nnodes - 1}.",
                f"--node-rank {self.node_rank}",
                "count the hosts from 0.",
            )
        if several and self.coordinator is None:
            _refuse(
                "Several hosts need the address of the first one to find each other.",
                f"--nnodes {self.nnodes} without --coordinator",
                "--coordinator host0:1234, the same on every host; any free port of "
                "host0.",
            )
        if self.hosts_meet:
            rendezvous.address_of(self.coordinator or "")
        seal = signing.seal_of_job(self.token_file)  # Raises for an invalid token now.
        if self.hosts_meet and not seal.signs:
            raise rendezvous.without_token()

    @property
    def hosts_meet(self) -> bool:
        """Whether the launchers of several hosts meet before each start."""
        return self.nnodes > 1 and self.min_nnodes is not None


def _refuse(what: str, received: str, fix: str) -> None:
    raise ClusterError(what, received=f"{received}.", fix=fix)


class _Output:
    """Shows the lines of all processes, each with the number in front."""

    def __init__(self, options: LaunchOptions) -> None:
        last = options.nproc * options.nnodes - 1
        self._width = len("worker:0") if options.ps else len(str(last))
        self._log_dir = options.log_dir
        self._files: dict[int | str, TextIO] = {}
        self._lock = threading.Lock()

    def __call__(self, index: int | str, line: str) -> None:
        with self._lock:
            _print(f"[{index:>{self._width}}] {line.rstrip()}")
            if self._log_dir is None:
                return
            try:
                self._write(self._log_dir, index, line)
            except OSError as error:
                _say(f"writes no logs any more, only here: {error}.")
                self._log_dir = None

    def _write(self, folder: Path, index: int | str, line: str) -> None:
        if index not in self._files:
            folder.mkdir(parents=True, exist_ok=True)
            name = str(index).replace(":", "-")
            path = folder / f"process-{name}.log"
            self._files[index] = path.open("a", encoding="utf-8")
        self._files[index].write(line)
        self._files[index].flush()

    def close(self) -> None:
        for file in self._files.values():
            with contextlib.suppress(OSError):  # It was said when it was written.
                file.close()


def launch(command: Sequence[str], options: LaunchOptions) -> int:
    """Runs a command in several processes, to its end.

    Args:
        command: What each process runs.
        options: How many, and what to do about failures.

    Returns:
        0, or the exit code of the process that failed first.
    """
    output = _Output(options)
    if options.ps:
        launcher = Roles(
            command,
            options.workers,
            options.ps,
            cpu_devices=options.cpu_devices,
            max_restarts=options.max_restarts,
            grace=options.grace,
            on_line=output,
            tell=_say,
        )
    else:
        launcher = _Launcher(command, options, output)
    # One that is ignored stays so: SIGHUP by `nohup`.
    heard = [each for each in _SIGNALS if signal.getsignal(each) != signal.SIG_IGN]
    previous = {
        each: signal.signal(each, lambda number, _: launcher.signals.append(number))
        for each in heard
    }
    try:
        return launcher.run()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        output.close()


class _Launcher:
    """Starts the job of this host, again where that is allowed."""

    def __init__(
        self, command: Sequence[str], options: LaunchOptions, output: _Output
    ) -> None:
        self._command, self._options, self._output = command, options, output
        self.signals: list[int] = []  # Which would have ended this process.
        # The local indices of the processes that take part, whose GPUs stay the same.
        self._local = list(range(options.nproc))
        self._token = signing.token_of_job(options.token_file)

    def run(self) -> int:
        options = self._options
        for attempt in itertools.count():
            try:
                job = self._job(attempt, self._meet(attempt))
            except ClusterError as error:
                _say(str(error))
                return 1
            failed, lost = self._run(job)
            if failed is None:
                return 0
            if not self.signals:
                _report(failed, job)
            if self.signals or attempt == options.max_restarts:
                return failed.exit_code or 1
            left = [place for i, place in enumerate(self._local) if i not in lost]
            if options.min_nproc is not None and len(left) >= options.min_nproc:
                self._local = left
                _say(f"goes on with {len(left)} of {options.nproc} processes.")
            count = f"{_ordinal(attempt + 1)} time of {options.max_restarts}"
            _say(f"starts the job again, for the {count}.")
        raise AssertionError("the loop has no end")

    def _meet(self, attempt: int) -> Meeting:
        """The numbers of the processes of this host, and how many take part on all."""
        options, num_local = self._options, len(self._local)
        if not options.hosts_meet:
            one = options.nnodes == 1
            count = num_local if one else options.nproc * options.nnodes
            first = options.nproc * options.node_rank
            return Meeting(first, count, tuple(range(options.nnodes)))
        first_wait = 0.0 if attempt else _FIRST_SECONDS
        meeting = rendezvous.meet(
            rendezvous.address_of(options.coordinator or ""),
            options.node_rank,
            num_local,
            num_hosts=options.nnodes,
            least=options.min_nnodes or 1,
            seconds=max(options.node_timeout, first_wait),
            seal=Seal(None if self._token is None else self._token.encode()),
            given_up=lambda: bool(self.signals),
            tell=_say,
        )
        if len(meeting.hosts) < options.nnodes:
            hosts = ", ".join(map(str, meeting.hosts))
            _say(f"goes on with the hosts {hosts} of {options.nnodes}.")
        return meeting

    def _job(self, attempt: int, meeting: Meeting) -> Job:
        options, local = self._options, self._local
        cpus = options.cpu_devices
        visible = [] if cpus is not None or options.nproc == 1 else gpus()
        if 0 < len(visible) < options.nproc and _has_gpus():
            _say(
                f"{options.nproc} processes share {len(visible)} GPU(s), which NCCL "
                "refuses: --nproc as many as there are GPUs, or --cpu-devices 1."
            )

        def environment(index: int) -> Mapping[str, str]:
            variables = {"KERAS_DISTRIBUTE_RESTARTS": str(attempt)}
            if cpus is not None:
                variables["JAX_PLATFORMS"] = "cpu"
                variables["JAX_NUM_CPU_DEVICES"] = str(cpus)
            return variables | share_of_gpus(visible, local[index], options.nproc)

        return Job(
            self._command,
            len(local),
            first=meeting.first,
            num_processes=meeting.num_processes,
            coordinator=options.coordinator,
            environment=environment,
            on_line=self._output,
            token=self._token,
        )

    def _run(self, job: Job) -> tuple[Worker | None, list[int]]:
        """Runs a job until it ends, fails, or a signal comes; the process that failed
        first, and the indices of those that were the reason: itself, or frozen ones.
        """
        grace, received = self._options.grace, self.signals
        lost: list[int] = []
        job.start()
        try:
            job.wait(until=lambda: bool(received))
            if received:
                name = signal.Signals(received[0]).name
                _say(f"passes on {name}; what runs after {grace:.0f} s is killed.")
                job.send(received[0])
                # A second signal is impatient.
                job.wait(grace, until_failure=False, until=lambda: len(received) > 1)
            elif _only_followed(job):
                # Process 0 lets all others end first; a frozen process never ends.
                job.wait(
                    _CULPRIT_SECONDS,
                    until_failure=False,
                    until=lambda: not _only_followed(job),
                )
            failed = job.first_failure(FOLLOWING_CODE)
            if failed is not None:
                frozen = job.running() if failed.exit_code == FOLLOWING_CODE else []
                lost = [job.workers.index(worker) for worker in frozen or [failed]]
        finally:
            job.stop(0.0 if received else min(grace, 5.0))
        # Those that a signal did not end were killed now.
        return failed or job.first_failure(), lost


def _only_followed(job: Job) -> bool:
    """Whether all processes that have failed did so because of another one."""
    failed = job.first_failure(FOLLOWING_CODE)
    return failed is not None and failed.exit_code == FOLLOWING_CODE


def _report(failed: Worker, job: Job) -> None:
    lines = list(failed.lines)
    begins = [i for i, line in enumerate(lines) if _TRACEBACK in line]
    shown = lines[begins[-1] :] if begins else lines[-_TAIL_LINES:]
    code = failed.exit_code or 1
    how = f"exit code {code}"
    if code - 128 in set(signal.Signals):
        how += f", {signal.Signals(code - 128).name}"
    stopped = [worker.index for worker in job.workers if worker is not failed]
    _say(
        f"process {failed.index} failed first ({how}); the others, "
        f"{stopped or 'none'}, were stopped. Its last lines:"
    )
    for line in shown:
        _print(f"    {line.rstrip()}")


def _has_gpus() -> bool:
    """Whether JAX would take the GPUs that there are."""
    platforms = os.environ.get("JAX_PLATFORMS", "")
    plugins = [f"jax_cuda{version}_plugin" for version in (12, 13)]
    chosen = not platforms or "cuda" in platforms or "gpu" in platforms
    return chosen and any(map(importlib.util.find_spec, plugins))


def _say(text: str) -> None:
    _print(f"[launch] {text}")


def _print(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _ordinal(number: int) -> str:
    endings = {1: "st", 2: "nd", 3: "rd"}
    teen = number % 100 in (11, 12, 13)
    return f"{number}{'th' if teen else endings.get(number % 10, 'th')}"


def main(
    arguments: Sequence[str] | None = None,
    prog: str = "python -m keras_distribute.launch",
) -> int:
    """The command line; returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    defaults: dict[str, Any] = {
        field.name: field.default for field in dataclasses.fields(LaunchOptions)
    }
    if given[:1] == ["debug"]:
        given = given[1:]
        defaults |= {"nproc": 2, "cpu_devices": 1}
    parser = argparse.ArgumentParser(
        prog=prog,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for name, (kind, text) in _HELP.items():
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=kind, default=defaults[name], help=text)
    text = "the script is the name of a module"
    parser.add_argument("-m", dest="module", action="store_true", help=text)
    text = "what to run; `debug` in front of all: two processes of one CPU device"
    parser.add_argument("script", help=text)
    text = "its arguments"
    parser.add_argument("script_arguments", nargs=argparse.REMAINDER, help=text)
    parsed = parser.parse_args(given)
    try:
        options = LaunchOptions(**{name: getattr(parsed, name) for name in _HELP})
    except ClusterError as error:
        parser.error(str(error))
    module = ["-m"] if parsed.module else []
    script = [parsed.script, *parsed.script_arguments]
    return launch([sys.executable, "-u", *module, *script], options)
