"""Records what `tf.distribute` really does, to `tensorflow.json` beside this file.

Run from the repository's root, in an environment of its own with `tensorflow-cpu` and
`tf_keras`:

    python -m tests.parity.record_tensorflow [TOPIC ...]

Naming topics records only those again. The tests read the record and need no
TensorFlow. Every entry holds its inputs, its number of replicas, and its result in the
encoding of `encoding.py`.
"""

import os
import sys
from functools import partial
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")

import tf_keras

from .recording import collectives, contexts, training, values, variables
from .recording.files import DEVICES, Topic, for_all_replicas, header, update

RECORD = Path(__file__).with_name("tensorflow.json")

TOPICS: dict[str, list[Topic]] = {
    "reduce": [collectives.reduce],
    "gather": [collectives.gather, *collectives.mismatches("gather")],
    "all_reduce": [collectives.all_reduce],
    "all_gather": [collectives.all_gather, *collectives.mismatches("all_gather")],
    "merge_call": [collectives.merge_call],
    "gradients": [collectives.gradients],
    "variables": [variables.variables],
    "creation": [variables.creation],
    "regroup": [values.regroup],
    "local_results": [values.local_results],
    "distribute_values": [values.distribute_values],
    "extended": [values.extended],
    "places": [contexts.places],
    "misuse": [contexts.misuse],
    "optimizers": [training.optimizers],
    "metrics": [training.metrics],
    "average_loss": [training.average_loss],
    "regularization_loss": [training.regularization_loss],
}


if __name__ == "__main__":
    update(
        RECORD,
        header(
            "tests.parity.record_tensorflow",
            tf_keras=tf_keras.__version__,
            devices=DEVICES,
        ),
        {name: partial(for_all_replicas, *made) for name, made in TOPICS.items()},
        sys.argv[1:],
    )
