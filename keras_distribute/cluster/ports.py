"""Ports of this host for tasks that other processes will start."""

from __future__ import annotations

import contextlib
import random
import socket

# Systems give the ports from 32768 (Linux) or 49152 on to outgoing connections and to
# whoever binds port 0; Kubernetes has 30000 to 32767, and Ray's workers 10002 to 19999.
_PORTS = range(20_000, 30_000)
_TRIES = 100


def free_port(host: str = "") -> int:
    """A port that is free at this moment, and that the system itself gives to nobody.

    One from `bind` to port 0 may go to any connection that is made before the task
    listens: "Address already in use".

    Args:
        host: The IP address at which the task will listen; by default all of this host.
    """
    return free_ports(1, host)[0]


def free_ports(count: int, host: str = "") -> list[int]:
    """That many of them, of which no two are the same."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.ExitStack() as all_of_them:
        sockets = [
            all_of_them.enter_context(socket.socket(family)) for _ in range(count)
        ]
        for each in sockets:
            _bind(each, host)
        return [int(each.getsockname()[1]) for each in sockets]


def _bind(server: socket.socket, host: str) -> None:
    # Of its own generator: two programs with the same seed start at the same moment.
    for port in random.SystemRandom().sample(_PORTS, _TRIES):
        with contextlib.suppress(OSError):
            return server.bind((host, port))
    return server.bind((host, 0))
