"""The first host's side of a meeting of launchers: many connections at once.

No connection waits for another one. Each has a few seconds for a line of bounded
length, and its signature is checked before anything else.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import ipaddress
import json
import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from keras_distribute.cluster import signing
from keras_distribute.cluster.signing import Seal
from keras_distribute.errors import ClusterError

LINE_SECONDS = 5.0  # For a line, from the first moment to its last byte.
MOST_BYTES = 1024  # Of a line of an unknown host.
REFUSED = b"refused"  # All that a host without the token hears.
_MOST_PROCESSES = 65536  # Of one host.
_MOST_GUESTS = 128  # Connections that have not said yet who they are.
_MOST_AT_ONCE = 64  # Accepted before the others are served.
_MOST_TOLD = 20  # Messages about refused connections.
_NOT_LOCAL = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


def joining(nonce: str) -> str:
    """The purpose of what a host says, for its signature."""
    return f"a host joins {nonce}"


def answering(nonce: str, theirs: str) -> str:
    """The purpose of what the first host answers, for its signature."""
    return f"the first host answers {nonce} {theirs}"


@dataclasses.dataclass(eq=False)
class _Guest:
    """A connection at the first host, which never blocks."""

    connection: socket.socket
    address: str
    host: int | None = None  # Its number, once it has proved that it knows the token.
    theirs: str = ""  # Its own nonce, then.
    heard: bytearray = dataclasses.field(default_factory=bytearray)
    nonce: str = dataclasses.field(default_factory=signing.new_nonce)
    since: float = dataclasses.field(default_factory=time.monotonic)


class Reception:
    """The connections of the other hosts, and the `sizes` of all, in processes."""

    def __init__(
        self,
        address: tuple[str, int],
        num_local: int,
        num_hosts: int,
        seal: Seal,
        tell: Callable[[str], None],
    ) -> None:
        self.sizes = {0: num_local}
        self._num_hosts, self._seal, self._tell = num_hosts, seal, tell
        self._told: set[str] = set()
        self._guests: list[_Guest] = []
        self._selector = selectors.DefaultSelector()
        self._servers = _servers(address)
        for server in self._servers:
            self._selector.register(server, selectors.EVENT_READ)

    def __enter__(self) -> Reception:
        return self

    def __exit__(self, *_: object) -> None:
        for guest in [*self._guests]:
            self._drop(guest)
        for server in self._servers:
            server.close()
        self._selector.close()

    def serve(self, seconds: float) -> None:
        """Serves all connections, and waits so long for the next event."""
        for key, _ in self._selector.select(seconds):
            if key.data is None:
                self._welcome(key.fileobj)
            elif key.data in self._guests:
                self._listen(key.data)
        late = time.monotonic() - LINE_SECONDS
        for guest in [g for g in self._guests if g.host is None and g.since < late]:
            self._refuse(guest, f"nothing came in {LINE_SECONDS:.0f} seconds")

    def answer(self, error: str | None) -> None:
        """Tells all hosts their numbers, or an error."""
        hosts, total = sorted(self.sizes), sum(self.sizes.values())
        for guest in self._guests:
            if guest.host is not None:
                first = sum(self.sizes[host] for host in hosts if host < guest.host)
                answer = {"first": first, "processes": total, "hosts": hosts}
                self._say(guest, answer if error is None else {"error": error})

    def _welcome(self, server: Any) -> None:
        for _ in range(_MOST_AT_ONCE):
            try:
                connection, peer = server.accept()
            except OSError:  # No connection any more, or it is closed again.
                return
            connection.setblocking(False)
            guest = _Guest(connection, str(peer[0]))
            self._guests.append(guest)
            self._selector.register(connection, selectors.EVENT_READ, guest)
            self._send(guest, f"keras_distribute meets {guest.nonce}".encode())
            unknown = [guest for guest in self._guests if guest.host is None]
            if len(unknown) > _MOST_GUESTS:
                # The oldest of the address with the most connections.
                count = Counter(guest.address for guest in unknown)
                most = max(count.values())
                crowd = (guest for guest in unknown if count[guest.address] == most)
                self._refuse(next(crowd), "too many connections at once")

    def _listen(self, guest: _Guest) -> None:
        try:
            part = guest.connection.recv(MOST_BYTES)
        except BlockingIOError:
            return
        except OSError:
            part = b""
        if not part or guest.host is not None:  # It has gone, and may come again.
            self._drop(guest)
            return
        guest.heard += part
        line, end, _ = bytes(guest.heard).partition(b"\n")
        if end:
            self._hear(guest, line)
        elif len(line) >= MOST_BYTES:
            self._refuse(guest, f"a line of more than {MOST_BYTES} bytes")

    def _hear(self, guest: _Guest, line: bytes) -> None:
        said = self._seal.opened(joining(guest.nonce), line)
        if said is None:
            self._refuse(guest, f"what it says: {signing.why_refused(line)}")
            return
        try:
            known = json.loads(said)
            host, size, num_hosts = known["host"], known["processes"], known["hosts"]
            numbers = all(type(number) is int for number in (host, size, num_hosts))
            guest.theirs = known["nonce"]
            if not numbers or type(guest.theirs) is not str:
                raise TypeError(known)
        except (ValueError, KeyError, TypeError, RecursionError):
            self._refuse(guest, "a launcher of another version")
            return
        error = self._wrong(host, size, num_hosts)
        if error is not None:
            self._say(guest, {"error": error})
            self._refuse(guest, error)
            return
        for other in [other for other in self._guests if other.host == host]:
            self._say(other, {"error": f"Another launcher has come as host {host}"})
            self._drop(other)
        guest.host, self.sizes[host] = host, size
        self._say(guest, {"welcome": host})

    def _wrong(self, host: int, size: int, num_hosts: int) -> str | None:
        if num_hosts != self._num_hosts:
            own = f"host 0 with --nnodes {self._num_hosts}"
            return f"Host {host} was started with --nnodes {num_hosts}, {own}"
        if not 0 < host < num_hosts or not 0 < size <= _MOST_PROCESSES:
            return f"There is no host {host} of {size} processes"
        return None

    def _say(self, guest: _Guest, what: dict[str, Any]) -> None:
        purpose = answering(guest.nonce, guest.theirs)
        self._send(guest, self._seal.sealed(purpose, json.dumps(what).encode()))

    def _send(self, guest: _Guest, line: bytes) -> None:
        # It fits into the buffer of any connection that is read.
        with contextlib.suppress(OSError):
            guest.connection.send(line + b"\n")

    def _refuse(self, guest: _Guest, why: str) -> None:
        text = f"has refused a connection from {guest.address}: {why}."
        if text not in self._told and len(self._told) < _MOST_TOLD:
            self._told.add(text)
            self._tell(text)
        self._send(guest, REFUSED)
        self._drop(guest)

    def _drop(self, guest: _Guest) -> None:
        if guest in self._guests:
            self._guests.remove(guest)
            self._selector.unregister(guest.connection)
            guest.connection.close()
            if guest.host is not None:
                self.sizes.pop(guest.host, None)


def _servers(address: tuple[str, int]) -> list[socket.socket]:
    """Listens at all addresses that the name means here, and at no other."""
    name, port = address
    servers: list[socket.socket] = []
    try:
        found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
        places = sorted({(family, place) for family, _, _, _, place in found})
        if _only_here(name, [str(place[0]) for _, place in places]):
            raise OSError(f"here {name} is {places[0][1][0]}, which only this host has")
        failure: OSError | None = None
        for family, place in places:
            try:
                servers.append(_server(family, place))
            except OSError as error:
                if error.errno not in _NOT_LOCAL:
                    raise
                failure = error  # A host without IPv6 has the other one.
        if failure is not None and not servers:
            raise failure
    except OSError as error:
        for server in servers:
            server.close()
        raise ClusterError(
            f"The launcher of host 0 cannot listen at {name}:{port}: {error}.",
            received=f"--coordinator {name}:{port - 1}.",
            fix="an address of this host by which the others find it, and two free "
            "ports: --coordinator 10.0.0.1:1234",
        ) from error
    return servers


def _only_here(name: str, addresses: list[str]) -> bool:
    """Whether other hosts cannot mean the same by a name, such as that of this host."""
    if name in ("localhost", *addresses):
        return False
    found = [ipaddress.ip_address(address.partition("%")[0]) for address in addresses]
    return all(address.is_loopback for address in found)


def _server(family: int, place: Any) -> socket.socket:
    server = socket.socket(family, socket.SOCK_STREAM)
    try:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        server.bind(place)
        server.listen(socket.SOMAXCONN)
        server.setblocking(False)
    except OSError:
        server.close()
        raise
    return server
