"""Records how TensorFlow assigns the devices of a TPU to replicas, to
`tensorflow_tpu.json` beside this file.

It needs no TPU. Run from the repository's root, in an environment with
`tensorflow-cpu`:

    python -m tests.parity.record_tensorflow_tpu
"""

import os
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import tensorflow as tf

from .assignments import CASES, MESHES, TOPOLOGIES, build, described, topology
from .recording.files import header, write

RECORD = Path(__file__).with_name("tensorflow_tpu.json")


def main() -> None:
    namespace = tf.tpu.experimental
    topics = {
        "assignments": [build(namespace, case) for case in CASES],
        "descriptions": [
            described(namespace, mesh) for mesh in MESHES if mesh != "one chip"
        ],
        "topologies": [topology(namespace, arguments) for arguments in TOPOLOGIES],
    }
    write(RECORD, header("tests.parity.record_tensorflow_tpu"), topics)


if __name__ == "__main__":
    main()
