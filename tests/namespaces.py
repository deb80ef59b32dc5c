"""Two network namespaces that stand for two hosts, with a link that can be cut.

They need root, `ip` and a kernel with namespaces.
"""

import contextlib
import os
import pathlib
import shutil
import socket
import subprocess

import pytest


def ip(*arguments):
    return subprocess.run(
        ["ip", *arguments], check=True, capture_output=True, text=True, timeout=20
    )


@contextlib.contextmanager
def two_hosts():
    """The names of two namespaces, linked by `link0` and `link1`."""
    names = [f"kd{os.getpid()}-{i}" for i in (0, 1)]
    hosts = [pathlib.Path("/etc/netns") / name for name in names]
    try:
        for name, folder in zip(names, hosts, strict=True):
            ip("netns", "add", name)
            # `ip netns exec` puts it in place of /etc/hosts.
            folder.mkdir(parents=True)
            address = f"10.213.0.{1 + int(name[-1])}"
            (folder / "hosts").write_text(
                f"127.0.0.1 localhost\n{address} {socket.gethostname()}\n"
            )
        ip(
            "link",
            "add",
            "link0",
            "netns",
            names[0],
            "type",
            "veth",
            "peer",
            "name",
            "link1",
            "netns",
            names[1],
        )
        for i, name in enumerate(names):
            ip("-n", name, "address", "add", f"10.213.0.{1 + i}/24", "dev", f"link{i}")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", f"link{i}", "up")
        yield names
    finally:
        for name, folder in zip(names, hosts, strict=True):
            with contextlib.suppress(subprocess.SubprocessError, OSError):
                ip("netns", "del", name)
            shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def hosts():
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root, and the command ip")
    with contextlib.ExitStack() as stack:
        try:
            names = stack.enter_context(two_hosts())
        except (subprocess.SubprocessError, OSError) as error:
            pytest.skip(
                f"this kernel has no network namespaces: {getattr(error, 'stderr', error)}"
            )
        yield names
