"""Records into how many parts TensorFlow's partitioners divide variables, and what the
parts are on parameter servers, to `tensorflow_partitions.json` beside this file.

Run from the repository's root, in an environment with `tensorflow-cpu`:

    python -m tests.parity.record_tensorflow_partitions
"""

import os
import socket
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import tensorflow as tf

from .partitions import BAD, DIVIDED, PARTITIONERS, counts
from .recording.files import header, write

RECORD = Path(__file__).with_name("tensorflow_partitions.json")
NUM_PS = 3


def parts() -> list[Any]:
    """The rows of each part of variables under a `ParameterServerStrategy`."""
    cluster = {"worker": [_free()], "ps": [_free() for _ in range(NUM_PS)]}
    spec = tf.train.ClusterSpec(cluster)
    servers = [
        tf.distribute.Server(spec, job, i, protocol="grpc")
        for job, tasks in cluster.items()
        for i in range(len(tasks))
    ]
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        spec, rpc_layer="grpc"
    )
    wanted = [1, 1]
    strategy = tf.distribute.ParameterServerStrategy(
        resolver, variable_partitioner=lambda shape, dtype: list(wanted)
    )
    found: list[Any] = []
    with strategy.scope():
        for rows, columns, number in DIVIDED:
            wanted[0] = number
            variable = tf.Variable(tf.zeros([rows, columns]))
            of = getattr(variable, "variables", [variable])
            found.append([int(part.shape[0]) for part in of])
    del servers
    return found


def _free() -> str:
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        return f"localhost:{taken.getsockname()[1]}"


def main() -> None:
    namespace = tf.distribute.experimental.partitioners
    topics = {
        topic: [
            counts(lambda n=n, a=a: getattr(namespace, n)(**a), tf.TensorShape)
            for n, a in cases
        ]
        for topic, cases in (("counts", PARTITIONERS), ("refused", BAD))
    }
    topics["parts"] = parts()
    write(RECORD, header("tests.parity.record_tensorflow_partitions"), topics)


if __name__ == "__main__":
    main()
