"""How a record of TensorFlow's answers is made and written: a header, and a line for
each case.
"""

import json
import logging
import platform
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import tensorflow as tf

from .session import REPLICAS, Entry, start_devices

Topic = Callable[[int], Iterator[Entry]]


def header(module: str, **more: str) -> dict[str, str]:
    """What made a record: `python -m module`, the versions, and `more`."""
    return {
        "command": f"python -m {module}",
        "python": platform.python_version(),
        "tensorflow": tf.__version__,
        **more,
    }


DEVICES = (
    f"{max(REPLICAS)} logical CPUs, MirroredStrategy on "
    f"{', '.join(map(str, REPLICAS))}, eager"
)


def for_all_replicas(*functions: Topic) -> list[Entry]:
    """The entries of a topic for every number of replicas, each function in a process
    of its own.

    TensorFlow refuses every collective after one has failed, so that errors would leak
    into what follows.
    """
    entries: list[Entry] = []
    for replicas in REPLICAS:
        for function in functions:
            with ProcessPoolExecutor(1, mp_context=get_context("fork")) as process:
                entries += process.submit(_entries, function, replicas).result()
    return entries


def _entries(function: Topic, replicas: int) -> list[Entry]:
    logging.getLogger("tensorflow").setLevel(logging.CRITICAL)
    start_devices()
    return [{"replicas": replicas, **entry} for entry in function(replicas)]


def update(
    record: Path,
    header: dict[str, str],
    topics: dict[str, Callable[[], list[Entry]]],
    names: list[str],
) -> None:
    """Records the topics of these names, or all, and keeps the others as they were."""
    recorded = json.loads(record.read_text()) if names and record.exists() else {}
    for name in names or topics:
        recorded[name] = topics[name]()
        write(record, header, {topic: recorded.get(topic, []) for topic in topics})
        print(f"{name}: {len(recorded[name])} entries", flush=True)


def write(
    record: Path, header: dict[str, str], topics: dict[str, Iterable[Any]]
) -> None:
    """Writes `topics` to the file `record`: one case a line, so that a difference reads
    as one.

    Args:
        record: The file.
        header: What made it.
        topics: The cases of each topic, in JSON's types.
    """
    lines = [f'"header": {json.dumps(header, indent=1)}']
    lines += [
        f'"{topic}": [\n' + ",\n".join(map(json.dumps, cases)) + "\n]"
        for topic, cases in topics.items()
    ]
    record.write_text("{\n" + ",\n".join(lines) + "\n}\n")
