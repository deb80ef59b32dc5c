"""Launchers that meet: who takes part, which numbers their processes have, and what is said where too few come."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from keras_distribute.cluster import rendezvous
from keras_distribute.cluster.job import free_port
from keras_distribute.cluster.rendezvous import Meeting
from keras_distribute.errors import ClusterError

pytestmark = pytest.mark.timeout(60)


def met(sizes, *, num_hosts, least, seconds, address=None):
    """What comes of a meeting, by host; of some an error."""
    address = address or ("127.0.0.1", free_port())

    def one(host):
        options = {"num_hosts": num_hosts, "least": least, "seconds": seconds}
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
    assert found == {0: Meeting(0, 6, (0, 1, 2)), 1: Meeting(2, 6, (0, 1, 2)), 2: Meeting(5, 6, (0, 1, 2))}


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
    assert said.startswith(f"The launcher of host 0 cannot be reached at 127.0.0.1:{address[1]}.")


def test_strangers_and_those_who_leave_again_do_not_count():
    address, came = ("127.0.0.1", free_port()), threading.Event()

    def strangers():
        no_host = (
            b'{"host": 0, "processes": 7}\n',
            b'{"host": 3, "processes": 7}\n',
            b'{"host": 1, "processes": []}\n',
        )
        for text in (b"GET / HTTP/1.1\n", *no_host, b'{"host": 1, "processes": 7}\n'):
            while True:
                try:
                    with socket.create_connection(address, 5) as connection:
                        connection.sendall(text)
                        came.wait(0.3)
                    break
                except OSError:
                    time.sleep(0.05)

    thread = threading.Thread(target=strangers)
    thread.start()
    found = rendezvous.meet(address, 0, 1, num_hosts=3, least=1, seconds=4)
    thread.join()
    assert found == Meeting(0, 1, (0,))


def test_a_signal_ends_the_wait():
    with pytest.raises(ClusterError, match="Of 2 hosts 1 came"):
        rendezvous.meet(("", free_port()), 0, 1, num_hosts=2, least=2, seconds=60, given_up=lambda: True)


def test_a_signal_ends_the_wait_for_an_answer():
    start, asked = time.monotonic(), threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as silent, ThreadPoolExecutor(1) as pool:
        address = silent.getsockname()[:2]
        found = pool.submit(
            rendezvous.meet, address, 1, 1, num_hosts=2, least=2, seconds=40, given_up=lambda: asked.is_set()
        )
        with silent.accept()[0] as connection:
            assert connection.recv(100)
            asked.set()
            with pytest.raises(ClusterError, match="host 0 cannot be reached"):
                found.result()
    assert time.monotonic() - start < 20


@pytest.mark.parametrize(
    ("coordinator", "address"), [("host0:1234", ("host0", 1235)), ("[fd00::1]:80", ("fd00::1", 81))]
)
def test_addresses(coordinator, address):
    assert rendezvous.address_of(coordinator) == address
