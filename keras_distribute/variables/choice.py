"""Which variable a creation under a scope yields."""

from __future__ import annotations

from typing import Any

import keras

from keras_distribute import context
from keras_distribute._compat import variables as compat
from keras_distribute.errors import AggregationError
from keras_distribute.variables.base import DistributedVariable
from keras_distribute.variables.drawing import DrawnVariable
from keras_distribute.variables.mirrored import MirroredVariable
from keras_distribute.variables.resting import RestingVariable
from keras_distribute.variables.sync_on_read import SyncOnReadVariable
from keras_distribute.variables.thread import thread


def choose_class(arguments: dict[str, Any]) -> type[DistributedVariable] | None:
    """The class of a variable that is created now, from its named arguments; `None` for
    Keras's own.

    Explicit `synchronization` or `aggregation` win. Otherwise trainable and optimizer
    variables are mirrored, metric variables are created `on_read` by Keras, floating
    state of layers that is not trained (batch normalization's moving statistics) is
    sync-on-read with the mean, gradient accumulators sync-on-read with the sum, all
    else is mirrored.

    A `keras.distribution` opened inside the scope is the inner one, and places the
    variable.

    Raises:
        AggregationError: For `synchronization="none"`, as in TensorFlow.
    """
    if not context.has_strategy() or keras.distribution.distribution() is not None:
        return None
    synchronization = arguments.get("synchronization", "auto")
    aggregation = arguments.get("aggregation", "none")
    if synchronization in ("none", None):
        raise AggregationError(
            'synchronization="none" has no meaning for a variable on several replicas.',
            received=f"keras.Variable(..., synchronization={synchronization!r}) in the "
            f"scope of {context.get_strategy()!r}.",
            fix='synchronization="auto", "on_write" or "on_read".',
        )
    placement = context.get_strategy().placement
    if synchronization == "on_read":
        return SyncOnReadVariable
    if synchronization == "auto":
        if thread.creates_accumulators and not placement.shard_variables:
            return SyncOnReadVariable
        untrained = not arguments.get("trainable", True) and aggregation in (
            "none",
            None,
        )
        dtype = keras.backend.standardize_dtype(arguments.get("dtype"))
        if (
            untrained
            and compat.is_layer_state()
            and keras.backend.is_float_dtype(dtype)
        ):
            return SyncOnReadVariable
    if placement.is_on_servers:
        return DrawnVariable
    if placement.rests_elsewhere:
        return RestingVariable
    return MirroredVariable
