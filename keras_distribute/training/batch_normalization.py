"""Batch normalization under replicas: whose rows its statistics are of, and what is
kept of the moving ones. What is replaced in Keras is in `_compat/layers.py`.

Each replica normalizes its rows by their own statistics, in `fit` as in `Strategy.run`;
with `synchronized=True`, by those of all replicas. Of the moving statistics, of which
each replica updates its own, the mean is kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from keras_distribute import context
from keras_distribute._compat import layers as compat
from keras_distribute._compat.variables import StatelessScope
from keras_distribute.devices.mesh import REPLICA_AXIS
from keras_distribute.training.replica_rules import in_replica
from keras_distribute.values import reductions


def call(
    layer: Any, original: Callable[..., Any], inputs: Any, training: Any, mask: Any
) -> Any:
    """`BatchNormalization.call`: in `fit`, by each replica's own statistics."""
    # No rows, no statistics: the moving ones stay.
    if in_replica() and inputs.size == 0 and not layer.synchronized:
        return original(layer, inputs, False, mask)
    batch = context.frame().batch
    groups = 1 if batch is None else batch.shards
    whole = groups == 1 or not training or not layer.trainable or layer.synchronized
    rows = 0 if batch is None else batch.rows
    # Not the batch's rows: as they come.
    if whole or inputs.shape[0] != rows or layer.axis % inputs.ndim == 0:
        return original(layer, inputs, training, mask)
    variables = compat.statistics(layer)
    values = [variable.value for variable in variables]

    def one_replica(rows: Any, row_mask: Any) -> Any:
        with StatelessScope(list(zip(variables, values, strict=True))) as scope:
            outputs = original(layer, rows, training, row_mask)
        return outputs, [scope.get_current_value(variable) for variable in variables]

    def split(array: Any) -> Any:
        return array.reshape((groups, array.shape[0] // groups, *array.shape[1:]))

    # One row of a mask may be for all rows.
    has_rows = mask is not None and len(mask) == rows
    outputs, updated = jax.vmap(one_replica, (0, 0 if has_rows else None))(
        split(inputs), split(mask) if has_rows else mask
    )
    for variable, per_replica in zip(variables, updated, strict=True):
        variable.assign(jnp.mean(per_replica, 0))
    return outputs.reshape(inputs.shape[:1] + outputs.shape[2:])


def synchronized_moments(
    x: Any, axes: Any, keepdims: bool, local_moments: Callable[..., Any]
) -> Any:
    """Mean and variance over all replicas: of equally many rows a mean of means, else
    sums over the true counts.
    """
    if not in_replica():
        return local_moments(x, axes, keepdims)
    dtype = x.dtype
    wide = x.astype("float32") if dtype in (jnp.float16, jnp.bfloat16) else x
    mean_of_all = _weighted_mean if context.in_ragged_program() else _mean_of_means
    mean = mean_of_all(wide, axes)
    variance = mean_of_all(jnp.square(wide - mean), axes)
    if not keepdims:
        mean, variance = jnp.squeeze(mean, axes), jnp.squeeze(variance, axes)
    return mean.astype(dtype), variance.astype(dtype)


def _mean_of_means(x: Any, axes: Any) -> Any:
    return lax.pmean(jnp.mean(x, axes, keepdims=True), REPLICA_AXIS)


def _weighted_mean(x: Any, axes: Any) -> Any:
    count = reductions.total_count(math.prod(x.shape[axis] for axis in axes))
    return lax.psum(jnp.sum(x, axes, keepdims=True), REPLICA_AXIS) / jnp.asarray(
        count, x.dtype
    )
