"""Records optimizers, metrics and loss scaling inside `run`, with TensorFlow's own
Keras (tf_keras).
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from ..encoding import encode
from ..scenarios.training import metric, optimized
from . import session
from .session import Entry, mirrored, per_replica, result_of, stored

F32 = np.float32
OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"learning_rate": 0.1}),
    ("SGD", {"learning_rate": 0.1, "momentum": 0.9}),
    ("SGD", {"learning_rate": 0.1, "momentum": 0.9, "nesterov": True}),
    ("Adam", {"learning_rate": 0.1}),
    ("RMSprop", {"learning_rate": 0.1}),
    ("Adagrad", {"learning_rate": 0.1}),
    ("AdamW", {"learning_rate": 0.1, "weight_decay": 0.1}),
    ("SGD", {"learning_rate": 0.1, "clipnorm": 1.0}),
    ("SGD", {"learning_rate": 0.1, "clipvalue": 0.5}),
    ("SGD", {"learning_rate": 0.1, "global_clipnorm": 1.0}),
]
START = [np.asarray([1, 2], F32), np.asarray(3, F32)]
# By step, replica and variable: of unlike sizes and signs, so that clipping before or
# after the sum differs.
GRADIENTS = [
    [[np.asarray([0.5, -1], F32), np.asarray(2, F32)], [np.asarray([1, 0.25], F32), np.asarray(-1.5, F32)],
     [np.asarray([-3, 1], F32), np.asarray(0.5, F32)], [np.asarray([0.75, 4], F32), np.asarray(0.25, F32)]],
    [[np.asarray([-0.5, 2], F32), np.asarray(1, F32)], [np.asarray([0.5, -0.5], F32), np.asarray(0.75, F32)],
     [np.asarray([2, 1], F32), np.asarray(-2, F32)], [np.asarray([-1, 0.5], F32), np.asarray(0.5, F32)]],
]  # fmt: skip

CLASSES = [
    np.asarray(y, np.int32) for y in ([0, 1, 1], [1, 1, 0], [0, 0, 1], [1, 0, 0])
]
SCORES = [
    np.asarray(y, F32)
    for y in ([0.2, 0.7, 0.4], [0.9, 0.3, 0.6], [0.1, 0.8, 0.55], [0.45, 0.35, 0.05])
]
WEIGHTS = [
    np.asarray(w, F32) for w in ([1, 2, 0.5], [1, 0, 3], [0.5, 0.5, 0.5], [2, 1, 1])
]
RANKED = [
    np.roll(
        np.asarray([[0.1, 0.6, 0.3], [0.5, 0.2, 0.3], [0.2, 0.3, 0.5]], F32), i, axis=1
    )
    for i in range(4)
]
METRICS: list[tuple[str, dict[str, Any], str]] = [
    ("Mean", {}, "values"),
    ("Sum", {}, "values"),
    ("Accuracy", {}, "classes"),
    ("BinaryAccuracy", {}, "scores"),
    ("AUC", {"num_thresholds": 20}, "scores"),
    ("Precision", {}, "scores"),
    ("Recall", {}, "scores"),
    ("MeanSquaredError", {}, "columns"),
    ("RootMeanSquaredError", {}, "scores"),
    ("MeanIoU", {"num_classes": 2, "dtype": "float32"}, "classes"),
    ("SparseTopKCategoricalAccuracy", {"k": 2}, "ranked"),
    ("TopKCategoricalAccuracy", {"k": 1}, "ranked one hot"),
]
LOSSES = [
    np.asarray(loss, F32) for loss in ([1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11, 12])
]
RAGGED_LOSSES = [np.asarray(loss, F32) for loss in ([1, 2, 3], [4], [5, 6], [7])]


def optimizers(replicas: int) -> Iterator[Entry]:
    """Variables after each of two steps of `apply_gradients` in `run`, with raw
    gradients that differ per replica.
    """
    strategy = mirrored(replicas)
    for name, config in OPTIMIZERS:
        steps = [per_replica(strategy, gradients) for gradients in GRADIENTS]
        after, iterations = optimized(session, strategy, (name, config), START, steps)
        yield {
            "optimizer": name,
            "config": config,
            "start": encode(START),
            "gradients": [stored(step, replicas) for step in GRADIENTS],
            "after": after,
            "iterations": iterations,
        }


def metrics(replicas: int) -> Iterator[Entry]:
    """`update_state` in `run`; `result()` there and afterwards across replicas; and
    again after a second update.
    """
    strategy = mirrored(replicas)
    one_hot = [np.eye(3, dtype=F32)[index] for index in CLASSES]
    data: dict[str, Any] = {
        "values": [(scores,) for scores in SCORES],
        "classes": [
            (y, (scores > 0.5).astype(np.int32))
            for y, scores in zip(CLASSES, SCORES, strict=True)
        ],
        "scores": list(zip(CLASSES, SCORES, strict=True)),
        "columns": [
            (y[:, None], scores[:, None])
            for y, scores in zip(CLASSES, SCORES, strict=True)
        ],
        "ranked": list(zip(CLASSES, RANKED, strict=True)),
        "ranked one hot": list(zip(one_hot, RANKED, strict=True)),
    }
    for name, config, kind in METRICS:
        for weighted in (False, True):
            made, update = metric(session, strategy, name, config)
            pairs = zip(data[kind], WEIGHTS, strict=True)
            batches = [
                (args, weights if weighted else None) for args, weights in pairs
            ][:replicas]
            results = [
                {
                    "inside": result_of(partial(update, batches)),
                    "after": result_of(made.result),
                }
                for _ in range(2)
            ]
            made.reset_state()
            yield {
                "metric": name,
                "config": config,
                "weighted": weighted,
                "batch": stored(batches, replicas),
                "updates": results,
                "after_reset": result_of(made.result),
            }


def average_loss(replicas: int) -> Iterator[Entry]:
    """`tf.nn.compute_average_loss` in `run`, and where it refuses."""
    strategy = mirrored(replicas)
    cases: dict[str, tuple[Any, dict[str, Any]]] = {
        "plain": (LOSSES, {}),
        "global batch size": (LOSSES, {"global_batch_size": 24}),
        "ragged": (RAGGED_LOSSES, {}),
        "ragged, global batch size": (RAGGED_LOSSES, {"global_batch_size": 7}),
        "weights": (LOSSES, {"sample_weight": WEIGHTS}),
        "weights, global batch size": (
            LOSSES,
            {"sample_weight": WEIGHTS, "global_batch_size": 24},
        ),
        "one weight": (LOSSES, {"sample_weight": [F32(0.5)] * 4}),
        "matrix": (
            [np.stack([loss, 2 * loss], axis=1) for loss in LOSSES],
            {"global_batch_size": 12},
        ),
        "int losses": ([loss.astype(np.int32) for loss in LOSSES], {}),
        "scalar loss": ([F32(1)] * 4, {}),
        "scalar loss, global batch size": ([F32(1)] * 4, {"global_batch_size": 4}),
        "float global batch size": (LOSSES, {"global_batch_size": 24.0}),
        "vector global batch size": (LOSSES, {"global_batch_size": [24]}),
        "zero global batch size": (LOSSES, {"global_batch_size": 0}),
        "negative global batch size": (LOSSES, {"global_batch_size": -3}),
        "weights of another shape": (LOSSES, {"sample_weight": [np.ones(2, F32)] * 4}),
    }
    for name, (losses, options) in cases.items():
        size = {
            key: value for key, value in options.items() if key == "global_batch_size"
        }
        weights = options.get("sample_weight")

        def step(loss: Any, weight: Any, size: Any = size) -> Any:
            return tf.nn.compute_average_loss(loss, sample_weight=weight, **size)

        args = (
            per_replica(strategy, losses),
            None if weights is None else per_replica(strategy, weights),
        )
        yield {
            "name": name,
            "losses": stored(losses, replicas),
            "sample_weight": weights and stored(weights, replicas),
            **size,
            "result": result_of(partial(strategy.run, step, args)),
        }
    with strategy.scope():
        yield {
            "name": "in scope",
            "result": result_of(
                lambda: tf.nn.compute_average_loss(tf.constant([1.0, 2.0]))
            ),
        }
    yield {
        "name": "no strategy",
        "result": result_of(
            lambda: tf.nn.compute_average_loss(tf.constant([1.0, 2.0]))
        ),
    }


def regularization_loss(replicas: int) -> Iterator[Entry]:
    """`tf.nn.scale_regularization_loss` in `run`, and where it refuses."""
    strategy = mirrored(replicas)
    scale = tf.nn.scale_regularization_loss
    for name, losses in {
        "scalar": [F32(i + 1) for i in range(4)],
        "vector": LOSSES,
    }.items():
        result = result_of(
            lambda losses=losses: strategy.run(scale, (per_replica(strategy, losses),))
        )
        yield {"name": name, "losses": stored(losses, replicas), "result": result}
    with strategy.scope():
        yield {"name": "in scope", "result": result_of(lambda: scale(tf.constant(2.0)))}
    yield {"name": "no strategy", "result": result_of(lambda: scale(tf.constant(2.0)))}
