"""Records how TensorFlow assigns the devices of a TPU to replicas, to `tensorflow_tpu.json` beside this file.

It needs no TPU. Run from the repository's root, in an environment with `tensorflow-cpu`:

    python -m tests.parity.record_tensorflow_tpu
"""

import json
import os
import platform
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import tensorflow as tf

from .assignments import CASES, MESHES, TOPOLOGIES, build, described, topology

RECORD = Path(__file__).with_name("tensorflow_tpu.json")


def main() -> None:
    namespace = tf.tpu.experimental
    topics = {
        "assignments": [build(namespace, case) for case in CASES],
        "descriptions": [described(namespace, mesh) for mesh in MESHES if mesh != "one chip"],
        "topologies": [topology(namespace, arguments) for arguments in TOPOLOGIES],
    }
    header = {
        "command": "python -m tests.parity.record_tensorflow_tpu",
        "python": platform.python_version(),
        "tensorflow": tf.__version__,
    }
    lines = [f'"header": {json.dumps(header)}']
    lines += [f'"{topic}": [\n' + ",\n".join(map(json.dumps, said)) + "\n]" for topic, said in topics.items()]
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
