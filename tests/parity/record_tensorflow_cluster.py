"""Records what TensorFlow's cluster resolvers say, to `tensorflow_cluster.json` beside
this file.

Run from the repository's root, in an environment with `tensorflow-cpu`:

    python -m tests.parity.record_tensorflow_cluster
"""

import os
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import tensorflow as tf
from tensorflow.python.distribute import multi_worker_util
from tensorflow.python.distribute.cluster_resolver.sagemaker_cluster_resolver import (
    SageMakerClusterResolver,
)

from .clusters import RESOLVERS, SPECS, UNIONS, answers, spec_answers
from .recording.files import header, write

RECORD = Path(__file__).with_name("tensorflow_cluster.json")
RULES: dict[str, Any] = {
    "is_chief": multi_worker_util.is_chief,
    "id_in_cluster": multi_worker_util.id_in_cluster,
    "worker_count": lambda spec, task_type, _: multi_worker_util.worker_count(
        spec, task_type
    ),
}


def resolver_of(name: str) -> Any:
    """TensorFlow's class; one of them has no public name."""
    found = getattr(tf.distribute.cluster_resolver, name, None)
    return found or {"SageMakerClusterResolver": SageMakerClusterResolver}[name]


def union(parts: list[Any]) -> Any:
    cr = tf.distribute.cluster_resolver
    simple = [
        cr.SimpleClusterResolver(tf.train.ClusterSpec(c), task_type=t, task_id=i)
        for c, t, i in parts
    ]
    return cr.UnionResolver(*simple)


def main() -> None:
    topics = {
        "specs": [
            {"cluster": c, "said": spec_answers(lambda c=c: tf.train.ClusterSpec(c))}
            for c in SPECS
        ],
        "resolvers": [
            case
            | {
                "said": answers(
                    lambda case=case: resolver_of(case["resolver"])(
                        **case["arguments"]
                    ),
                    case["environment"],
                    RULES,
                )
            }
            for case in RESOLVERS
        ],
        "unions": [
            {
                "parts": parts,
                "said": answers(lambda parts=parts: union(parts), {}, RULES),
            }
            for parts in UNIONS
        ],
    }
    write(RECORD, header("tests.parity.record_tensorflow_cluster"), topics)


if __name__ == "__main__":
    main()
