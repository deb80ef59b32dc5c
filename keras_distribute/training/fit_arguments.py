"""What the data given to `fit`, `evaluate` and `predict` cannot be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from keras_distribute import checks
from keras_distribute.errors import InputError
from keras_distribute.values.per_replica import is_distributed

_NAMES = ("y", "sample_weight")


def check_fit_arguments(x: Any, arguments: Mapping[str, Any]) -> None:
    """Refuses what Keras would take for arrays, and fail on.

    Args:
        arguments: The others of `fit` that concern data.

    Raises:
        InputError: Where there is nothing, or a value of each replica.
    """
    given = {"x": x} | {name: arguments.get(name) for name in _NAMES}
    for name, structure in given.items():
        leaves = jax.tree.leaves(structure, is_leaf=is_distributed)
        if any(map(is_distributed, leaves)):
            raise InputError(
                "fit, evaluate and predict take global batches, and divide them over "
                "the replicas by themselves.",
                received=f"{name}={checks.shown(structure)}.",
                fix="the arrays or dataset that the value was made of; or "
                "strategy.run(step, args=(value,)) in a loop of your own.",
            )
        if any(getattr(leaf, "shape", None) == () for leaf in leaves):
            raise InputError(
                "The arrays of a batch have rows.",
                received=f"{name}={checks.shown(structure)}, of the shape ().",
                fix="arrays of one length: model.fit(x, y)",
            )
    if not jax.tree.leaves(x):
        raise InputError(
            "There is nothing to train, evaluate or predict on.",
            received=f"x={checks.shown(x)}.",
            fix="an array for each input that is not optional, model.fit(x, y), or "
            "model.fit(dataset)",
        )
