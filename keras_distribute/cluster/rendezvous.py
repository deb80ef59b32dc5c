"""Where the launchers of several hosts meet before each start of a job, to know who is
left. Knows nothing of JAX.

The launcher of the first host listens; each other one says how many processes it will
start, and hears which numbers they have. Who does not come in time is left out.

Each says and hears short lines. The first host greets with a number for one use, and
the other one answers with its own. What both say is signed for these numbers with the
token of the job, and nothing else looks at it before that. A connection has a few
seconds for its line, of bounded length, whatever the others do.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import ipaddress
import json
import re
import select
import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from keras_distribute.cluster import signing
from keras_distribute.cluster.signing import Seal
from keras_distribute.errors import ClusterError

_LINE_SECONDS = 5.0  # For a line, from the first moment to its last byte.
_POLL_SECONDS = 0.2
_FIRST = 0
_MOST_PROCESSES = 65536  # Of one host.
_MOST_BYTES = 1024  # Of a line that a stranger can write.
_MOST_ANSWER = 1 << 20  # Of a line of the first host, once it is known.
_MOST_GUESTS = 128  # Connections that have not said yet who they are.
_MOST_AT_ONCE = 64  # Taken before the others are looked after.
_MOST_TOLD = 20  # Of refused connections.
_GREETING = re.compile(rb"keras_distribute meets ([0-9a-f]{32})")
_REFUSED = b"refused"  # All that somebody without the token is told.
_NOT_LOCAL = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


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
    if not host or not port.isdecimal() or not 0 < int(port) < 65535:
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
    seal: Seal,
    given_up: Callable[[], bool] = lambda: False,
    tell: Callable[[str], None] = lambda text: None,
) -> Meeting:
    """Waits for the launchers of the other hosts.

    Args:
        address: Where they meet, on the first host.
        host: The number of this one.
        num_local: How many processes it will start.
        num_hosts: How many may come.
        least: How many must.
        seconds: To wait for the last ones.
        seal: With the token of the job.
        given_up: Ends the waiting when it says so.
        tell: Takes what the user should know while this waits, such as who was refused.

    Raises:
        ClusterError: Where too few come, or the first host cannot be reached; without
            a token; where the first host has no such address, or the port is taken.
    """
    if not seal.signs:
        raise without_token()
    if host != _FIRST:
        return _join(address, host, num_local, num_hosts, seconds, seal, given_up, tell)
    with _Reception(address, num_local, num_hosts, seal, tell) as reception:
        end = time.monotonic() + seconds
        while len(reception.sizes) < num_hosts and not given_up():
            left = end - time.monotonic()
            if left <= 0:
                break
            reception.serve(min(left, _POLL_SECONDS))
        hosts = tuple(sorted(reception.sizes))
        enough = len(hosts) >= least and not given_up()
        reception.answer(None if enough else _too_few(hosts, num_hosts, least))
        if not enough:
            raise _missing(_too_few(hosts, num_hosts, least), seconds)
        return Meeting(0, sum(reception.sizes.values()), hosts)


def without_token() -> ClusterError:
    """The error for launchers that could not tell each other from strangers."""
    return ClusterError(
        "The launchers of several hosts meet with a token of the job, which keeps "
        "everybody else out.",
        received=f"neither --token-file nor {signing.TOKEN} in the environment.",
        fix="write one, once, and give the same to the launcher of every host:\n"
        f"    {signing.HOW_TO_MAKE}\n"
        "    python -m keras_distribute.launch --token-file job.token ...",
    )


@dataclasses.dataclass(eq=False)
class _Guest:
    """A connection at the first host.

    Args:
        connection: Which never waits.
        address: Where it is from.
        since: When it came.
        nonce: What it was greeted with.
        heard: Of its line, so far.
        host: Its number, once it has proved that it knows the token.
        theirs: Its own number for one use, then.
    """

    connection: socket.socket
    address: str
    since: float
    nonce: str
    heard: bytearray
    host: int | None = None
    theirs: str = ""


class _Reception:
    """The first host's side: many connections at once, and none that others wait for.

    Args:
        address: Where it listens, and nowhere else.
        num_local: The processes of the first host.
        num_hosts: How many may come.
        seal: With the token of the job.
        tell: Takes what the user should know.
    """

    def __init__(
        self,
        address: tuple[str, int],
        num_local: int,
        num_hosts: int,
        seal: Seal,
        tell: Callable[[str], None],
    ) -> None:
        self.sizes = {_FIRST: num_local}
        self._num_hosts, self._seal, self._tell = num_hosts, seal, tell
        self._told: set[str] = set()
        self._guests: list[_Guest] = []
        self._selector = selectors.DefaultSelector()
        self._servers = _servers(address)
        for server in self._servers:
            self._selector.register(server, selectors.EVENT_READ)

    def __enter__(self) -> _Reception:
        return self

    def __exit__(self, *_: object) -> None:
        for guest in [*self._guests]:
            self._drop(guest)
        for server in self._servers:
            server.close()
        self._selector.close()

    def serve(self, seconds: float) -> None:
        """Looks after all who are there, and waits so long for somebody who is not."""
        for key, _ in self._selector.select(seconds):
            if key.data is None:
                self._welcome(key.fileobj)
            elif key.data in self._guests:
                self._listen(key.data)
        late = time.monotonic() - _LINE_SECONDS
        for guest in [g for g in self._guests if g.host is None and g.since < late]:
            self._refuse(guest, f"nothing came in {_LINE_SECONDS:.0f} seconds")

    def answer(self, error: str | None) -> None:
        """Tells all who have come what comes of it."""
        sizes, hosts = self.sizes, sorted(self.sizes)
        for guest in [guest for guest in self._guests if guest.host is not None]:
            first = sum(sizes[host] for host in hosts if host < (guest.host or 0))
            total = sum(sizes.values())
            answer = {"first": first, "processes": total, "hosts": hosts}
            self._say(guest, answer if error is None else {"error": error})

    def _welcome(self, server: Any) -> None:
        for _ in range(_MOST_AT_ONCE):
            try:
                connection, peer = server.accept()
            except OSError:  # Nobody any more, or whoever came has gone again.
                return
            connection.setblocking(False)
            nonce = signing.new_nonce()
            guest = _Guest(
                connection, str(peer[0]), time.monotonic(), nonce, bytearray()
            )
            self._guests.append(guest)
            self._selector.register(connection, selectors.EVENT_READ, guest)
            self._send(guest, f"keras_distribute meets {nonce}".encode())
            unknown = [guest for guest in self._guests if guest.host is None]
            if len(unknown) > _MOST_GUESTS:
                # The one that waits the longest, of the address with the most.
                count = Counter(guest.address for guest in unknown)
                most = max(count.values())
                crowd = (guest for guest in unknown if count[guest.address] == most)
                self._refuse(next(crowd), "too many connections at once")

    def _listen(self, guest: _Guest) -> None:
        try:
            part = guest.connection.recv(_MOST_BYTES)
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
        elif len(line) >= _MOST_BYTES:
            self._refuse(guest, f"a line of more than {_MOST_BYTES} bytes")

    def _hear(self, guest: _Guest, line: bytes) -> None:
        said = self._seal.opened(_joining(guest.nonce), line)
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
            return f"Host {host} was started with --nnodes {num_hosts}, host {_FIRST} with --nnodes {self._num_hosts}"
        if not _FIRST < host < num_hosts or not 0 < size <= _MOST_PROCESSES:
            return f"There is no host {host} of {size} processes"
        return None

    def _say(self, guest: _Guest, what: dict[str, Any]) -> None:
        purpose = _answering(guest.nonce, guest.theirs)
        self._send(guest, self._seal.sealed(purpose, json.dumps(what).encode()))

    def _send(self, guest: _Guest, line: bytes) -> None:
        # It fits into the buffer of a connection that reads; another one is no host's.
        with contextlib.suppress(OSError):
            guest.connection.send(line + b"\n")

    def _refuse(self, guest: _Guest, why: str) -> None:
        text = f"has refused a connection from {guest.address}: {why}."
        if text not in self._told and len(self._told) < _MOST_TOLD:
            self._told.add(text)
            self._tell(text)
        self._send(guest, _REFUSED)
        self._drop(guest)

    def _drop(self, guest: _Guest) -> None:
        if guest in self._guests:
            self._guests.remove(guest)
            self._selector.unregister(guest.connection)
            guest.connection.close()
            if guest.host is not None:
                self.sizes.pop(guest.host, None)


def _join(
    address: tuple[str, int],
    host: int,
    num_local: int,
    num_hosts: int,
    seconds: float,
    seal: Seal,
    given_up: Callable[[], bool],
    tell: Callable[[str], None],
) -> Meeting:
    start = time.monotonic()
    said = {"host": host, "processes": num_local, "hosts": num_hosts}
    reason = ""
    while (left := start + seconds - time.monotonic()) > 0 and not given_up():
        answer: dict[str, Any] = {}
        try:
            with socket.create_connection(address, min(left, _LINE_SECONDS)) as one:
                answer = _ask(one, said, seal, 2 * seconds, given_up)
        except _NoHost as error:
            if str(error) != reason:
                reason = str(error)
                tell(f"at {address[0]}:{address[1]} {reason}; tries again.")
        except OSError:
            pass
        if "error" in answer:
            raise _missing(str(answer["error"]), seconds)
        if answer:
            hosts = tuple(answer["hosts"])
            return Meeting(answer["first"], answer["processes"], hosts)
        time.sleep(_POLL_SECONDS)
    raise _missing(
        f"The launcher of host {_FIRST} cannot be reached at {address[0]}:{address[1]}"
        + (f": {reason}" if reason else ""),
        seconds,
    )


class _NoHost(Exception):
    """What answers is not the first host of this job, or takes this one for none."""


def _ask(
    connection: socket.socket,
    said: dict[str, Any],
    seal: Seal,
    seconds: float,
    given_up: Callable[[], bool],
) -> dict[str, Any]:
    """What the first host answers; nothing where it goes away before that."""
    greeting = _GREETING.fullmatch(
        _line(connection, _MOST_BYTES, _LINE_SECONDS, given_up)
    )
    if greeting is None:
        raise _NoHost("something else listens than a launcher")
    nonce, own = greeting[1].decode(), signing.new_nonce()
    line = json.dumps(said | {"nonce": own}).encode()
    connection.sendall(seal.sealed(_joining(nonce), line) + b"\n")
    for wait in (_LINE_SECONDS, seconds):  # It may wait as long for others.
        heard = _line(connection, _MOST_ANSWER, wait, given_up)
        if heard == _REFUSED:
            raise _NoHost("this host was refused, since its token is another one")
        if not heard:
            return {}
        answer = seal.opened(_answering(nonce, own), heard)
        if answer is None:
            raise _NoHost(f"an answer was refused: {signing.why_refused(heard)}")
        known = json.loads(answer)
        if "welcome" not in known:
            return known
    return {}


def _line(
    connection: socket.socket, most: int, seconds: float, given_up: Callable[[], bool]
) -> bytes:
    """The next line; empty where none comes in time, or one that is too long."""
    end, heard = time.monotonic() + seconds, bytearray()
    while time.monotonic() < end and not given_up():
        if not select.select([connection], [], [], _POLL_SECONDS)[0]:
            continue
        # Not further than the line, since the next one may be there already.
        ahead = connection.recv(4096, socket.MSG_PEEK)
        part = connection.recv(ahead.find(b"\n") + 1 or len(ahead) or 1)
        heard += part
        if not part or len(heard) > most:
            return b""
        if heard.endswith(b"\n"):
            return bytes(heard[:-1])
    return b""


def _joining(nonce: str) -> str:
    return f"a host joins {nonce}"


def _answering(nonce: str, theirs: str) -> str:
    return f"the first host answers {nonce} {theirs}"


def _servers(address: tuple[str, int]) -> list[socket.socket]:
    """Listens at the address that was named alone: all that the name means here."""
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
            f"The launcher of host {_FIRST} cannot listen at {name}:{port}: {error}.",
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


def _too_few(hosts: tuple[int, ...], num_hosts: int, least: int) -> str:
    return f"Of {num_hosts} hosts {len(hosts)} came, {least} are needed"


def _missing(text: str, seconds: float) -> ClusterError:
    return ClusterError(
        f"{text}.",
        received=f"a wait of {seconds:.0f} seconds.",
        fix="look at the launchers of the other hosts; --node-timeout waits longer, "
        "--min-nnodes needs fewer.",
    )
