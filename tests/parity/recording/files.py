"""How a record of TensorFlow's answers is written: a header, and a line for each case."""

import json
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tensorflow as tf


def write(record: Path, module: str, topics: dict[str, Iterable[Any]]) -> None:
    """Writes `topics` to the file `record`.

    Args:
        record: The file.
        module: Which makes it, with `python -m`.
        topics: The cases of each topic, in JSON's types.
    """
    header = {"command": f"python -m {module}", "python": platform.python_version(), "tensorflow": tf.__version__}
    lines = [f'"header": {json.dumps(header)}']
    lines += [f'"{topic}": [\n' + ",\n".join(map(json.dumps, cases)) + "\n]" for topic, cases in topics.items()]
    record.write_text("{\n" + ",\n".join(lines) + "\n}\n")
