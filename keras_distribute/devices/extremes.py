"""Extremes of what is divided over the devices, where one of the numbers is a NaN.

A device's own maximum is then NaN. But the collectives of XLA for CPUs, and those of
NCCL, take the larger one of two numbers, and so the other one. Therefore it is asked
beside whether there is a NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from keras_distribute.devices import jaxprs

# Of each segment; with what is an extreme of a mark and of zeros.
_SCATTERED = {
    **dict.fromkeys(("scatter_max", "scatter-max"), 1),
    **dict.fromkeys(("scatter_min", "scatter-min"), -1),
}


class Extremes:
    """Those in a program whose arrays XLA divides.

    Args:
        rows: Of the batch, which is divided; `None` where other dimensions are, too.
    """

    def __init__(self, rows: int | None) -> None:
        self._rows = None if rows is None else max(rows, 1)

    def are_in(self, program: Any) -> bool:
        """Whether a traced program takes some."""
        # A `shard_map` is the program of each device alone.
        return jaxprs.has(program, self._is_one, but_in=("shard_map",))

    def seen(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, in which they are NaN where one of the numbers is."""

        def seeing(*args: Any) -> Any:
            program, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
            given = jax.tree.leaves(args)
            results = jaxprs.evaluated(program, given, self._evaluated)
            return jax.tree.unflatten(jax.tree.structure(shapes), results)

        return seeing

    def _evaluated(self, eqn: Any, given: list[Any]) -> list[Any]:
        eqn = jaxprs.with_programs(eqn, self._traced_again)
        results = jaxprs.bound(eqn, given)
        if not self._is_one(eqn):
            return results
        if eqn.primitive.name in _SCATTERED:
            sign = _SCATTERED[eqn.primitive.name]
            array, places, updates = given
            marks = [_marks(array, sign), places, _marks(updates, sign)]
            is_none = jaxprs.bound(eqn, marks)[0] != 0
        else:
            is_none = jnp.any(given[0] != given[0], eqn.params["axes"])
        return [jnp.where(is_none, jnp.nan, results[0])]

    def _traced_again(self, program: core.ClosedJaxpr) -> core.ClosedJaxpr:
        if not self.are_in(program):
            return program
        return jaxprs.retraced(program, self._evaluated)

    def _is_one(self, eqn: Any) -> bool:
        name = eqn.primitive.name
        if name not in ("reduce_max", "reduce_min", *_SCATTERED):
            return False
        array = eqn.invars[0].aval
        if not jnp.issubdtype(array.dtype, jnp.floating):
            return False
        return name in _SCATTERED or self._may_be_divided(
            array.shape, eqn.params["axes"]
        )

    def _may_be_divided(self, shape: tuple[int, ...], axes: tuple[int, ...]) -> bool:
        """Whether an array may be divided along one of these axes. Its rows are the
        first one, unless they were moved; then they may be one with others.
        """
        rows = self._rows
        if rows is None or 0 in axes:
            return True
        are_first = shape[:1] and shape[0] % rows == 0
        return any(
            shape[axis] == rows or not (are_first or shape[axis] % rows)
            for axis in axes
        )


def _marks(array: Any, sign: int) -> Any:
    """Marks in the place of NaNs, and zeros."""
    return jnp.where(array != array, sign, 0).astype(array.dtype)
