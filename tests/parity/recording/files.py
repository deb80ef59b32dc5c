"""How a record of TensorFlow's answers is written: a header, and a line for each case."""

import json
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tensorflow as tf


def header(module: str, **more: str) -> dict[str, str]:
    """What made a record: `python -m module`, the versions, and `more`."""
    return {
        "command": f"python -m {module}",
        "python": platform.python_version(),
        "tensorflow": tf.__version__,
        **more,
    }


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
