"""Ports for tasks that another process starts: of the range that systems give nobody."""

import random
import socket

import pytest

from keras_distribute.cluster import ports


def test_no_port_that_the_system_gives_to_others():
    with socket.create_server(("127.0.0.1", 0)) as server:
        given = server.getsockname()[1]
    assert given not in ports._PORTS  # So nor does any connection.
    assert {ports.free_port() in ports._PORTS for _ in range(20)} == {True}


def _has_ipv6():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize("host", ["", "127.0.0.1", "::1"])
def test_a_port_that_is_taken_is_passed_over(monkeypatch, host):
    first = ports.free_port("127.0.0.1")
    monkeypatch.setattr(ports, "_PORTS", range(first, first + 3))
    monkeypatch.setattr(ports, "_TRIES", 3)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    if ":" in host and not _has_ipv6():
        pytest.skip("This machine has no IPv6.")
    with socket.create_server((host, first), family=family):
        found = {ports.free_port(host) for _ in range(10)}
    assert found and first not in found


def test_a_port_of_the_systems_own_where_all_are_taken(monkeypatch):
    taken = ports.free_port("127.0.0.1")
    monkeypatch.setattr(ports, "_PORTS", range(taken, taken + 1))
    monkeypatch.setattr(ports, "_TRIES", 1)
    with socket.create_server(("127.0.0.1", taken)):
        assert ports.free_port("127.0.0.1") not in (0, taken)


def test_several_ports_are_different_ones(monkeypatch):
    first = ports.free_port("127.0.0.1")
    monkeypatch.setattr(ports, "_PORTS", range(first, first + 3))
    monkeypatch.setattr(ports, "_TRIES", 3)
    assert len(set(ports.free_ports(5, "127.0.0.1"))) == 5


def test_programs_with_the_same_seed_do_not_take_the_same_port():
    found = []
    for _ in range(5):
        random.seed(0)
        found.append(ports.free_port())
    assert len(set(found)) > 1


def test_an_address_of_another_host():
    with pytest.raises(OSError, match="assign"):
        ports.free_port("192.0.2.1")
