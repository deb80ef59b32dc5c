"""Where the launchers of several hosts meet before each start of a job, to know who is left. Knows nothing of JAX.

The launcher of the first host listens; each other one says how many processes it will start, and hears which numbers
they have. Who does not come in time is left out. Each says and hears one line of JSON.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import select
import socket
import time
from collections.abc import Callable
from typing import Any

from keras_distribute.errors import ClusterError

_LINE_SECONDS = 5.0  # For a line that is on its way.
_POLL_SECONDS = 0.2
_FIRST = 0


@dataclasses.dataclass(frozen=True)
class Meeting:
    """What comes of it, for one host.

    Args:
        first: The number of its first process.
        num_processes: Of all hosts.
        hosts: Which take part.
    """

    first: int
    num_processes: int
    hosts: tuple[int, ...]


def address_of(coordinator: str) -> tuple[str, int]:
    """Where the launchers meet: beside the address of process 0, one port further.

    Raises:
        ClusterError: For what is no `host:port`.
    """
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdigit():
        raise ClusterError(
            "The address of process 0 is a host and a port.",
            received=f"{coordinator!r}.",
            fix="--coordinator host0:1234",
        )
    return host.strip("[]"), int(port) + 1


def meet(
    address: tuple[str, int],
    host: int,
    num_local: int,
    *,
    num_hosts: int,
    least: int,
    seconds: float,
    given_up: Callable[[], bool] = lambda: False,
) -> Meeting:
    """Waits for the launchers of the other hosts.

    Args:
        address: Where they meet, on the first host.
        host: The number of this one.
        num_local: How many processes it will start.
        num_hosts: How many may come.
        least: How many must.
        seconds: To wait for the last ones.
        given_up: Ends the waiting when it says so.

    Raises:
        ClusterError: Where too few come, or the first host cannot be reached.
    """
    if host == _FIRST:
        return _gather(address, num_local, num_hosts, least, seconds, given_up)
    return _join(address, host, num_local, seconds, given_up)


def _gather(
    address: tuple[str, int], num_local: int, num_hosts: int, least: int, seconds: float, given_up: Callable[[], bool]
) -> Meeting:
    sizes, waiting = {_FIRST: num_local}, dict[int, socket.socket]()
    end = time.monotonic() + seconds
    with contextlib.ExitStack() as stack, _server(address[1]) as server:
        server.settimeout(_POLL_SECONDS)
        while len(sizes) < num_hosts and time.monotonic() < end and not given_up():
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # Nobody came, or nobody of ours.
                connection = stack.enter_context(server.accept()[0])
                connection.settimeout(_LINE_SECONDS)
                said = _hear(connection)
                other, size = int(said["host"]), int(said["processes"])
                if _FIRST < other < num_hosts and size > 0:
                    sizes[other], waiting[other] = size, connection
            for other in [other for other, connection in waiting.items() if _is_closed(connection)]:
                del sizes[other], waiting[other]  # It may come again.
        hosts = tuple(sorted(sizes))
        enough = len(hosts) >= least and not given_up()
        for other, connection in waiting.items():
            answer = {"first": _first(sizes, other), "processes": sum(sizes.values()), "hosts": hosts}
            with contextlib.suppress(OSError):
                _say(connection, answer if enough else {"error": _too_few(hosts, num_hosts, least)})
    if not enough:
        raise _missing(_too_few(hosts, num_hosts, least), seconds)
    return Meeting(0, sum(sizes.values()), hosts)


def _join(address: tuple[str, int], host: int, num_local: int, seconds: float, given_up: Callable[[], bool]) -> Meeting:
    end = time.monotonic() + seconds
    while time.monotonic() < end and not given_up():
        answer: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError), socket.create_connection(address, _LINE_SECONDS) as connection:
            _say(connection, {"host": host, "processes": num_local})
            if _comes(connection, 2 * seconds, given_up):  # The first host may wait as long for others.
                answer = _hear(connection)
        if "error" in answer:
            raise _missing(answer["error"], seconds)
        if answer:
            return Meeting(answer["first"], answer["processes"], tuple(answer["hosts"]))
        time.sleep(_POLL_SECONDS)
    raise _missing(f"The launcher of host {_FIRST} cannot be reached at {address[0]}:{address[1]}", seconds)


def _first(sizes: dict[int, int], host: int) -> int:
    return sum(size for other, size in sizes.items() if other < host)


def _server(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def _say(connection: socket.socket, what: dict[str, Any]) -> None:
    connection.sendall(json.dumps(what).encode() + b"\n")


def _hear(connection: socket.socket) -> dict[str, Any]:
    with connection.makefile("r", encoding="utf-8") as lines:
        return json.loads(lines.readline())


def _comes(connection: socket.socket, seconds: float, given_up: Callable[[], bool]) -> bool:
    """Whether there is something to hear, or the end, before the time is up."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and not given_up():
        if select.select([connection], [], [], _POLL_SECONDS)[0]:
            return True
    return False


def _is_closed(connection: socket.socket) -> bool:
    try:
        connection.setblocking(False)
        return connection.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        connection.settimeout(_LINE_SECONDS)


def _too_few(hosts: tuple[int, ...], num_hosts: int, least: int) -> str:
    return f"Of {num_hosts} hosts {len(hosts)} came, {least} are needed"


def _missing(text: str, seconds: float) -> ClusterError:
    return ClusterError(
        f"{text}.",
        received=f"a wait of {seconds:.0f} seconds.",
        fix="look at the launchers of the other hosts; --node-timeout waits longer, --min-nnodes needs fewer.",
    )
