"""Where the launchers of several hosts meet before each start of a job, to know who is
left.

The launcher of the first host listens (`reception`). Each other one says how many
processes it will start, and hears which numbers they have. A host that does not come in
time is left out.

All say short lines. The first host greets with a nonce, and the other one answers with
its own. What both say is signed for these nonces with the token of the job.
"""

from __future__ import annotations

import dataclasses
import json
import re
import select
import socket
import time
from collections.abc import Callable
from typing import Any

from keras_distribute.cluster import signing
from keras_distribute.cluster.signing import Seal
from keras_distribute.errors import ClusterError
from keras_distribute.launch.reception import (
    LINE_SECONDS,
    MOST_BYTES,
    REFUSED,
    Reception,
    answering,
    joining,
)

_POLL_SECONDS = 0.2
_MOST_ANSWER = 1 << 20  # Bytes of a line of the first host.
_GREETING = re.compile(rb"keras_distribute meets ([0-9a-f]{32})")


@dataclasses.dataclass(frozen=True)
class Meeting:
    """What a host hears: the number of its first process, of all, and who came."""

    first: int
    num_processes: int
    hosts: tuple[int, ...]


def address_of(coordinator: str) -> tuple[str, int]:
    """Where the launchers meet: at the port after that of process 0."""
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
        num_hosts: How many hosts may come.
        least: How many hosts must come.
        seconds: How long to wait for the last ones.
        seal: With the token of the job.
        given_up: Ends the wait when it returns `True`.
        tell: Called with news for the user, such as a refused connection.

    Raises:
        ClusterError: Where too few come, or the first host cannot be reached; without
            a token; where the address is not the first host's, or the port is taken.
    """
    if not seal.signs:
        raise without_token()
    if host:
        said = {"host": host, "processes": num_local, "hosts": num_hosts}
        return _join(address, said, seconds, seal, given_up, tell)
    with Reception(address, num_local, num_hosts, seal, tell) as reception:
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
    """The error for launchers without a token."""
    return ClusterError(
        "The launchers of several hosts meet with a token of the job, which keeps "
        "all others out.",
        received=f"neither --token-file nor {signing.TOKEN} in the environment.",
        fix="write one, once, and give the same to the launcher of every host:\n"
        f"    {signing.HOW_TO_MAKE}\n"
        "    python -m keras_distribute.launch --token-file job.token ...",
    )


def _join(
    address: tuple[str, int],
    said: dict[str, Any],
    seconds: float,
    seal: Seal,
    given_up: Callable[[], bool],
    tell: Callable[[str], None],
) -> Meeting:
    start = time.monotonic()
    reason = ""
    while (left := start + seconds - time.monotonic()) > 0 and not given_up():
        answer: dict[str, Any] = {}
        try:
            with socket.create_connection(address, min(left, LINE_SECONDS)) as server:
                answer = _ask(server, said, seal, 2 * seconds, given_up)
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
    text = f"The launcher of host 0 cannot be reached at {address[0]}:{address[1]}"
    raise _missing(f"{text}: {reason}" if reason else text, seconds)


class _NoHost(Exception):
    """The answer is not that of the first host of this job, or refuses this host."""


def _ask(
    connection: socket.socket,
    said: dict[str, Any],
    seal: Seal,
    seconds: float,
    given_up: Callable[[], bool],
) -> dict[str, Any]:
    """The answer of the first host; empty where it closes the connection before."""
    line = _line(connection, MOST_BYTES, LINE_SECONDS, given_up)
    greeting = _GREETING.fullmatch(line)
    if greeting is None:
        raise _NoHost("something else listens than a launcher")
    nonce, own = greeting[1].decode(), signing.new_nonce()
    line = json.dumps(said | {"nonce": own}).encode()
    connection.sendall(seal.sealed(joining(nonce), line) + b"\n")
    for wait in (LINE_SECONDS, seconds):  # It may wait as long for others.
        heard = _line(connection, _MOST_ANSWER, wait, given_up)
        if heard == REFUSED:
            raise _NoHost("this host was refused, since its token is another one")
        if not heard:
            return {}
        answer = seal.opened(answering(nonce, own), heard)
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


def _too_few(hosts: tuple[int, ...], num_hosts: int, least: int) -> str:
    return f"Of {num_hosts} hosts {len(hosts)} came, {least} are needed"


def _missing(text: str, seconds: float) -> ClusterError:
    return ClusterError(
        f"{text}.",
        received=f"a wait of {seconds:.0f} seconds.",
        fix="look at the launchers of the other hosts; --node-timeout waits longer, "
        "--min-nnodes needs fewer.",
    )
