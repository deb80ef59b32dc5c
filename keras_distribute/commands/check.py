"""`keras-distribute test`: trains with every strategy that can run on this machine, and
compares each with one device of plain Keras.
"""

from __future__ import annotations

import argparse
import faulthandler
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from keras_distribute import config
from keras_distribute.commands import numbers, output
from keras_distribute.commands.numbers import Numbers
from keras_distribute.devices.names import name_of
from keras_distribute.errors import BackendError
from keras_distribute.launch.functions import run_in_processes
from keras_distribute.servers.local import ParameterServerCluster
from keras_distribute.strategies.base import Strategy
from keras_distribute.strategies.central_storage import CentralStorageStrategy
from keras_distribute.strategies.mirrored import MirroredStrategy
from keras_distribute.strategies.one_device import OneDeviceStrategy
from keras_distribute.strategies.parameter_server import ParameterServerStrategy
from keras_distribute.strategies.tpu import TPUStrategy
from keras_distribute.summary.tables import Table

_TOLERANCE = 1e-4
_SECONDS = 120.0  # For several processes to start and train.
_ALL_SECONDS = 900.0
PASSED, FAILED, SKIPPED = "passed", "FAILED", "not run"


class Outcome(NamedTuple):
    """What came of one strategy.

    Args:
        result: `PASSED`, `FAILED` or `SKIPPED`.
        difference: The largest one from one device; `None` where nothing ran.
        note: Why it failed, or was not run; else what is special.
    """

    name: str
    replicas: int | None
    result: str
    difference: float | None
    seconds: float
    note: str


class _CannotRunError(Exception):
    """A strategy that this machine has not what it takes for."""


def main(
    arguments: Sequence[str] | None = None, prog: str = "keras-distribute test"
) -> int:
    """The command line; returns the exit code: 1 where a strategy fails."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Trains a small model with every strategy that can run here: fit "
        "with a last batch that does not divide, evaluate, predict, save and load. "
        "Each has to give the numbers of one device of plain Keras. It takes about two "
        "minutes; the exit code is 1 where a strategy fails.",
    )
    text = "use so many virtual CPU devices, in place of what JAX finds"
    parser.add_argument("--cpu-devices", type=int, metavar="N", help=text)
    text = f"seconds until what hangs is shown and ended (default: {_ALL_SECONDS:g})"
    parser.add_argument("--timeout", type=float, default=_ALL_SECONDS, help=text)
    options = parser.parse_args(arguments)
    if options.timeout <= 0:
        parser.error("--timeout is a number of seconds above 0")
    if options.cpu_devices is not None:
        if options.cpu_devices < 1:
            parser.error("--cpu-devices is a number of at least 1")
        jax.config.update("jax_platforms", "cpu")
        config.set_cpu_devices(options.cpu_devices)
    warnings.simplefilter("ignore")  # Of Keras, on what it is given; not of results.
    devices = jax.local_devices()
    note = f"{len(devices)} {devices[0].platform} device(s): {devices[0].device_kind}"
    # A collective that waits for ever holds a thread that nothing in Python ends.
    stderr = sys.__stderr__ or sys.stderr  # A file, whatever stands for it.
    faulthandler.dump_traceback_later(options.timeout, exit=True, file=stderr)
    try:
        outcomes = run(lambda each: sys.stderr.write(f"{each} ...\n"))
    finally:
        faulthandler.cancel_dump_traceback_later()
    table, failed = as_table(outcomes), [o for o in outcomes if o.result == FAILED]
    passed = sum(each.result == PASSED for each in outcomes)
    notes = [note, f"{passed} passed, {len(failed)} failed, of {len(outcomes)}."]
    output.show("keras_distribute: every strategy beside one device", notes, [table])
    return 1 if failed else 0


def run(tell: Callable[[str], Any]) -> list[Outcome]:
    """Tries all strategies.

    Args:
        tell: Called with the name of each before it begins.
    """
    tell("one device of plain Keras")
    expected = numbers.of_training(None)
    outcomes: list[Outcome] = []
    for name, trial in TRIALS.items():
        tell(name)
        outcomes.append(_outcome(name, trial, expected))
    return outcomes


def as_table(outcomes: Sequence[Outcome]) -> Table:
    """One line for each strategy."""
    rows = tuple(
        (
            each.name,
            "" if each.replicas is None else str(each.replicas),
            each.result,
            "" if each.difference is None else f"{each.difference:.0e}",
            f"{each.seconds:.1f}",
            each.note,
        )
        for each in outcomes
    )
    header = ("strategy", "replicas", "result", "difference", "seconds", "note")
    return Table("results", header, rows, frozenset({1, 3, 4}))


Trial = Callable[[], tuple[Numbers, int, str]]


def _outcome(name: str, trial: Trial, expected: Numbers) -> Outcome:
    begun = time.monotonic()

    def ended(result: str, note: str, **more: Any) -> Outcome:
        given: dict[str, Any] = {"replicas": None, "difference": None} | more
        seconds = time.monotonic() - begun
        return Outcome(name, result=result, note=note, seconds=seconds, **given)

    try:
        found, replicas, note = trial()
        difference = numbers.largest_difference(found, expected)
    except (_CannotRunError, BackendError) as error:
        return ended(SKIPPED, _first_line(error))
    except Exception as error:
        return ended(FAILED, f"{type(error).__name__}: {_first_line(error)}")
    # Not `>`, which no comparison with NaN is.
    if not difference <= _TOLERANCE:
        note = f"differs by more than {_TOLERANCE:.0e}"
        result = FAILED
    else:
        result = PASSED
    return ended(result, note, replicas=replicas, difference=difference)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]


def _in_this_process(strategy: Strategy, note: str = "") -> tuple[Numbers, int, str]:
    return numbers.of_training(strategy), strategy.num_replicas_in_sync, note


def _several(name: str) -> None:
    """Raises unless there are several devices."""
    if len(jax.local_devices()) < 2:
        raise _CannotRunError(f"{name} needs several devices: try --cpu-devices 4")


def _one_device() -> tuple[Numbers, int, str]:
    device = jax.local_devices()[0]
    return _in_this_process(OneDeviceStrategy(name_of(device)))


def _mirrored() -> tuple[Numbers, int, str]:
    _several("MirroredStrategy")
    return _in_this_process(MirroredStrategy())


def _central_storage() -> tuple[Numbers, int, str]:
    _several("CentralStorageStrategy")
    return _in_this_process(CentralStorageStrategy())


def _tpu() -> tuple[Numbers, int, str]:
    if jax.default_backend() == "tpu":
        return _in_this_process(TPUStrategy())
    return _in_this_process(TPUStrategy(tpu="cpu"), "on CPU devices: there is no TPU")


def _two_processes() -> tuple[Numbers, int, str]:
    results = run_in_processes(
        numbers.of_two_processes,
        2,
        cpu_devices=2,
        timeout=_SECONDS,
        environment={"PYTHONWARNINGS": "ignore"},
    )
    for other, _ in results[1:]:
        if numbers.largest_difference(other, results[0][0]) != 0:
            raise RuntimeError("the processes have different numbers")
    found, replicas = results[0]
    return found, replicas, "2 processes of 2 virtual CPU devices"


def _parameter_servers() -> tuple[Numbers, int, str]:
    # With one worker the steps have an order, and the numbers of one device.
    with ParameterServerCluster(num_workers=1, num_ps=1) as cluster:
        strategy = ParameterServerStrategy(cluster.cluster_resolver)
        try:
            return _in_this_process(strategy, "1 worker, 1 server, each a process")
        finally:
            strategy.close()


TRIALS: dict[str, Trial] = {
    "OneDeviceStrategy": _one_device,
    "MirroredStrategy": _mirrored,
    "CentralStorageStrategy": _central_storage,
    "TPUStrategy": _tpu,
    "MultiWorkerMirroredStrategy": _two_processes,
    "ParameterServerStrategy": _parameter_servers,
}
