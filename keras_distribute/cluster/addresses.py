"""Addresses of tasks as text, `host:port`, of which an IPv6 host is in brackets."""

from __future__ import annotations


def joined(host: str, port: int | str) -> str:
    """The address of a port of a host: `10.0.0.1:1234`, `[::1]:1234`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parts(address: str) -> tuple[str, int]:
    """The host of an address, without brackets, and its port.

    Raises:
        ValueError: For text that has no port.
    """
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
