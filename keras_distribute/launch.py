"""Starts a script in several processes of this host, and looks after them.

    python -m keras_distribute.launch --nproc 4 train.py --epochs 3
    python -m keras_distribute.launch --nproc 8 --nnodes 2 --node-rank 0 --coordinator host0:1234 train.py
    python -m keras_distribute.launch debug train.py

With `--min-nnodes` the launchers of several hosts meet, with a token that all of them
know:

    (umask 077 && python -c "import secrets; print(secrets.token_hex(32))" > job.token)
    python -m keras_distribute.launch --token-file job.token --min-nnodes 1 ...

In each process `kd.MultiWorkerMirroredStrategy()` spans all of them. Output is shown
with the number of the process in front. When one process fails, the others are stopped,
and the job is started again as often as `--max-restarts` says; a script that saves with
`kd.callbacks.BackupAndRestore` then goes on from its checkpoint. With `--min-nproc` it
starts again without the process that failed or froze, as long as so many are left; with
`--min-nnodes` without hosts that are gone. Global batches stay as they were. Signals
are passed on to all processes; one that does not end within `--grace` seconds is
killed. The exit code is that of the process that failed first, whose traceback is shown
last.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from keras_distribute.cluster import rendezvous, signing
from keras_distribute.cluster.job import Job, Worker
from keras_distribute.cluster.liveness import FOLLOWING_CODE
from keras_distribute.cluster.rendezvous import Meeting
from keras_distribute.cluster.signing import Seal
from keras_distribute.cluster.slurm import gpus, share_of_gpus
from keras_distribute.errors import ClusterError

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_TAIL_LINES = 30
_CULPRIT_SECONDS = 6.0  # Longer than process 0 waits for the others.
_FIRST_SECONDS = 300.0  # Hosts may start at different times.
_TRACEBACK = "Traceback (most recent call last):"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """How a script is started.

    Args:
        nproc: The processes on this host.
        nnodes: The hosts.
        node_rank: The number of this one.
        coordinator: The address of process 0, `host:port`; needed for several hosts.
        max_restarts: How often the job is started again after a failure.
        min_nproc: Where it is given, a job is started again without the process that
            failed, and its share of the GPUs, unless fewer than so many were left;
            `None` starts all of them again. For one host.
        min_nnodes: Where it is given, a job of several hosts is started again without
            those whose launcher does not come back, unless fewer than so many are left;
            the first host has to be one of them.
        node_timeout: Seconds to wait for the launchers of the others before the job is
            started again; before the first start it is five minutes, or longer if this
            is.
        cpu_devices: The virtual CPU devices of each process, which then uses no
            accelerator.
        grace: Seconds from a signal, or from the failure of a process, until all are
            killed.
        log_dir: A folder for the output of each process.
        token_file: A file with the token of a job of several hosts, the same for all of
            them; `None` for that in `KERAS_DISTRIBUTE_JOB_TOKEN`, or for none. Hosts
            meet with a token alone; on one host each job gets its own.

    Raises:
        ClusterError: For numbers that make no sense, and for several hosts without an
            address, or with `min_nproc`; for hosts that are to meet without a token,
            and for a token that cannot be one.
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
    token_file: Path | None = None

    def __post_init__(self) -> None:
        for name, least in (
            ("nproc", 1),
            ("nnodes", 1),
            ("max_restarts", 0),
            ("node_timeout", 0),
            ("grace", 0),
        ):
            if getattr(self, name) < least:
                raise ClusterError(
                    f"{name} is at least {least}.",
                    received=f"{getattr(self, name)}.",
                    fix="--nproc 2",
                )
        if self.cpu_devices is not None and self.cpu_devices < 1:
            raise ClusterError(
                "cpu_devices is at least 1.",
                received=f"{self.cpu_devices}.",
                fix="--cpu-devices 1",
            )
        if self.min_nproc is not None and (
            self.nnodes > 1 or not 1 <= self.min_nproc <= self.nproc
        ):
            raise ClusterError(
                "A job on one host may be started again with fewer processes, at least "
                "one.",
                received=f"min_nproc={self.min_nproc}, nproc={self.nproc}, "
                f"nnodes={self.nnodes}.",
                fix="--nproc 4 --min-nproc 2 --max-restarts 2",
            )
        if self.min_nnodes is not None and not 1 <= self.min_nnodes <= self.nnodes:
            raise ClusterError(
                f"Of {self.nnodes} hosts 1 to {self.nnodes} may be needed.",
                received=f"--min-nnodes {self.min_nnodes}.",
                fix="--nnodes 4 --min-nnodes 2 --max-restarts 2",
            )
        if not 0 <= self.node_rank < self.nnodes:
            raise ClusterError(
                f"The number of this host is from 0 to {self.nnodes - 1}.",
                received=f"--node-rank {self.node_rank}.",
                fix="count the hosts from 0.",
            )
        if self.nnodes > 1 and self.coordinator is None:
            raise ClusterError(
                "Several hosts need the address of the first one to find each other.",
                received=f"--nnodes {self.nnodes} without --coordinator.",
                fix="--coordinator host0:1234, the same on every host; any free port "
                "of host0.",
            )
        if self.nnodes > 1 and self.min_nnodes is not None:
            rendezvous.address_of(self.coordinator or "")
        seal = signing.seal_of_job(self.token_file)  # What is wrong is said now.
        if self.nnodes > 1 and self.min_nnodes is not None and not seal.signs:
            raise rendezvous.without_token()


class _Output:
    """Shows the lines of all processes, each whole, with the number in front; and keeps
    them in files.
    """

    def __init__(self, log_dir: Path | None, width: int) -> None:
        self._log_dir, self._width = log_dir, width
        self._files: dict[int, TextIO] = {}
        self._lock = threading.Lock()

    def __call__(self, index: int, line: str) -> None:
        with self._lock:
            sys.stdout.write(f"[{index:>{self._width}}] {line.rstrip()}\n")
            sys.stdout.flush()
            if self._log_dir is not None:
                if index not in self._files:
                    self._log_dir.mkdir(parents=True, exist_ok=True)
                    self._files[index] = (self._log_dir / f"process-{index}.log").open(
                        "a"
                    )
                self._files[index].write(line)
                self._files[index].flush()

    def close(self) -> None:
        for file in self._files.values():
            file.close()


def launch(command: Sequence[str], options: LaunchOptions) -> int:
    """Runs a command in several processes, to its end.

    Args:
        command: What each process runs.
        options: How many, and what to do about failures.

    Returns:
        0, or the exit code of the process that failed first.
    """
    last = options.nproc * options.nnodes - 1
    output = _Output(options.log_dir, len(str(last)))
    received: list[int] = []
    previous = _pass_on(received)
    places = list(range(options.nproc))
    token = signing.token_of_job(options.token_file)
    seal = Seal(None if token is None else token.encode())
    try:
        for attempt in itertools.count():
            try:
                meeting = _meet(options, attempt, len(places), received, seal)
                job = _job(command, options, attempt, output, places, meeting, token)
            except ClusterError as error:
                _say(str(error))
                return 1
            failed, lost = _run(job, options.grace, received)
            if failed is None:
                return 0
            if not received:
                _report(failed, job)
            if received or attempt == options.max_restarts:
                return failed.exit_code or 1
            if (
                options.min_nproc is not None
                and len(places) - len(lost) >= options.min_nproc
            ):
                places = [place for i, place in enumerate(places) if i not in lost]
                _say(f"goes on with {len(places)} of {options.nproc} processes.")
            _say(
                f"starts the job again, for the {_ordinal(attempt + 1)} time of "
                f"{options.max_restarts}."
            )
        raise AssertionError("the loop has no end")
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        output.close()


def _meet(
    options: LaunchOptions,
    attempt: int,
    num_local: int,
    received: list[int],
    seal: Seal,
) -> Meeting:
    """Which numbers the processes of this host have, and how many there are on all that
    take part.
    """
    if options.min_nnodes is None or options.nnodes == 1:
        hosts = tuple(range(options.nnodes))
        count = num_local if options.nnodes == 1 else options.nproc * options.nnodes
        return Meeting(options.nproc * options.node_rank, count, hosts)
    assert options.coordinator is not None
    meeting = rendezvous.meet(
        rendezvous.address_of(options.coordinator),
        options.node_rank,
        num_local,
        num_hosts=options.nnodes,
        least=options.min_nnodes,
        seconds=options.node_timeout
        if attempt
        else max(options.node_timeout, _FIRST_SECONDS),
        seal=seal,
        given_up=lambda: bool(received),
        tell=_say,
    )
    if len(meeting.hosts) < options.nnodes:
        _say(
            f"goes on with the hosts {', '.join(map(str, meeting.hosts))} of "
            f"{options.nnodes}."
        )
    return meeting


def _job(
    command: Sequence[str],
    options: LaunchOptions,
    attempt: int,
    output: Callable[[int, str], None],
    places: Sequence[int],
    meeting: Meeting,
    token: str | None,
) -> Job:
    """A job with a process for each of the places on this host that are left."""
    own = [] if options.cpu_devices is not None or options.nproc == 1 else gpus()

    def environment(index: int) -> Mapping[str, str]:
        place = places[index]
        variables = {"KERAS_DISTRIBUTE_RESTARTS": str(attempt)}
        if options.cpu_devices is not None:
            variables |= {
                "JAX_PLATFORMS": "cpu",
                "JAX_NUM_CPU_DEVICES": str(options.cpu_devices),
            }
        return variables | share_of_gpus(own, place, options.nproc)

    return Job(
        command,
        len(places),
        first=meeting.first,
        num_processes=meeting.num_processes,
        coordinator=options.coordinator,
        environment=environment,
        on_line=output,
        token=token,
    )


def _run(
    job: Job, grace: float, received: list[int]
) -> tuple[Worker | None, list[int]]:
    """Runs a job until it ends, fails, or a signal comes.

    Returns:
        The process that failed first, and the places of those that were the reason:
        itself, or those that froze.
    """
    lost: list[int] = []
    job.start()
    try:
        job.wait(until=lambda: bool(received))
        if received:
            _say(
                f"passes on {signal.Signals(received[0]).name}; whoever has not ended "
                f"in {grace:.0f} s is killed."
            )
            job.send(received[0])
            job.wait(
                grace, until_failure=False, until=lambda: len(received) > 1
            )  # A second signal is impatient.
        elif _followed(
            job
        ):  # Process 0 lets all others end first; a frozen process does not end by itself.
            job.wait(
                _CULPRIT_SECONDS, until_failure=False, until=lambda: not _followed(job)
            )
        failed = job.first_failure(FOLLOWING_CODE)
        if failed is not None:
            frozen = job.running() if failed.exit_code == FOLLOWING_CODE else []
            lost = [job.workers.index(worker) for worker in frozen or [failed]]
    finally:
        job.stop(min(grace, 5.0) if not received else 0.0)
    return (
        failed or job.first_failure(),
        lost,
    )  # Those that did not end by themselves after a signal were killed.


def _followed(job: Job) -> bool:
    """Whether all processes that have failed did so because of another one."""
    failed = job.first_failure(FOLLOWING_CODE)
    return failed is not None and failed.exit_code == FOLLOWING_CODE


def _pass_on(received: list[int]) -> dict[int, Any]:
    """Notes signals rather than ending; returns the handlers that were there."""

    def note(number: int, _: FrameType | None) -> None:
        received.append(number)

    return {number: signal.signal(number, note) for number in _SIGNALS}


def _report(failed: Worker, job: Job) -> None:
    lines = list(failed.lines)
    begins = [i for i, line in enumerate(lines) if _TRACEBACK in line]
    shown = lines[begins[-1] :] if begins else lines[-_TAIL_LINES:]
    code = failed.exit_code or 1
    how = f"exit code {code}" + (
        f", {signal.Signals(code - 128).name}" if 128 < code < 128 + 64 else ""
    )
    stopped = [worker.index for worker in job.workers if worker is not failed]
    _say(
        f"process {failed.index} failed first ({how}); the others, "
        f"{stopped or 'none'}, were stopped. Its last lines:"
    )
    sys.stdout.write("".join(f"    {line.rstrip()}\n" for line in shown))
    sys.stdout.flush()


def _say(text: str) -> None:
    sys.stdout.write(f"[launch] {text}\n")
    sys.stdout.flush()


def _ordinal(number: int) -> str:
    return f"{number}{'th' if number % 100 in (11, 12, 13) else {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th')}"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = given[:1] == ["debug"]
    parser = argparse.ArgumentParser(
        prog="python -m keras_distribute.launch",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--nproc", type=int, default=2 if debug else 1, help="processes on this host"
    )
    parser.add_argument("--nnodes", type=int, default=1, help="hosts")
    parser.add_argument(
        "--node-rank", type=int, default=0, help="the number of this host, from 0"
    )
    parser.add_argument(
        "--coordinator",
        help="address of the first host, host:port; needed for several hosts",
    )
    parser.add_argument(
        "--max-restarts",
        type=int,
        default=0,
        help="how often to start again after a failure",
    )
    parser.add_argument(
        "--min-nproc",
        type=int,
        help="start again without those that failed, with at least so many",
    )
    parser.add_argument(
        "--min-nnodes",
        type=int,
        help="start again without hosts that are gone, with at least so many",
    )
    parser.add_argument(
        "--node-timeout",
        type=float,
        default=60.0,
        help="seconds to wait for the other hosts then",
    )
    parser.add_argument(
        "--cpu-devices",
        type=int,
        default=1 if debug else None,
        help="virtual CPU devices of each process",
    )
    parser.add_argument(
        "--grace",
        type=float,
        default=30.0,
        help="seconds from a signal until processes are killed",
    )
    parser.add_argument(
        "--log-dir", type=Path, help="folder for the output of each process"
    )
    parser.add_argument(
        "--token-file",
        type=Path,
        help=f"file with the token of a job of several hosts; else {signing.TOKEN}",
    )
    parser.add_argument(
        "-m",
        dest="module",
        action="store_true",
        help="the script is the name of a module",
    )
    parser.add_argument(
        "script",
        help="what to run; `debug` in front of all: two processes of one CPU device",
    )
    parser.add_argument(
        "script_arguments", nargs=argparse.REMAINDER, help="its arguments"
    )
    parsed = parser.parse_args(given[1:] if debug else given)
    fields = {
        field.name: getattr(parsed, field.name)
        for field in dataclasses.fields(LaunchOptions)
    }
    try:
        options = LaunchOptions(**fields)
    except ClusterError as error:
        parser.error(str(error))
    command = [
        sys.executable,
        "-u",
        *(["-m"] if parsed.module else []),
        parsed.script,
        *parsed.script_arguments,
    ]
    return launch(command, options)


if __name__ == "__main__":
    sys.exit(main())
