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

_MEANS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")


class _Rows(threading.local):
    """How many rows the loss of this thread is of, and the one before it was of."""

    known: int | None = None
    of_last: int | None = None


Share = Callable[[Any, Any], Any]


def install(
    replaced: Replacements,
    global_sum: Callable[[Any], Any],
    in_replica: Callable[[], bool],
    shapes_differ: Callable[[], bool],
) -> None:
    """Divides means by the global count.

    Args:
        global_sum: Returns the sum over the replicas of a count, a number where that
            needs no communication; or `None` where there is nothing to sum over.
        in_replica: Whether values are one replica's.
        shapes_differ: Whether the replicas have different numbers of rows.
    """

    def share(local: Any, dtype: Any) -> Any:
        """This replica's count over the count of all."""
        total = global_sum(local)
        if total is None:
            return None
        counts = (keras.ops.cast(count, dtype) for count in (local, total))
        return keras.ops.divide_no_nan(*counts)

    rows = _Rows()
    replaced.replace(BaseTrainer, "_aggregate_additional_loss", _counted_once(share))
    replaced.replace(
        loss_module,
        "reduce_values",
        _reduced_to_share(share, rows, in_replica, shapes_differ),
    )
    replaced.replace(loss_module, "apply_mask", _masked(share))
    replaced.replace(
        loss_module, "unscale_loss_for_distribution", _unscaled(share, rows)
    )
    replaced.replace(loss_module.Loss, "__call__", _noting_rows(rows))


def _reduced_to_share(
    share: Share,
    rows: _Rows,
    in_replica: Callable[[], bool],
    shapes_differ: Callable[[], bool],
) -> Callable[..., Any]:
    """`reduce_values`: a mean is this replica's share of the global mean."""
    original: Callable[..., Any] = loss_module.reduce_values

    def reduce_values(
        values: Any, sample_weight: Any = None, reduction: str = "sum_over_batch_size"
    ) -> Any:
        loss: Any = original(values, sample_weight, reduction)
        if tuple(values.shape) == (0,):  # Keras leaves an empty array as it is.
            if not in_replica():
                return loss
            if reduction in (*_MEANS, "sum"):
                loss = keras.ops.sum(values)
        if reduction not in _MEANS:
            return loss
        weighted = reduction == "mean_with_sample_weight" and sample_weight is not None
        if weighted and values.shape:
            count = keras.ops.sum(sample_weight)
        elif not values.shape and shapes_differ():
            # A scalar already counts as the mean of this replica's rows. The mean of no
            # rows is NaN, and counts for nothing.
            count = _known_rows(rows)
            loss = loss if count else keras.ops.zeros_like(loss)
        else:
            count = values.size
        scale = share(count, loss.dtype)
        return loss if scale is None else loss * scale

    return reduce_values


def _masked(share: Share) -> Callable[..., Any]:
    """`apply_mask`: Keras's weight carries size / valid of this replica; the mean
    divides by the global size.
    """
    original: Callable[..., Any] = loss_module.apply_mask

    def apply_mask(sample_weight: Any, mask: Any, dtype: Any, reduction: str) -> Any:
        weight = original(sample_weight, mask, dtype, reduction)
        if mask is None or reduction not in ("mean", "sum_over_batch_size"):
            return weight
        valid = share(keras.ops.sum(keras.ops.cast(mask, dtype)), dtype)
        if valid is None:
            return weight
        size = share(mask.size, dtype)
        return weight * keras.ops.divide_no_nan(valid, size)

    return apply_mask


def _counted_once(share: Share) -> Callable[..., Any]:
    """`_aggregate_additional_loss`: a weight penalty or `add_loss`, which each replica
    has, is counted once, as Keras does for TensorFlow.
    """
    original = BaseTrainer._aggregate_additional_loss

    def _aggregate_additional_loss(self: Any, loss: Any) -> Any:
        total = original(self, loss)
        scale = share(1, total.dtype)
        return total if scale is None else total * scale

    return _aggregate_additional_loss


def _noting_rows(rows: _Rows) -> Callable[..., Any]:
    """`Loss.__call__`, which notes how many rows the loss is of."""
    original: Callable[..., Any] = loss_module.Loss.__call__

    def call(self: Any, y_true: Any, y_pred: Any, *args: Any, **kwargs: Any) -> Any:
        leaves = keras.tree.flatten(y_pred)
        shapes = (leaf.shape for leaf in leaves if hasattr(leaf, "shape"))
        shape = next(shapes, ())
        before, rows.known = rows.known, shape[0] if shape else None
        try:
            return original(self, y_true, y_pred, *args, **kwargs)
        finally:
            rows.known, rows.of_last = before, rows.known

    return call


def _unscaled(share: Share, rows: _Rows) -> Callable[..., Any]:
    """`unscale_loss_for_distribution`: the metric weights its value by the rows of this
    replica, so that all together yield the sum of the shares.
    """
    original: Callable[..., Any] = loss_module.unscale_loss_for_distribution

    def unscale_loss_for_distribution(value: Any) -> Any:
        if rows.of_last is None:
            return original(value)
        scale = share(rows.of_last, value.dtype)
        if scale is None:
            return original(value)
        return keras.ops.divide_no_nan(value, scale)

    return unscale_loss_for_distribution


def _known_rows(rows: _Rows) -> int:
    if rows.known is None:
        raise ValueStructureError(
            "The replicas have different numbers of rows, and a loss of one number "
            "does not say how many it is of.",
            received="a scalar, to be averaged over the rows of all replicas.",
            fix="return one loss for each row from the loss, or create it with "
            'reduction="sum" and divide by the number of rows of all replicas.',
        )
    return rows.known
