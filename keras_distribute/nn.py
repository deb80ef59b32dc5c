"""Loss scaling for custom loops: averages over the global batch, and regularization
counted once.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from keras_distribute import context
from keras_distribute.context import Mode
from keras_distribute.errors import (
    ContextError,
    StructureTypeError,
    ValueStructureError,
)
from keras_distribute.values import reductions
from keras_distribute.values.arrays import as_array

__all__ = ["compute_average_loss", "scale_regularization_loss"]


def compute_average_loss(
    per_example_loss: Any,
    sample_weight: Any = None,
    global_batch_size: int | None = None,
) -> jax.Array:
    """This replica's share of the average loss over the global batch.

    The shares of all replicas add up to the average: `strategy.reduce("SUM", share,
    axis=None)`. Source: `tf.nn.compute_average_loss`. Differs from TF, whose default
    `global_batch_size` is this replica's times the number of replicas, so that replicas
    with few examples weigh too much.

    Args:
        per_example_loss: One loss for each example of this replica, of shape `(batch,
            ...)`.
        sample_weight: A weight for each example, of a shape that broadcasts.
        global_batch_size: The number of examples of all replicas; by default the sum of
            theirs.

    Returns:
        A scalar: the sum of the weighted losses over `global_batch_size`; 0 for an
        empty batch.

    Raises:
        ContextError: In the cross-replica context.
        StructureTypeError: For a batch size that is no integer.
        ValueStructureError: For a negative one, or one that is no scalar; for a scalar
            loss; for weights that do not fit.

    Example:
        >>> import keras_distribute as kd
        >>> float(kd.nn.compute_average_loss([1.0, 2.0, 3.0], global_batch_size=6))
        1.0
    """
    _require_replica("compute_average_loss")
    losses = as_array(per_example_loss, "The losses of the examples are numbers.")
    if losses.ndim == 0:
        raise ValueStructureError(
            "compute_average_loss takes one loss for each example.",
            received="a scalar.",
            fix='create the loss with reduction="none", '
            'keras.losses.MeanSquaredError(reduction="none").',
        )
    if not jnp.issubdtype(losses.dtype, jnp.floating):
        losses = losses.astype("float32")
    if sample_weight is not None:
        losses = losses * _weights_for(losses, sample_weight)
    if global_batch_size is None:
        per_replica = context.frame().per_replica
        size: Any = (
            reductions.total_count(losses.shape[0]) if per_replica else losses.shape[0]
        )
    else:
        size = _checked_size(global_batch_size)
    total = jnp.sum(losses)
    return jnp.where(
        size == 0,
        jnp.zeros_like(total),
        total / jnp.maximum(size, 1).astype(total.dtype),
    )


def scale_regularization_loss(regularization_loss: Any) -> jax.Array:
    """This replica's share of a loss that is the same on every replica, such as a
    weight penalty.

    Source: `tf.nn.scale_regularization_loss`.

    Args:
        regularization_loss: A scalar or array; it is summed.

    Returns:
        A scalar: the sum, divided by the number of replicas.

    Raises:
        ContextError: In the cross-replica context.
    """
    _require_replica("scale_regularization_loss")
    total = as_array(regularization_loss, "A regularization loss is a number.").sum()
    return total / context.get_strategy().num_replicas_in_sync


def _weights_for(losses: jax.Array, sample_weight: Any) -> jax.Array:
    """The weights of the examples, in a shape that broadcasts to their losses'."""
    weights = as_array(sample_weight, "The weights of the examples are numbers.")
    weights = weights.astype(losses.dtype)
    if weights.ndim == losses.ndim + 1 and weights.shape[-1] == 1:
        weights = weights[..., 0]
    weights = jnp.reshape(
        weights, weights.shape + (1,) * max(0, losses.ndim - weights.ndim)
    )
    fits = all(w in (1, n) for w, n in zip(weights.shape, losses.shape, strict=False))
    if weights.ndim > losses.ndim or not fits:
        raise ValueStructureError(
            "The weights do not fit the losses.",
            received=f"losses of shape {losses.shape}, sample_weight of shape "
            f"{jnp.shape(sample_weight)}.",
            fix="one weight for each example, of shape (batch,).",
        )
    return weights


def _require_replica(name: str) -> None:
    current = context.frame()
    if current.mode is not Mode.REPLICA:
        raise ContextError(
            f"{name} gives one replica's share, so it is called in a replica.",
            received=context.describe(current),
            fix="call it in the function given to strategy.run. A step of fit sees the "
            "global batch: there, the mean of the losses is keras.ops.mean(losses), "
            "and a penalty counts as it is.",
        )


def _checked_size(size: Any) -> Any:
    array: Any = size
    if not isinstance(size, jax.Array):  # As an array of JAX it would be traced.
        as_array(size, "global_batch_size is a number of examples.")
        array = np.asarray(size)
    if array.ndim:
        raise ValueStructureError(
            "global_batch_size is one number.",
            received=f"shape {array.shape}.",
            fix="64",
        )
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise StructureTypeError(
            "global_batch_size is a number of examples.",
            received=f"{size!r} ({array.dtype}).",
            fix="an integer.",
        )
    if not isinstance(array, jax.core.Tracer) and int(array) < 0:
        raise ValueStructureError(
            "global_batch_size cannot be negative.",
            received=f"{size}.",
            fix="a number >= 0.",
        )
    return array
