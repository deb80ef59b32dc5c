"""Records how `tf.distribute` really distributes datasets, to `tensorflow_input.json`
beside this file.

Run from the repository's root, in an environment with `tensorflow-cpu`:

    python -m tests.parity.record_tensorflow_input [TOPIC ...]

Naming topics records only those again. The tests read the record and need no
TensorFlow. Pipelines are written as in `pipelines.py`, values in the encoding of
`encoding.py`. The topics that begin with "workers" start two processes, with a
TF_CONFIG each, for every entry.
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


from .encoding import JSON
from .recording import datasets, functions, input_options, iteration, workers
from .recording.files import header, write
from .recording.session import REPLICAS, start_devices

RECORD = Path(__file__).with_name("tensorflow_input.json")

Topic = Callable[[int], Iterator[dict[str, JSON]]]

TOPICS: dict[str, Topic] = {
    "distribute_dataset": datasets.distribute_dataset,
    "policies": datasets.policies,
    "structures": datasets.structures,
    "iteration": iteration.iteration,
    "options": input_options.options,
    "from_function": functions.from_function,
    "function_misuse": functions.function_misuse,
    "input_context": functions.input_context,
    "other_strategies": input_options.other_strategies,
}
WORKER_TOPICS: dict[str, Topic] = {
    "workers_dataset": workers.dataset,
    "workers_files": workers.files,
    "workers_function": workers.function,
    "workers_misc": workers.misc,
}


def made_by() -> dict[str, str]:
    """What made the record."""
    return header(
        "tests.parity.record_tensorflow_input",
        devices=f"{max(REPLICAS)} logical CPUs, MirroredStrategy on {', '.join(map(str, REPLICAS))}, eager",
        workers=f"{workers.WORKERS} processes with {' or '.join(map(str, workers.DEVICES))} CPUs, MultiWorkerMirroredStrategy",
    )


def record(topic: str) -> list[dict[str, JSON]]:
    """All entries of a topic, for every number of replicas, or of devices a worker."""
    if topic in WORKER_TOPICS:
        return [
            entry
            for devices in workers.DEVICES
            for entry in WORKER_TOPICS[topic](devices)
        ]
    entries = []
    for replicas in REPLICAS:
        with ProcessPoolExecutor(1, mp_context=get_context("fork")) as process:
            entries += process.submit(_record, topic, replicas).result()
    return entries


def _record(topic: str, replicas: int) -> list[dict[str, JSON]]:
    logging.getLogger("tensorflow").setLevel(logging.CRITICAL)
    start_devices()
    return [{"replicas": replicas, **entry} for entry in TOPICS[topic](replicas)]


def main(topics: list[str]) -> None:
    """Records `topics`, or all of them, and keeps the others as they were."""
    recorded = json.loads(RECORD.read_text()) if topics and RECORD.exists() else {}
    about = made_by()
    for topic in topics or (*TOPICS, *WORKER_TOPICS):
        recorded[topic] = record(topic)
        write(
            RECORD,
            about,
            {topic: recorded.get(topic, []) for topic in (*TOPICS, *WORKER_TOPICS)},
        )
        print(f"{topic}: {len(recorded[topic])} entries", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
