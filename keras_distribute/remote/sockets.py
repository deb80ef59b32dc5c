"""What all sockets have in common: bounds, heartbeats, and the form of addresses."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

from keras_distribute.cluster import addresses
from keras_distribute.errors import ClusterError
from keras_distribute.remote.engine import zmq
from keras_distribute.remote.frames import LARGEST_FRAME

SECONDS_TO_SHAKE_HANDS = 5.0
SECONDS_OF_SILENCE = 5.0  # After which a task that is frozen or cut off is given up.
# Larger frames are not copied; of each a thread of pyzmq is told when it has gone.
_LARGEST_COPIED = 2**20
_NO_WAIT, _MORE = (int(zmq.NOBLOCK), int(zmq.SNDMORE)) if zmq else (0, 0)


def prepare(one: Any) -> None:
    """Sets the bounds of a socket, and makes it notice silent peers."""
    one.linger = 500  # ms, to say goodbye.
    one.ipv6 = True
    one.maxmsgsize = LARGEST_FRAME + 2**20
    one.handshake_ivl = int(1000 * SECONDS_TO_SHAKE_HANDS)
    one.heartbeat_ivl = 1000
    one.heartbeat_timeout = one.heartbeat_ttl = int(1000 * SECONDS_OF_SILENCE)
    one.sndhwm = one.rcvhwm = 0  # Who talks here waits for answers.
    one.tcp_keepalive = 1
    one.copy_threshold = _LARGEST_COPIED


def send(one: Any, frames: Sequence[Any], wait: bool = True) -> None:
    """Sends a message, without a copy of its large frames.

    Args:
        wait: For a connection, and for room in the queue of one.

    Raises:
        zmq.Again: If there is none, and `wait` is false.
    """
    # As `send_multipart`, which makes an enumeration of the flags for each frame.
    last = 0 if wait else _NO_WAIT
    for frame in frames[:-1]:
        one.send(frame, last | _MORE, False)
    one.send(frames[-1], last, False)


def receive(one: Any) -> list[Any]:
    """The buffers of the frames of the next message."""
    frame = one.recv(0, False)
    buffers = [frame.buffer]
    while frame.more:
        frame = one.recv(0, False)
        buffers.append(frame.buffer)
    return buffers


def endpoint_of(address: str) -> str:
    """`tcp://10.0.0.1:2222` of `host:2222`: the numbers of this very host, to bind to.

    Raises:
        ClusterError: For a host that nobody knows.
    """
    host, port = addresses.parts(address)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ClusterError(
            f"The host of {address!r} is not known here.",
            received=f"{error}.",
            fix="an address of this task's host, host:port.",
        ) from error
    number = str(found[0][4][0])
    return f"tcp://{addresses.joined(number, port)}"
