"""Loss reductions: where a replica's mean becomes its share of the global mean.

`reduce_values` and `apply_mask` are looked up by Keras's own losses in the module that
defines them; Keras scales for `tf.distribute` in the same place, and only there.
`Trainer._aggregate_additional_loss` is its place for penalties. `Loss.__call__` is
where the rows of a loss are known that is one number already.
`unscale_loss_for_distribution` makes of a loss what its own metric keeps, in the module
that defines it; it concerns the loss that was called last.
"""

# pyright: reportAttributeAccessIssue=false
from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import keras
from keras.src.losses import loss as loss_module

from keras_distribute._compat.names import BaseTrainer
from keras_distribute._compat.seams import Replacements
from keras_distribute.errors import ValueStructureError

Undo = Callable[[], None]
_MEANS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")


class _Rows(threading.local):
    known: int | None = None
    of_last: int | None = None


_rows = _Rows()


def install(
    global_sum: Callable[[Any], Any],
    in_replica: Callable[[], bool],
    shapes_differ: Callable[[], bool],
) -> Undo:
    """Divides means by the global count.

    Args:
        global_sum: Returns the sum over the replicas of a count, or `None` where there
            is nothing to sum over.
        in_replica: Whether values are one replica's.
        shapes_differ: Whether the replicas have different numbers of rows.
    """
    call: Callable[..., Any] = loss_module.Loss.__call__
    reduce_values: Callable[..., Any] = loss_module.reduce_values
    apply_mask: Callable[..., Any] = loss_module.apply_mask
    unscale: Callable[..., Any] = loss_module.unscale_loss_for_distribution
    aggregate_additional_loss = BaseTrainer._aggregate_additional_loss

    def share(local: Any) -> Any:
        """This replica's count over the count of all."""
        total = global_sum(local)
        return None if total is None else keras.ops.divide_no_nan(local, total)

    def reduce_share(
        values: Any, sample_weight: Any = None, reduction: str = "sum_over_batch_size"
    ) -> Any:
        loss: Any = reduce_values(values, sample_weight, reduction)
        if (
            tuple(values.shape) == (0,)
            and reduction in (*_MEANS, "sum")
            and in_replica()
        ):
            loss = keras.ops.sum(values)  # Keras leaves the empty array as it is.
        if reduction not in _MEANS or (
            tuple(values.shape) == (0,) and not in_replica()
        ):
            return loss
        if (
            reduction == "mean_with_sample_weight"
            and sample_weight is not None
            and values.shape
        ):
            count = keras.ops.cast(keras.ops.sum(sample_weight), loss.dtype)
        elif (
            not values.shape and shapes_differ()
        ):  # A scalar already counts as the mean of this replica's rows.
            rows = _known_rows()
            loss = (
                loss if rows else keras.ops.zeros_like(loss)
            )  # The mean of no rows is NaN, and counts for nothing.
            count = keras.ops.cast(rows, loss.dtype)
        else:
            count = keras.ops.cast(values.size, loss.dtype)
        scale = share(count)
        return loss if scale is None else loss * scale

    def mask_share(sample_weight: Any, mask: Any, dtype: Any, reduction: str) -> Any:
        weight = apply_mask(sample_weight, mask, dtype, reduction)
        if mask is None or reduction not in ("mean", "sum_over_batch_size"):
            return weight
        # Keras's weight carries size / valid of this replica; the mean above divides by
        # the global size.
        valid = share(keras.ops.sum(keras.ops.cast(mask, dtype)))
        size = share(keras.ops.cast(mask.size, dtype))
        return (
            weight if valid is None else weight * keras.ops.divide_no_nan(valid, size)
        )

    def additional_share(self: Any, loss: Any) -> Any:
        """A weight penalty or `add_loss`, which each replica has: counted once, as
        Keras does for TensorFlow.
        """
        total = aggregate_additional_loss(self, loss)
        scale = share(keras.ops.ones((), total.dtype))
        return total if scale is None else total * scale

    def call_with_rows(
        self: Any, y_true: Any, y_pred: Any, *args: Any, **kwargs: Any
    ) -> Any:
        shape = next(
            (
                leaf.shape
                for leaf in keras.tree.flatten(y_pred)
                if hasattr(leaf, "shape")
            ),
            (),
        )
        before, _rows.known = _rows.known, shape[0] if shape else None
        try:
            return call(self, y_true, y_pred, *args, **kwargs)
        finally:
            _rows.known, _rows.of_last = before, _rows.known

    def unscaled(value: Any) -> Any:
        """The metric weights it by the rows of this replica: so that all together yield
        the sum of the shares.
        """
        scale = (
            share(keras.ops.cast(_rows.of_last, value.dtype))
            if _rows.of_last is not None
            else None
        )
        return (
            unscale(value) if scale is None else keras.ops.divide_no_nan(value, scale)
        )

    replaced = Replacements()
    replaced.replace(BaseTrainer, "_aggregate_additional_loss", additional_share)
    replaced.replace(loss_module, "reduce_values", reduce_share)
    replaced.replace(loss_module, "apply_mask", mask_share)
    replaced.replace(loss_module, "unscale_loss_for_distribution", unscaled)
    replaced.replace(loss_module.Loss, "__call__", call_with_rows)
    return replaced.undo


def _known_rows() -> int:
    if _rows.known is None:
        raise ValueStructureError(
            "The replicas have different numbers of rows, and a loss of one number "
            "does not say how many it is of.",
            received="a scalar, to be averaged over the rows of all replicas.",
            fix="return one loss for each row from the loss, or create it with "
            'reduction="sum" and divide by the '
            "number of rows of all replicas.",
        )
    return _rows.known
