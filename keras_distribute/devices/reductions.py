"""Reductions by functions of the user's own over what is divided over the devices.

XLA combines the devices' results in a collective, which knows sums, products and
extremes alone: it refuses other functions, and extremes lose NaNs (`extremes.py`). Of a
reduction of two arrays it gathers the devices' results, and reduces them once more.
"""

from __future__ import annotations

from typing import Any

from jax import lax
from jax.extend import core

from keras_distribute.devices.rewriting import Rewriting, may_be_divided


def gathered(rows: int | None) -> Rewriting:
    """Those in a program whose arrays XLA divides are of two arrays."""

    def is_one(eqn: Any) -> bool:
        if eqn.primitive.name != "reduce" or len(eqn.outvars) > 1:
            return False
        shape = eqn.invars[0].aval.shape
        return may_be_divided(shape, eqn.params["dimensions"], rows)

    return Rewriting(is_one, _of_two)


def _of_two(eqn: Any, given: list[Any]) -> list[Any]:
    array, initial = given
    combined = core.jaxpr_as_fun(eqn.params["jaxpr"])

    def both(some: Any, others: Any) -> Any:
        return tuple(combined(a, b)[0] for a, b in zip(some, others, strict=True))

    results = lax.reduce(
        (array, array), (initial, initial), both, eqn.params["dimensions"]
    )
    return [lax.optimization_barrier(results)[0]]
