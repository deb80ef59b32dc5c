"""Records how `tf.distribute` really distributes datasets, to `tensorflow_input.json`
beside this file.

Run from the repository's root, in an environment with `tensorflow-cpu`:

    python -m tests.parity.record_tensorflow_input [TOPIC ...]

Naming topics records only those again. The tests read the record and need no
TensorFlow. Pipelines are written as in `pipelines.py`, values in the encoding of
`encoding.py`. The topics that begin with "workers" start two processes, with a
TF_CONFIG each, for every entry.
"""

import os
import sys
from functools import partial
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from .recording import datasets, functions, input_options, iteration, workers
from .recording.files import DEVICES, Topic, for_all_replicas, header, update

RECORD = Path(__file__).with_name("tensorflow_input.json")

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


if __name__ == "__main__":
    update(
        RECORD,
        header(
            "tests.parity.record_tensorflow_input",
            devices=DEVICES,
            workers=f"{workers.WORKERS} processes with {' or '.join(map(str, workers.DEVICES))} CPUs, MultiWorkerMirroredStrategy",
        ),
        {name: partial(for_all_replicas, made) for name, made in TOPICS.items()}
        | {
            name: partial(workers.for_all_devices, made)
            for name, made in WORKER_TOPICS.items()
        },
        sys.argv[1:],
    )
