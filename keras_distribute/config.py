"""CPU virtual devices, and the XLA thread pool that they need.

XLA's CPU client has one thread for each core that the process may use, and an
all-reduce blocks its thread until all devices have joined. With more virtual devices
than cores the pool starves and the process aborts after 40 seconds ("Expected N threads
to join the rendezvous"). The pool's size comes from the environment variable `NPROC`
when the client is created, so it is set here, whoever asked for the devices.
"""

from __future__ import annotations

import dataclasses
import os
import re

import jax

from keras_distribute import checks
from keras_distribute._compat import jax_internals, libtpu
from keras_distribute.errors import DeviceError, ValueStructureError

_THREADS_PER_DEVICE = 4  # 32 threads for 8 devices never starved; 8 for 8 did.
_SAME_BITS_UP_TO = 8  # Devices, with the same pool for each number of them.
_BY_USER = "NPROC in the environment"
# What `NPROC` was set to here, so that child processes do not take it for the user's.
SET_HERE = "KERAS_DISTRIBUTE_NPROC"
_COUNT = re.compile(r"[0-9]{1,9}")
_FLAG = re.compile(r"--xla_force_host_platform_device_count=(\d+)")


@dataclasses.dataclass
class _Chosen:
    """What was chosen for this process.

    Attributes:
        pool_size: Threads of XLA's pool for CPUs, where it could be chosen; else 0.
        pool_reason: What decided that.
        prefetch_steps: The argument of `set_prefetch_steps`.
    """

    pool_size: int = 0
    pool_reason: str = "the number of cores"
    prefetch_steps: int | None = None


_chosen = _Chosen()


def set_prefetch_steps(num_steps: int) -> None:
    """How many batches `fit`, `evaluate` and `predict` have ready on the devices ahead
    of the step that runs.

    And loops over distributed datasets whose `InputOptions` do not say it.

    Args:
        num_steps: At least 0; 0 reads each batch when its step is due, in the thread
            that called `fit`. By default 2, and 0 for arrays in memory that are not
            shuffled where the devices are CPUs: there is nothing to wait for.

    Raises:
        ValueStructureError: For a negative number, or none.

    Example:
        >>> import keras_distribute as kd
        >>> kd.config.set_prefetch_steps(2)
    """
    checks.count(
        "num_steps",
        num_steps,
        what="Batches are made ready for a number of steps.",
        fix="kd.config.set_prefetch_steps(2), or 0 to read each batch when its step is "
        "due.",
        error=ValueStructureError,
    )
    _chosen.prefetch_steps = num_steps


def prefetch_steps(default: int = 2) -> int:
    """The number given to `set_prefetch_steps`, or `default`."""
    chosen = _chosen.prefetch_steps
    return default if chosen is None else chosen


def set_cpu_devices(num_devices: int) -> None:
    """Makes JAX offer `num_devices` virtual CPU devices, and gives XLA the threads that
    they need.

    Call it before anything that uses JAX's devices (creating an array is enough).
    Calling it again with the same number, also after JAX has started with that many
    devices, does nothing.

    Args:
        num_devices: How many CPU devices; at least 1.

    Raises:
        DeviceError: When JAX has already started with another number of CPU devices.

    Example:
        >>> import keras_distribute as kd
        >>> kd.config.set_cpu_devices(8)
    """
    what = "The number of CPU devices is an integer of at least 1."
    fix = "kd.config.set_cpu_devices(8)"
    checks.count("num_devices", num_devices, 1, what=what, fix=fix, error=DeviceError)
    if jax_internals.backends_are_initialized():
        existing = jax.device_count("cpu")
        if existing != num_devices:
            raise DeviceError(
                f"JAX has already started with {existing} CPU device(s), and cannot "
                "change that.",
                received=f"set_cpu_devices({num_devices}).",
                fix="call kd.config.set_cpu_devices first thing in the program, before "
                "creating any array.",
            )
        return
    flags = os.environ.get("XLA_FLAGS", "")
    # JAX refuses to start when the flag and its own option are both set.
    if _FLAG.search(flags):
        os.environ["XLA_FLAGS"] = _FLAG.sub("", flags).strip()
    jax.config.update("jax_num_cpu_devices", num_devices)
    # Where it is installed, for dry runs, JAX would load it now.
    libtpu.load_without_profiler()
    _size_pool(num_devices)


def size_pool_for_requested_devices() -> None:
    """Sizes XLA's pool for virtual devices that were asked for by a flag or by JAX's
    option. Runs on import.
    """
    if not jax_internals.backends_are_initialized():
        _size_pool(_requested_devices())


def size_pool_for_same_bits() -> None:
    """Gives XLA as many threads for one CPU device as for eight: the bits of matrix
    products depend on them. Where the user says nothing, and JAX has not started.
    """
    if jax_internals.backends_are_initialized() or _chosen.pool_reason == _BY_USER:
        return
    needed = _THREADS_PER_DEVICE * max(_requested_devices(), _SAME_BITS_UP_TO)
    _set_pool(needed, "keras_distribute, for deterministic=True")


def check_pool(num_devices: int) -> None:
    """Refuses to train on CPU devices whose thread pool would starve."""
    threads = _chosen.pool_size or _threads_asked_for() or cores()
    if num_devices > threads:
        raise DeviceError(
            f"Training on {num_devices} CPU devices with XLA's pool of {threads} "
            "threads would deadlock.",
            received="a JAX that was started before keras_distribute was imported.",
            fix="import keras_distribute before using JAX, or set the environment "
            "variable NPROC="
            f"{_THREADS_PER_DEVICE * num_devices} before starting Python.",
        )


def pool() -> tuple[int, str]:
    """How many threads XLA has for CPU devices, and what decided that."""
    if not _chosen.pool_size:
        return cores(), "the JAX that was started before this package"
    return _chosen.pool_size, _chosen.pool_reason


def threads_of_one_of(num_processes: int) -> int:
    """How many threads each of several processes has that compute at the same time on
    the CPUs of this host: what the user says by `NPROC`, or its share of the cores.
    With more, they would take the cores from each other.
    """
    asked = _threads_asked_for() if _chosen.pool_reason == _BY_USER else 0
    return asked or max(1, cores() // num_processes)


def cores() -> int:
    """How many cores this process may use, and XLA takes."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _threads_asked_for() -> int:
    """What `NPROC` says; XLA takes what is no number for none, and so do we."""
    text = os.environ.get("NPROC", "")
    return int(text) if _COUNT.fullmatch(text) else 0


def _size_pool(num_devices: int) -> None:
    if os.environ.get("NPROC") == os.environ.pop(SET_HERE, None):
        os.environ.pop("NPROC", None)
    asked = _threads_asked_for()
    needed = _THREADS_PER_DEVICE * num_devices if num_devices > 1 else 0
    if needed > (asked or cores()):
        _set_pool(needed, f"keras_distribute, for {num_devices} CPU devices")
        return
    if asked and not _chosen.pool_size:
        _chosen.pool_reason = _BY_USER
    _chosen.pool_size = _threads_asked_for() or cores()


def _set_pool(threads: int, reason: str) -> None:
    os.environ["NPROC"] = os.environ[SET_HERE] = str(threads)
    _chosen.pool_size, _chosen.pool_reason = threads, reason


def _requested_devices() -> int:
    """How many CPU devices JAX is asked for, by a flag or by its option."""
    match = _FLAG.search(os.environ.get("XLA_FLAGS", ""))
    option = jax.config.values["jax_num_cpu_devices"]
    return int(match.group(1)) if match else max(1, option)
