"""`keras-distribute env`: what this machine has, as text for a bug report."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from keras_distribute.commands import facts, output
from keras_distribute.summary.tables import Table, bytes_in_words

_SECONDS = 30.0


def main(
    arguments: Sequence[str] | None = None, prog: str = "keras-distribute env"
) -> int:
    """The command line; returns the exit code: 1 where devices or the cluster do not
    answer.
    """
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Shows the versions, devices, thread pool, environment and cluster "
        "that a program here would find, as text for a bug report. It starts no "
        "training and connects to no other process; values of variables whose names "
        "speak of tokens or keys, also in JSON, are not shown.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    text = f"seconds to wait for devices and for the cluster (default: {_SECONDS:g})"
    parser.add_argument("--timeout", type=float, default=_SECONDS, help=text)
    options = parser.parse_args(arguments)
    if options.timeout <= 0:
        parser.error("--timeout is a number of seconds above 0")
    found = facts.gather(options.timeout)
    hangs = found.pop("hangs")
    if options.json:
        sys.stdout.write(f"{json.dumps(found, indent=2)}\n")
    else:
        output.show("keras_distribute: environment", [], tables(found))
    failed = bool(found["devices"]["problem"] or found["cluster"]["problem"])
    if hangs:
        # The thread that waits would keep this process.
        sys.stdout.flush()
        os._exit(1)
    return int(failed)


def tables(found: dict[str, Any]) -> list[Table]:
    """What `facts.gather` returned, in words."""
    return [
        _pairs("versions", ("package", "version"), _versions(found["versions"])),
        _devices(found["devices"]),
        _pairs("host", ("what", "how many"), _host(found)),
        _pairs("cluster", ("what", "which"), _cluster(found)),
        _pairs("environment", ("variable", "value"), found["environment"]),
    ]


def _versions(versions: dict[str, Any]) -> dict[str, str]:
    return {
        **versions["installed"],
        "not installed": ", ".join(versions["not_installed"]) or "none",
        "newest tested": versions["newest_tested"],
        "executable": versions["executable"],
    }


def _devices(devices: dict[str, Any]) -> Table:
    rows = [
        (
            each["name"],
            each["kind"],
            _bytes(each["bytes_limit"]),
            _bytes(each["bytes_in_use"]),
        )
        for each in devices["local"]
    ]
    title = f"devices of this process, backend {devices['backend']}"
    if devices["problem"]:
        rows = [(devices["problem"], "", "", "")]
    header = ("device", "kind", "memory", "in use")
    return Table(title, header, tuple(rows), frozenset({2, 3}))


def _host(found: dict[str, Any]) -> dict[str, str]:
    host, pool = found["host"], found["thread_pool"]
    return {
        "CPU cores": str(host["cpus"]),
        "memory": _bytes(host["memory_bytes"]),
        "XLA's threads for CPU devices": f"{pool['threads']}, by {pool['set_by']}",
    }


def _cluster(found: dict[str, Any]) -> dict[str, str]:
    cluster = found["cluster"]
    if cluster["problem"]:
        return {"problem": cluster["problem"], "strategy": found["strategy"]}
    tasks = (f"{count} {job}" for job, count in cluster["tasks"].items())
    number, count = cluster["process_id"], cluster["num_processes"]
    return {
        "resolver": cluster["resolver"],
        "tasks": ", ".join(tasks) or "none",
        "this task": cluster["task"] or "none",
        "process": f"{number} of {count} that train together",
        "first process": cluster["coordinator"] or "this one",
        "strategy": found["strategy"],
    }


def _pairs(title: str, header: tuple[str, str], pairs: dict[str, str]) -> Table:
    return Table(title, header, tuple(pairs.items()), frozenset())


def _bytes(count: int | None) -> str:
    return "not known" if count is None else bytes_in_words(count)
