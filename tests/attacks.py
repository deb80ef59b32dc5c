"""What a stranger can do: to whoever loads a pickle, and to a port at which launchers
meet.

Each attack on a port is a function of an address, and of what it waits with (`time.sleep`, say):
`attacked` ends all waits with its block.
"""

import contextlib
import json
import os
import socket
import struct
import threading
import time

from keras_distribute.cluster.signing import Seal, new_nonce
from keras_distribute.launch.reception import joining

MOST_BYTES = 300_000_000
WRONG = Seal(b"a token that is another one")


class Harm:
    """A pickle that makes a folder."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def connected(address):
    return socket.create_connection(address, 2.0)


def greeted(connection):
    """The number for one use with which the first host greets."""
    heard = b""
    while not heard.endswith(b"\n"):
        part = connection.recv(1)
        if not part:
            raise OSError("gone")
        heard += part
    return heard.split()[-1].decode()


def says(line):
    """An attack that says a line, and looks at nothing."""

    def attack(address, sleep):
        with connected(address) as connection:
            connection.sendall(line)
            sleep(0.2)

    return attack


def signed(said, seal=WRONG):
    """An attack that says something signed for this connection, with another token."""

    def attack(address, sleep):
        with connected(address) as connection:
            nonce = greeted(connection)
            text = json.dumps(said | {"nonce": new_nonce()}).encode()
            connection.sendall(seal.sealed(joining(nonce), text) + b"\n")
            sleep(0.2)

    return attack


def drips(address, sleep):
    """One byte from time to time, for longer than anybody should listen."""
    with connected(address) as connection:
        for _ in range(20):
            connection.sendall(b"1")
            sleep(0.5)


def silent(count):
    def attack(address, sleep):
        with contextlib.ExitStack() as stack:
            for _ in range(count):
                stack.enter_context(connected(address))
            sleep(2.0)

    return attack


def a_line_without_end(address, sleep):
    with connected(address) as connection:
        for _ in range(MOST_BYTES // 2**20):
            connection.sendall(b"{" * 2**20)


def reflects(address, sleep):
    """Says what it hears."""
    with connected(address) as connection:
        for _ in range(5):
            connection.sendall(connection.recv(4096))


def opens_and_resets(address, sleep):
    for _ in range(50):
        connection = connected(address)
        connection.setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
        )
        connection.close()


def never_reads(address, sleep):
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        connection.settimeout(2)
        connection.connect(address)
        with contextlib.suppress(OSError):
            while True:
                connection.sendall(b"x\n")


def half_closed(address, sleep):
    with connected(address) as connection:
        connection.sendall(b"0" * 64)
        connection.shutdown(socket.SHUT_WR)
        sleep(1.0)


def from_elsewhere(address, sleep):
    """Another source address of this host."""
    with socket.socket() as connection:
        connection.bind(("127.0.0.9", 0))
        connection.settimeout(2)
        connection.connect(address)
        sleep(1.0)


HOST = {"host": 1, "processes": 7, "hosts": 2}
ATTACKS = {
    # Those that stopped a launcher once.
    "an impostor": says(b'{"host": 1, "processes": 7}\n'),
    "a million processes": says(b'{"host": 1, "processes": 1000000}\n'),
    "infinity": says(b'{"host": Infinity, "processes": 1}\n'),
    "deeply nested": says(b"[" * 100_000 + b"\n"),
    "one byte at a time": drips,
    "20 silent connections": silent(20),
    "a line of 300 MB": a_line_without_end,
    "from another address of this host": from_elsewhere,
    # Others.
    "signed with another token": signed(HOST),
    "infinity, signed with another token": signed(HOST | {"processes": float("inf")}),
    "a signature for another connection": says(
        WRONG.sealed(joining(new_nonce()), json.dumps(HOST).encode()) + b"\n"
    ),
    "an empty token": signed(HOST, Seal(b"")),
    "reflected": reflects,
    "opened and reset": opens_and_resets,
    "200 silent connections": silent(200),
    "never reads": never_reads,
    "half closed": half_closed,
    "HTTP": says(b"GET / HTTP/1.1\r\nHost: host0\r\n\r\n"),
    "TLS": says(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + os.urandom(64)),
    "random bytes": says(os.urandom(4096)),
    "nothing but line ends": says(b"\n" * 100_000),
    "not UTF-8": says(b"\xff\xfe" * 32 + b" \xc3\x28\n"),
}


@contextlib.contextmanager
def attacked(address, names=tuple(ATTACKS), seconds=120.0, pause=0.01):
    """All these attacks at once, while the block runs; yields how often each was done.

    Args:
        address: Of whom.
        names: Which.
        seconds: After which they end in any case.
        pause: Seconds from the end of one to its next beginning.
    """
    over, end = threading.Event(), time.monotonic() + seconds
    done = dict.fromkeys(names, 0)

    def again(name):
        while not over.wait(pause) and time.monotonic() < end:
            try:
                ATTACKS[name](address, over.wait)
                done[name] += 1
            except ConnectionRefusedError:
                over.wait(0.2)  # Nobody listens at the moment.
            except OSError:
                done[name] += 1  # It was refused.

    threads = [
        threading.Thread(target=again, args=[name], daemon=True) for name in names
    ]
    for thread in threads:
        thread.start()
    try:
        yield done
    finally:
        over.set()
        for thread in threads:
            thread.join(30)
