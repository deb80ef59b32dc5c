"""Optimizers, metrics and loss scaling inside `run` against TensorFlow with its own
Keras.
"""

import jax.numpy as jnp
import keras
import numpy as np
import pytest

import keras_distribute as kd

from . import ours
from .comparing import (
    as_run_returns,
    assert_same,
    check,
    check_error,
    entries,
    value_of,
)
from .differences import because
from .encoding import decode, encode, is_error
from .ours import arrays, encoded, mirrored
from .scenarios import training


@entries("optimizers", "optimizer", "config")
def test_optimizer_sums_raw_gradients(entry):
    strategy = mirrored(entry["replicas"])
    after, iterations = training.optimized(
        ours,
        strategy,
        (entry["optimizer"], entry["config"]),
        decode(entry["start"]),
        (value_of(strategy, gradients) for gradients in entry["gradients"]),
    )
    for actual, expected in zip(after, entry["after"], strict=True):
        assert_same(actual, expected)
    assert iterations == entry["iterations"]


@pytest.mark.sampled(3)
@entries("metrics", "metric", "weighted")
def test_metric(entry):
    strategy = mirrored(entry["replicas"])
    metric, update = training.metric(ours, strategy, entry["metric"], entry["config"])
    alone = [
        getattr(keras.metrics, entry["metric"])(**entry["config"])
        for _ in range(entry["replicas"])
    ]
    batches = decode(entry["batch"])
    for expected in entry["updates"]:
        inside = update(batches)
        assert because("keras 3 metrics")
        assert_same(
            encoded(strategy, inside),
            {
                "PerReplica": [
                    _updated(*pair) for pair in zip(alone, batches, strict=True)
                ]
            },
        )
        assert_same(encoded(strategy, metric.result()), expected["after"])
    metric.reset_state()
    assert_same(encoded(strategy, metric.result()), entry["after_reset"])


def _updated(metric, batch):
    """The result of a metric of one device that has seen one replica's batches."""
    args, weights = arrays(batch)
    metric.update_state(*args, sample_weight=weights)
    return encode(metric.result())


@pytest.mark.sampled(2)
@entries("average_loss", "name")
def test_compute_average_loss(entry):
    strategy = mirrored(entry["replicas"])
    name, expected = entry["name"], entry["result"]
    if name in ("in scope", "no strategy"):
        _check_outside_run(
            strategy,
            name,
            kd.nn.compute_average_loss,
            jnp.asarray([1.0, 2.0]),
            expected,
        )
        return
    size = (
        {"global_batch_size": entry["global_batch_size"]}
        if "global_batch_size" in entry
        else {}
    )

    def call():
        def step(losses, weights):
            return kd.nn.compute_average_loss(losses, sample_weight=weights, **size)

        weights = entry["sample_weight"] and value_of(strategy, entry["sample_weight"])
        return strategy.run(step, args=(value_of(strategy, entry["losses"]), weights))

    if name == "ragged" and entry["replicas"] > 1:
        assert because("ragged average loss")
        parts = decode(entry["losses"])
        share = [np.float32(part.sum() / sum(map(len, parts))) for part in parts]
        assert_same(
            encoded(strategy, call()),
            {"PerReplica": [encode(value) for value in share]},
        )
    else:
        check(strategy, call, as_run_returns(expected, entry["replicas"]))


@entries("regularization_loss", "name")
def test_scale_regularization_loss(entry):
    strategy = mirrored(entry["replicas"])
    name, expected = entry["name"], entry["result"]
    if name in ("in scope", "no strategy"):
        _check_outside_run(
            strategy, name, kd.nn.scale_regularization_loss, jnp.asarray(2.0), expected
        )
        return

    def call():
        return strategy.run(
            kd.nn.scale_regularization_loss, args=(value_of(strategy, entry["losses"]),)
        )

    check(strategy, call, as_run_returns(expected, entry["replicas"]))


def _check_outside_run(strategy, name, fn, losses, expected):
    """In a scope it is an error; where there is no strategy there is one replica."""
    if name == "in scope":
        assert is_error(expected)
        with strategy.scope():
            check_error(lambda: fn(losses), expected)
    else:
        check(strategy, lambda: fn(losses), expected)
