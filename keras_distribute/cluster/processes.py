"""Starts `jax.distributed`, once; which process of how many this one is."""

from __future__ import annotations

import atexit
import ipaddress
import os
import pickle
import random
import re
import signal
import socket
import sys
import threading
import zlib
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, TypeVar

import jax
import numpy as np

from keras_distribute import checks
from keras_distribute._compat import jax_internals
from keras_distribute._compat import seeds as compat
from keras_distribute.cluster import addresses, agreement, liveness, signing
from keras_distribute.cluster.liveness import Processes
from keras_distribute.cluster.resolvers.topology import Topology
from keras_distribute.errors import ClusterError

SILENCE_SECONDS = 30.0
# How many times as long a process may take to start: its program may still be fetched.
_STARTS = 10
_LOOK_SECONDS = 4.0
_ANSWER_SECONDS = 2.0
_STATUS = re.compile(r"[A-Z]{3,}[A-Z_]*: ")  # How the errors of JAX's runtime begin.
# The variables of gRPC: what names a proxy, and the hosts for which none is asked.
_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
_WITHOUT_PROXY, _ELSE_WITHOUT = "no_grpc_proxy", "no_proxy"
_REACH_FIRST = (
    "check that process 0 runs, and that its address can be reached from this host."
)
_T = TypeVar("_T")


def start(topology: Topology, how: str, timeout_seconds: float | None = None) -> None:
    """Starts the runtime, unless it runs already; returns when all processes have.

    Args:
        topology: The number of this process, and of all.
        how: Where that is from, for the line that the chief prints.
        timeout_seconds: How long another process may be silent, by default 30 seconds.
            One that is alive, but does not come to where this one waits for it, has
            half an hour, or longer if this is.

    Raises:
        ClusterError: Where JAX has started already as something else; for an invalid
            token of the job, and where the processes have different ones.
    """
    if topology.num_processes == 1:
        return
    seal = signing.seal_of_job()
    silence = timeout_seconds or SILENCE_SECONDS
    if jax.distributed.is_initialized():
        running = jax_internals.started_as()
        if running != (topology.process_id, topology.num_processes):
            raise ClusterError(
                f"JAX runs already as process {running[0]} of {running[1]}.",
                received=f"process {topology.process_id} of {topology.num_processes}, "
                f"by {how}.",
                fix="start each process with the environment of one cluster.",
            )
    else:
        _initialize(topology, how, silence)
    if not liveness.current.has_joined:
        own, count = topology.process_id, topology.num_processes
        joining = Processes(own, count, silence, seal)
        joining.channel_numbers = liveness.current.channel_numbers
        liveness.current = joining
    processes = liveness.current
    processes.wait_seconds = max(timeout_seconds or 0.0, liveness.WAIT_SECONDS)
    if isinstance(processes, Processes) and not processes.has_joined:
        _join(processes, topology, how)


def _initialize(topology: Topology, how: str, silence: float) -> None:
    if jax_internals.backends_are_initialized():
        raise ClusterError(
            "JAX has started already, as a process of its own.",
            received=f"process {topology.process_id} of {topology.num_processes}, by "
            f"{how}.",
            fix="create the strategy first thing in the program, before any array, "
            "model or variable.",
        )
    assert topology.coordinator is not None
    _leave_proxy_out(topology.coordinator)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    terminated = signal.getsignal(signal.SIGTERM)
    wait = _STARTS * silence
    late = threading.Timer(wait, _tell_who_is_missing, (topology, how, wait))
    late.daemon = True
    late.start()
    try:
        jax.distributed.initialize(
            topology.coordinator,
            topology.num_processes,
            topology.process_id,
            cluster_detection_method="deactivate",
            coordinator_bind_address=_own_address(topology.coordinator),
            initialization_timeout=round(wait + _ANSWER_SECONDS) + 1,
            # Later than `liveness`, which says who has died.
            heartbeat_timeout_seconds=round(2 * silence) + 5,
        )
    except (RuntimeError, ValueError) as error:
        raise ClusterError(
            f"Process {topology.process_id} of {topology.num_processes} could not join "
            f"the others: {error}",
            received=f"the address {topology.coordinator} of process 0, by {how}.",
            fix=_REACH_FIRST,
        ) from error
    finally:
        late.cancel()
    if threading.current_thread() is threading.main_thread() and terminated is not None:
        signal.signal(signal.SIGTERM, terminated)  # JAX's runtime would swallow it.


def _tell_who_is_missing(topology: Topology, how: str, waited: float) -> None:
    """Says why JAX's runtime is about to end this process, which cannot be caught."""
    address, own = topology.coordinator or "", topology.process_id
    missing, fix = "not all of the others have come", "start every process."
    if own and not _answers(address):
        missing = f"nothing answers at {address}"
        fix = _REACH_FIRST
    error = ClusterError(
        f"Process {own} of {topology.num_processes} could not join the others: in "
        f"{waited:.0f} seconds {missing}.",
        received=f"the address {address} of process 0, by {how}.",
        fix=fix,
    )
    liveness.print_error(str(error))


def _answers(address: str) -> bool:
    try:
        socket.create_connection(addresses.parts(address), _ANSWER_SECONDS).close()
    except (OSError, ValueError):
        return False
    return True


def _leave_proxy_out(coordinator: str) -> None:
    """Has gRPC connect to process 0 itself, and not through a proxy of the environment,
    which it would ask even for an address of this host.
    """
    if not any(os.environ.get(name) for name in _PROXIES):
        return
    host, _ = addresses.parts(coordinator)
    others = os.environ.get(_WITHOUT_PROXY) or os.environ.get(_ELSE_WITHOUT)
    os.environ[_WITHOUT_PROXY] = f"{others},{host}" if others else host


def _own_address(coordinator: str) -> str | None:
    """Where process 0 listens: only at the IP address that was named, if it has that.

    For a host name, which may mean another address here than elsewhere, JAX decides: it
    listens everywhere, or at `JAX_COORDINATOR_BIND_ADDRESS`.
    """
    if os.environ.get("JAX_COORDINATOR_BIND_ADDRESS"):
        return None
    host, port = addresses.parts(coordinator)
    try:
        address = ipaddress.ip_address(host)
        family = socket.AF_INET if address.version == 4 else socket.AF_INET6
        with socket.socket(family, socket.SOCK_STREAM) as server:
            server.bind((str(address), 0))
    except (ValueError, OSError):
        return None
    return addresses.joined(host, port)


def _join(processes: Processes, topology: Topology, how: str) -> None:
    count, seal = topology.num_processes, processes.seal
    processes.start()
    # Before JAX's runtime waits for the others, for five minutes.
    atexit.register(processes.wait_for_the_end)
    _fail_at_once(processes)
    nonces = agreement.exchange("the token of the job", signing.new_nonce(), count)
    processes.sign(seal.of(list(map(str, nonces))))
    _agree_on_seeds()
    about = [jax.local_device_count(), topology.process_id]
    told = agreement.exchange("the start", about, count)
    counts, processes.heard_as = zip(*told, strict=True)
    if len(set(counts)) > 1:
        raise ClusterError(
            "The processes have different numbers of devices.",
            received=f"{', '.join(map(str, counts))} devices.",
            fix="give every process as many: --cpu-devices, CUDA_VISIBLE_DEVICES, or "
            "hosts of one kind.",
        )
    if is_chief():
        sys.stderr.write(
            f"keras_distribute: {count} processes x {counts[0]} "
            f"{jax.default_backend()} device(s) = "
            f"{sum(counts)} replicas, by {how}; coordinator {topology.coordinator}"
            f"{'' if seal.signs else ', without a token of the job'}\n"
        )
    processes.has_joined = True


def check_connected(devices: Sequence[jax.Device]) -> None:
    """Refuses devices of processes that cannot speak to each other: on a slice of TPUs
    JAX has those of all hosts, also where nothing has connected the processes.
    """
    count = len({device.process_index for device in devices})
    if count == 1 or jax.distributed.is_initialized():
        return
    raise ClusterError(
        f"The devices are of {count} processes, which nothing has connected.",
        received=f"{len(devices)} {devices[0].platform} devices.",
        fix='kd.TPUStrategy(tpu=""), or MultiWorkerMirroredStrategy('
        'kd.cluster_resolver.TPUClusterResolver("")), on every host.',
    )


def is_chief() -> bool:
    """Whether this process writes files and prints: process 0, or the only one.

    Example:
        >>> import keras_distribute as kd
        >>> kd.is_chief()
        True
    """
    return process_index() == 0


def process_index() -> int:
    """The number of this process among those that train together, from 0."""
    return jax.process_index() if jax.distributed.is_initialized() else 0


def process_count() -> int:
    """How many processes train together.

    Example:
        >>> import keras_distribute as kd
        >>> kd.process_count()
        1
    """
    return jax.process_count() if jax.distributed.is_initialized() else 1


def print_on_chief(*values: Any, **options: Any) -> None:
    """`print`, in the chief alone.

    Args:
        *values: What to print.
        **options: The options of `print`, such as `end`.

    Example:
        >>> import keras_distribute as kd
        >>> kd.print_on_chief("epoch", 1)
        epoch 1
    """
    if is_chief():
        print(*values, **options)  # noqa: T201 - what it is for.


def run_on_chief(function: Callable[..., _T], *args: Any, **kwargs: Any) -> _T:
    """Calls a function in the chief alone, such as a download; broadcasts its result.

    Every process has to call it. The function must not compute on the strategy's
    devices, nor read its variables, in which the others take part.

    Args:
        function: Its result is data: numbers, strings, bytes, paths, arrays, and lists,
            tuples, sets and dictionaries of them. Under a launcher, or where the job
            has another token (`KERAS_DISTRIBUTE_JOB_TOKEN`), what can be pickled.
        *args: The function's arguments.
        **kwargs: The function's keyword arguments.

    Returns:
        What the function returned, in every process. Its exception, too, is raised in
        every process.

    Raises:
        ClusterError: Where another process does something else, or has died.
        ContextError: In every process, where the function needs the others: it reads
            what is divided over the processes, or runs a step.
        StructureTypeError: In every process, for anything but data, without a token.

    Example:
        >>> import keras_distribute as kd
        >>> kd.run_on_chief(sum, [1, 2])
        3
    """
    what = "The chief calls a function."
    checks.function("function", function, what, "kd.run_on_chief(download, url)")
    name = getattr(function, "__qualname__", type(function).__name__)
    return agreement.from_chief(
        f"run_on_chief({name})", lambda: function(*args, **kwargs), process_count()
    )


def barrier(name: str) -> None:
    """Waits until every process has come here.

    Args:
        name: What this place is called; the processes compare it.

    Raises:
        ClusterError: Where another process is somewhere else, or has died.

    Example:
        >>> import keras_distribute as kd
        >>> kd.barrier("the data is there")
    """
    checks.text("name", name, 'kd.barrier("the data is there")')
    agreement.exchange(f"barrier {name!r}", None, process_count())


def _fail_at_once(processes: Processes) -> None:
    """Ends this process after an uncaught exception, without waiting for the others.

    JAX's runtime would wait for them at the end of the program, while they wait for
    this process in a collective.
    """
    before = sys.excepthook

    def report(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        before(kind, error, traceback)
        processes.claim_the_end()
        liveness.print_error(
            f"process {process_index()} of {process_count()} ends with this error."
        )
        may_follow = _may_follow(error)
        first_line = (str(error).splitlines() or [""])[0][:200]
        short = f"{kind.__name__}: {first_line}".removesuffix(": ")
        said = f"process {process_index()} has raised {short}, {processes.where}"
        reason = processes.reason(said, _LOOK_SECONDS if may_follow else 0.0)
        follows = may_follow and reason is not None
        if follows:
            liveness.print_error(f"it may follow from another one: {reason}.")
        sys.stdout.flush()
        processes.leave()
        code = liveness.FOLLOWING_CODE if follows else 1
        os._exit(130 if issubclass(kind, KeyboardInterrupt) else code)

    sys.excepthook = report


def _may_follow(error: BaseException) -> bool:
    """Whether it is an error that a collective raises when another process has died."""
    if isinstance(error, ValueError | RuntimeError) and _STATUS.match(str(error)):
        return True
    return isinstance(error, jax.errors.JaxRuntimeError | ClusterError)


def _agree_on_seeds() -> None:
    """Makes Keras, NumPy and Python draw the same numbers in every process.

    Seeds that the user has set, the same in every process, stay as they are. Otherwise
    all take the chief's.
    """
    own = compat.global_seed()
    drawn = own if own is not None else random.SystemRandom().randrange(2**31)
    said = agreement.exchange("seeds", (own, random_streams(), drawn), process_count())
    if own is None or len({(seed, streams) for seed, streams, _ in said}) > 1:
        compat.set_all(said[0][2])


def random_streams() -> int:
    """A checksum of the states of NumPy's and of Python's global stream."""
    return zlib.crc32(pickle.dumps(random_states()))


def random_states() -> Any:
    """The states of NumPy's and of Python's global stream."""
    return np.random.get_state(), random.getstate()


def set_random_states(states: Any) -> None:
    """Gives both global streams a state."""
    np.random.set_state(states[0])
    random.setstate(states[1])
