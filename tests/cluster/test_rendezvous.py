"""Launchers that meet: who takes part, which numbers their processes have, and what is
said where too few come. And who does not: nobody without the token of the job takes
part, or disturbs the others.
"""

import contextlib
import json
import re
import resource
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from keras_distribute.cluster.ports import free_port
from keras_distribute.cluster.signing import Seal, new_nonce
from keras_distribute.errors import ClusterError
from keras_distribute.launch import reception, rendezvous
from keras_distribute.launch.rendezvous import Meeting
from tests import attacks

pytestmark = pytest.mark.timeout(60)
SEAL = Seal(b"the token of these tests, which nobody knows")


def met(
    sizes,
    *,
    num_hosts,
    least,
    seconds,
    address=None,
    seals=None,
    tell=lambda text: None,
):
    """What comes of a meeting, by host; of some an error."""
    address = address or ("127.0.0.1", free_port())

    def one(host):
        options = {"num_hosts": num_hosts, "least": least, "seconds": seconds}
        options |= {"seal": (seals or {}).get(host, SEAL), "tell": tell}
        try:
            return rendezvous.meet(address, host, sizes[host], **options)
        except ClusterError as error:
            return str(error)

    with ThreadPoolExecutor(len(sizes)) as pool:
        return dict(zip(sizes, pool.map(one, sizes), strict=True))


def test_all_come_and_nobody_waits_any_longer():
    start = time.monotonic()
    found = met({2: 1, 0: 2, 1: 3}, num_hosts=3, least=1, seconds=30)
    assert time.monotonic() - start < 15
    assert found == {
        0: Meeting(0, 6, (0, 1, 2)),
        1: Meeting(2, 6, (0, 1, 2)),
        2: Meeting(5, 6, (0, 1, 2)),
    }


def test_whoever_is_gone_is_left_out():
    found = met({0: 2, 2: 2}, num_hosts=3, least=2, seconds=1)
    assert found == {0: Meeting(0, 4, (0, 2)), 2: Meeting(2, 4, (0, 2))}


def test_too_few_are_an_error_on_all():
    found = met({0: 2, 2: 2}, num_hosts=4, least=3, seconds=0.5)
    for said in found.values():
        assert said.startswith("Of 4 hosts 2 came, 3 are needed.\n")
        assert "--node-timeout waits longer" in said


def test_the_first_host_is_needed():
    address = ("127.0.0.1", free_port())
    said = met({1: 1}, num_hosts=2, least=1, seconds=0.5, address=address)[1]
    assert said.startswith(
        f"The launcher of host 0 cannot be reached at 127.0.0.1:{address[1]}."
    )


def test_strangers_and_those_who_leave_again_do_not_count():
    address = ("127.0.0.1", free_port())

    def strangers():
        numbers = (
            (0, 7),
            (3, 7),
            (1, 0),
            (1, 10**6),
            (-1, 1),
            (1, []),
            (1, True),
            (float("inf"), 1),
            (1, 7),
        )
        for (
            host,
            size,
        ) in numbers:  # All with the token; the last one is a host, and leaves.
            while True:
                try:
                    attack = attacks.signed(
                        {"host": host, "processes": size, "hosts": 3}, SEAL
                    )
                    attack(address, lambda _: time.sleep(0.05))
                    break
                except OSError:
                    time.sleep(0.05)

    thread = threading.Thread(target=strangers)
    thread.start()
    found = rendezvous.meet(address, 0, 1, num_hosts=3, least=1, seconds=2, seal=SEAL)
    thread.join()
    assert found == Meeting(0, 1, (0,))


def test_a_signal_ends_the_wait():
    with pytest.raises(ClusterError, match="Of 2 hosts 1 came"):
        rendezvous.meet(
            ("127.0.0.1", free_port()),
            0,
            1,
            num_hosts=2,
            least=2,
            seconds=60,
            seal=SEAL,
            given_up=lambda: True,
        )


def test_a_signal_ends_the_wait_for_an_answer():
    start, asked = time.monotonic(), threading.Event()
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        ThreadPoolExecutor(1) as pool,
    ):
        address = silent.getsockname()[:2]
        found = pool.submit(
            rendezvous.meet,
            address,
            1,
            1,
            num_hosts=2,
            least=2,
            seconds=40,
            seal=SEAL,
            given_up=lambda: asked.is_set(),
        )
        with silent.accept()[0] as connection:
            connection.sendall(
                b"keras_distribute meets " + new_nonce().encode() + b"\n"
            )
            assert connection.recv(100)
            asked.set()
            with pytest.raises(ClusterError, match="host 0 cannot be reached"):
                found.result()
    assert time.monotonic() - start < 20


@pytest.mark.parametrize(
    ("coordinator", "address"),
    [("host0:1234", ("host0", 1235)), ("[fd00::1]:80", ("fd00::1", 81))],
)
def test_addresses(coordinator, address):
    assert rendezvous.address_of(coordinator) == address


@pytest.mark.parametrize(
    "coordinator",
    ["host0", ":1", "host0:", "host0:0", "host0:65535", "host0:x", "host0:²"],
)
def test_what_is_no_address(coordinator):
    with pytest.raises(
        ClusterError, match="The address of process 0 is a host and a port"
    ):
        rendezvous.address_of(coordinator)


# Strangers. ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", attacks.ATTACKS)
def test_an_attack_keeps_nobody_out_and_costs_nothing(name, monkeypatch):
    """The other host comes while the attack goes on, and takes part within seconds."""
    monkeypatch.setattr(reception, "LINE_SECONDS", 1.5)  # Not 5, for a byte at a time.
    address, told = ("127.0.0.1", free_port()), []
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.monotonic()
    with (
        ThreadPoolExecutor(1) as pool,
        attacks.attacked(address, [name], seconds=20) as done,
    ):
        options = {
            "num_hosts": 2,
            "least": 2,
            "seconds": 20,
            "seal": SEAL,
            "tell": told.append,
        }
        first = pool.submit(rendezvous.meet, address, 0, 1, **options)
        while not done[name] and time.monotonic() - start < 8:
            time.sleep(0.02)
        began = time.monotonic()
        assert rendezvous.meet(address, 1, 3, **options) == Meeting(1, 4, (0, 1))
        assert first.result() == Meeting(0, 4, (0, 1))
        assert time.monotonic() - began < 6
    # Kilobytes.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 100_000
    assert all(
        "127.0.0." in text
        for text in told
        if text.startswith("has refused a connection")
    ), told


def test_all_attacks_at_once_bring_nobody_in():
    address, told = ("127.0.0.1", free_port()), []
    with attacks.attacked(address, seconds=20) as done:
        start = time.monotonic()
        options = {
            "num_hosts": 2,
            "least": 1,
            "seconds": 4,
            "seal": SEAL,
            "tell": told.append,
        }
        assert rendezvous.meet(address, 0, 1, **options) == Meeting(0, 1, (0,))
        assert time.monotonic() - start < 6
    assert sum(count > 0 for count in done.values()) > 15, done
    assert 0 < len(told) <= 20 and any(
        "it is not signed with the token of this job" in text for text in told
    )


def test_it_listens_at_the_address_that_was_named_alone():
    address = ("127.0.0.5", free_port())
    with ThreadPoolExecutor(1) as pool:
        options = {"num_hosts": 2, "least": 1, "seconds": 20, "seal": SEAL}
        found = pool.submit(rendezvous.meet, address, 0, 1, **options)
        end = time.monotonic() + 10
        while True:
            with contextlib.suppress(OSError), socket.create_connection(address, 2):
                break
            assert time.monotonic() < end
        for other in ("127.0.0.1", "127.0.0.6", "::1"):
            with pytest.raises(OSError):
                socket.create_connection((other, address[1]), 2).close()
        assert rendezvous.meet(address, 1, 1, **options) == Meeting(1, 2, (0, 1))
        assert found.result() == Meeting(0, 2, (0, 1))


def test_another_token_is_named_on_both_sides_and_shown_on_none():
    told = []
    seals = {1: Seal(b"the token of another job, and a secret, too")}
    found = met(
        {0: 1, 1: 1}, num_hosts=2, least=2, seconds=1.5, seals=seals, tell=told.append
    )
    assert found[0].startswith("Of 2 hosts 1 came, 2 are needed.\n")
    assert re.match(
        r"The launcher of host 0 cannot be reached at 127.0.0.1:\d+: "
        "this host was refused, since its token is another one",
        found[1],
    )
    refused = "has refused a connection from 127.0.0.1: what it says: it is not signed "
    refused += "with the token of this job."
    assert refused in told and any(
        "this host was refused, since its token is another one" in text for text in told
    )
    assert len(told) == 2  # Once for each, however often it was tried.
    assert not any(
        "secret" in text or "nobody knows" in text for text in [*told, *found.values()]
    )


def test_without_a_token_nobody_listens():
    address = ("127.0.0.1", free_port())
    with pytest.raises(
        ClusterError,
        match="(?s)meet with a token of the job.*umask 077.*--token-file job.token",
    ):
        rendezvous.meet(address, 0, 1, num_hosts=2, least=1, seconds=1, seal=Seal(None))


def test_a_recorded_host_cannot_be_played_again():
    """What an honest host said at one meeting, byte for byte, at the next one."""
    said = []
    real = ("127.0.0.1", free_port())
    with (
        socket.create_server(("127.0.0.1", 0)) as between,
        ThreadPoolExecutor(3) as pool,
    ):
        options = {"num_hosts": 2, "least": 2, "seconds": 10, "seal": SEAL}
        first = pool.submit(rendezvous.meet, real, 0, 1, **options)
        second = pool.submit(
            rendezvous.meet, between.getsockname()[:2], 1, 2, **options
        )
        with between.accept()[0] as host:
            while True:
                with contextlib.suppress(OSError):
                    server = socket.create_connection(real, 5)
                    break
            with server:
                greeting = server.recv(200)
                host.sendall(greeting)
                said.append(host.recv(500))
                server.sendall(said[0])
                while part := server.recv(500):
                    host.sendall(part)
        assert first.result() == Meeting(0, 3, (0, 1)) and second.result() == Meeting(
            1, 3, (0, 1)
        )
        alone = pool.submit(
            rendezvous.meet, real, 0, 1, **options | {"least": 1, "seconds": 1.5}
        )
        end = time.monotonic() + 1
        while time.monotonic() < end:
            with (
                contextlib.suppress(OSError),
                socket.create_connection(real, 5) as replayed,
            ):
                replayed.sendall(said[0])
                time.sleep(0.1)
        assert alone.result() == Meeting(0, 1, (0,))


def impostor(server, over, behave):
    """Somebody who has the address of the first host."""
    server.settimeout(0.1)
    while not over.is_set():
        with contextlib.suppress(OSError), server.accept()[0] as connection:
            connection.settimeout(2.0)
            behave(connection)


def silent(connection):
    time.sleep(0.5)


def endless(connection):
    for _ in range(200):
        connection.sendall(b"x" * 2**20)


def endless_after_a_greeting(connection):
    greets(connection)
    endless(connection)


def greets(connection):
    connection.sendall(b"keras_distribute meets " + b"0" * 32 + b"\n")
    connection.recv(500)


def answers(what):
    def behave(connection):
        greets(connection)
        connection.sendall(what)

    return behave


ANSWER = {"first": 0, "processes": 10**6, "hosts": [0, 1]}


@pytest.mark.parametrize(
    ("behave", "reason"),
    [
        (silent, ": something else listens than a launcher"),
        (endless, ": something else listens than a launcher"),
        (endless_after_a_greeting, ""),
        (
            answers(json.dumps(ANSWER).encode() + b"\n"),
            ": an answer was refused: it is not signed",
        ),
        (
            answers(b'{"error": "go away"}\n'),
            ": an answer was refused: it is not signed",
        ),
        (answers(b"[" * 10**5 + b"\n"), ": an answer was refused: it is not signed"),
        (
            answers(attacks.WRONG.sealed("x", json.dumps(ANSWER).encode()) + b"\n"),
            ": an answer was refused: it is not signed with the token of this job",
        ),
        (
            answers(b"refused\n"),
            ": this host was refused, since its token is another one",
        ),
    ],
)
def test_an_impostor_of_the_first_host_is_not_believed(behave, reason):
    """And the real one is, when it comes."""
    address, over = ("127.0.0.1", free_port()), threading.Event()
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with ThreadPoolExecutor(2) as pool, socket.create_server(address) as server:
        there = pool.submit(impostor, server, over, behave)
        start = time.monotonic()
        with pytest.raises(
            ClusterError, match=re.escape(f"at 127.0.0.1:{address[1]}{reason}")
        ):
            rendezvous.meet(address, 1, 1, num_hosts=2, least=2, seconds=1, seal=SEAL)
        assert time.monotonic() - start < 10
        options = {"num_hosts": 2, "least": 2, "seconds": 20, "seal": SEAL}
        second = pool.submit(rendezvous.meet, address, 1, 1, **options)
        over.set()
        there.result()
        server.close()
        assert rendezvous.meet(address, 0, 1, **options) == Meeting(0, 2, (0, 1))
        assert second.result() == Meeting(1, 2, (0, 1))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 100_000


def test_two_launchers_with_one_number_are_told():
    address = ("127.0.0.1", free_port())
    options = {"num_hosts": 3, "least": 2, "seconds": 2.5, "seal": SEAL}
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(rendezvous.meet, address, 0, 1, **options)
        older = pool.submit(rendezvous.meet, address, 1, 1, **options)
        time.sleep(0.5)
        newer = pool.submit(rendezvous.meet, address, 1, 2, **options)
        with pytest.raises(ClusterError, match="Another launcher has come as host 1"):
            older.result()
        assert newer.result() == Meeting(1, 3, (0, 1)) and first.result() == Meeting(
            0, 3, (0, 1)
        )


def test_hosts_that_count_differently_are_told():
    address, over = ("127.0.0.1", free_port()), threading.Event()
    with ThreadPoolExecutor(1) as pool:
        options = {"least": 1, "seconds": 20, "seal": SEAL, "given_up": over.is_set}
        pool.submit(rendezvous.meet, address, 0, 1, num_hosts=2, **options)
        with pytest.raises(
            ClusterError,
            match="Host 1 was started with --nnodes 3, host 0 with --nnodes 2",
        ):
            rendezvous.meet(address, 1, 1, num_hosts=3, **options)
        over.set()


def test_an_address_that_is_not_of_this_host_or_taken(monkeypatch):
    options = {"num_hosts": 2, "least": 1, "seconds": 1, "seal": SEAL}
    with pytest.raises(
        ClusterError, match="cannot listen at 192.0.2.1:1235: .*Cannot assign"
    ):
        rendezvous.meet(("192.0.2.1", 1235), 0, 1, **options)
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(ClusterError, match="(?s)in use.*two free ports"),
    ):
        rendezvous.meet(taken.getsockname()[:2], 0, 1, **options)
    here = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 1235))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: here)
    with pytest.raises(
        ClusterError, match="here host0 is 127.0.1.1, which only this host has"
    ):
        rendezvous.meet(("host0", 1235), 0, 1, **options)
