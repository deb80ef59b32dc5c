"""Records what `tf.distribute` really does, to `tensorflow.json` beside this file.

Run from the repository's root, in an environment of its own with `tensorflow-cpu` and
`tf_keras`:

    python -m tests.parity.record_tensorflow [TOPIC ...]

Naming topics records only those again. The tests read the record and need no
TensorFlow. Every entry holds its inputs, its number of replicas, and its result in the
encoding of `encoding.py`.
"""

import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")

import tf_keras

from .encoding import JSON
from .recording import collectives, contexts, training, values, variables
from .recording.files import header, write
from .recording.session import REPLICAS, start_devices

RECORD = Path(__file__).with_name("tensorflow.json")

Topic = Callable[[int], Iterator[dict[str, JSON]]]

TOPICS: dict[str, Topic | list[Topic]] = {
    "reduce": collectives.reduce,
    "gather": [collectives.gather, *collectives.mismatches("gather")],
    "all_reduce": collectives.all_reduce,
    "all_gather": [collectives.all_gather, *collectives.mismatches("all_gather")],
    "merge_call": collectives.merge_call,
    "gradients": collectives.gradients,
    "variables": variables.variables,
    "creation": variables.creation,
    "regroup": values.regroup,
    "local_results": values.local_results,
    "distribute_values": values.distribute_values,
    "extended": values.extended,
    "places": contexts.places,
    "misuse": contexts.misuse,
    "optimizers": training.optimizers,
    "metrics": training.metrics,
    "average_loss": training.average_loss,
    "regularization_loss": training.regularization_loss,
}


def made_by() -> dict[str, str]:
    """What made the record."""
    return header(
        "tests.parity.record_tensorflow",
        tf_keras=tf_keras.__version__,
        devices=f"{max(REPLICAS)} logical CPUs, MirroredStrategy on {', '.join(map(str, REPLICAS))}, eager",
    )


def record(topic: str) -> list[dict[str, JSON]]:
    """All entries of a topic, for every number of replicas, each function in a process
    of its own.

    TensorFlow refuses every collective after one has failed, so that errors would leak
    into what follows.
    """
    functions = TOPICS[topic]
    entries = []
    for replicas in REPLICAS:
        for function in functions if isinstance(functions, list) else [functions]:
            with ProcessPoolExecutor(1, mp_context=get_context("fork")) as process:
                entries += process.submit(_record, function, replicas).result()
    return entries


def _record(function: Topic, replicas: int) -> list[dict[str, JSON]]:
    logging.getLogger("tensorflow").setLevel(logging.CRITICAL)
    start_devices()
    return [{"replicas": replicas, **entry} for entry in function(replicas)]


def main(topics: list[str]) -> None:
    """Records `topics`, or all of them, and keeps the others as they were."""
    recorded = json.loads(RECORD.read_text()) if topics and RECORD.exists() else {}
    about = made_by()
    for topic in topics or TOPICS:
        recorded[topic] = record(topic)
        write(RECORD, about, {topic: recorded.get(topic, []) for topic in TOPICS})
        print(f"{topic}: {len(recorded[topic])} entries", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
