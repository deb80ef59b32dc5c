"""Extremes of what is divided over the devices, where one of the numbers is a NaN.

A device's own maximum is then NaN. But the collectives of XLA for CPUs, and those of
NCCL, take the larger one of two numbers, and so the other one. Therefore it is asked
beside whether there is a NaN.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from keras_distribute.devices import jaxprs
from keras_distribute.devices.rewriting import Rewriting, may_be_divided

# Of each segment; with what is an extreme of a mark and of zeros.
_SCATTERED = {
    **dict.fromkeys(("scatter_max", "scatter-max"), 1),
    **dict.fromkeys(("scatter_min", "scatter-min"), -1),
}


def with_nans(rows: int | None) -> Rewriting:
    """Extremes in a program that XLA divides are NaN where one of the numbers is."""

    def is_one(eqn: Any) -> bool:
        name = eqn.primitive.name
        if name not in ("reduce_max", "reduce_min", *_SCATTERED):
            return False
        array = eqn.invars[0].aval
        if not jnp.issubdtype(array.dtype, jnp.floating):
            return False
        return name in _SCATTERED or may_be_divided(
            array.shape, eqn.params["axes"], rows
        )

    return Rewriting(is_one, _with_nan)


def _with_nan(eqn: Any, given: list[Any]) -> list[Any]:
    results = jaxprs.bound(eqn, given)
    if eqn.primitive.name in _SCATTERED:
        sign = _SCATTERED[eqn.primitive.name]
        array, places, updates = given
        marks = [_marks(array, sign), places, _marks(updates, sign)]
        is_none = jaxprs.bound(eqn, marks)[0] != 0
    else:
        is_none = jnp.any(given[0] != given[0], eqn.params["axes"])
    return [jnp.where(is_none, jnp.nan, results[0])]


def _marks(array: Any, sign: int) -> Any:
    """Marks in the place of NaNs, and zeros."""
    return jnp.where(array != array, sign, 0).astype(array.dtype)
