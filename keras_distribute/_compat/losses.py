"""Loss reductions: where a replica's mean becomes its share of the global mean.

`reduce_values` and `apply_mask` are looked up by Keras's own losses in the module that defines them; Keras scales for
`tf.distribute` in the same place, and only there. `Trainer._aggregate_additional_loss` is its place for penalties.
"""

# pyright: reportAttributeAccessIssue=false
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
from keras.src.losses import loss as loss_module
from keras.src.trainers.trainer import Trainer

Undo = Callable[[], None]
_MEANS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")


def install(global_sum: Callable[[Any], Any]) -> Undo:
    """Divides means by the global count.

    Args:
        global_sum: Returns the sum over the replicas of a count, or `None` where there is nothing to sum over.
    """
    reduce_values: Callable[..., Any] = loss_module.reduce_values
    apply_mask: Callable[..., Any] = loss_module.apply_mask

    def share(local: Any) -> Any:
        """This replica's count over the count of all."""
        total = global_sum(local)
        return None if total is None else keras.ops.divide_no_nan(local, total)

    def reduce_share(values: Any, sample_weight: Any = None, reduction: str = "sum_over_batch_size") -> Any:
        loss = reduce_values(values, sample_weight, reduction)
        if reduction not in _MEANS or tuple(values.shape) == (0,):
            return loss
        # A loss that is a scalar already counts as the mean of this replica's equal part of the rows.
        if reduction == "mean_with_sample_weight" and sample_weight is not None and values.shape:
            count = keras.ops.cast(keras.ops.sum(sample_weight), loss.dtype)
        else:
            count = keras.ops.cast(values.size, loss.dtype)
        scale = share(count)
        return loss if scale is None else loss * scale

    def mask_share(sample_weight: Any, mask: Any, dtype: Any, reduction: str) -> Any:
        weight = apply_mask(sample_weight, mask, dtype, reduction)
        if mask is None or reduction not in ("mean", "sum_over_batch_size"):
            return weight
        # Keras's weight carries size / valid of this replica; the mean above divides by the global size.
        valid = share(keras.ops.sum(keras.ops.cast(mask, dtype)))
        size = share(keras.ops.cast(mask.size, dtype))
        return weight if valid is None else weight * keras.ops.divide_no_nan(valid, size)

    def additional_share(self: Any, loss: Any) -> Any:
        """A weight penalty or `add_loss`, which each replica has: counted once, as Keras does for TensorFlow."""
        total = aggregate_additional_loss(self, loss)
        scale = share(keras.ops.ones((), total.dtype))
        return total if scale is None else total * scale

    aggregate_additional_loss: Callable[..., Any] = Trainer._aggregate_additional_loss
    Trainer._aggregate_additional_loss = additional_share
    loss_module.reduce_values = reduce_share
    loss_module.apply_mask = mask_share

    def undo() -> None:
        loss_module.reduce_values = reduce_values
        loss_module.apply_mask = apply_mask
        Trainer._aggregate_additional_loss = aggregate_additional_loss

    return undo
