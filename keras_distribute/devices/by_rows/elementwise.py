"""Operations on each element by itself."""

from __future__ import annotations

import itertools
from typing import Any

import jax.numpy as jnp

from keras_distribute.devices.by_rows.values import (
    Replica,
    SumOverRows,
    Value,
    common_rows,
    refuse,
)

# fmt: off
NAMES = frozenset((
    "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2",
    "atanh", "bessel_i0e", "bessel_i1e", "bitcast_convert_type", "cbrt", "ceil",
    "clamp", "clz", "complex", "conj", "convert_element_type", "copy", "copy_p", "cos",
    "cosh", "digamma", "div", "eq", "eq_to", "erf", "erf_inv", "erfc", "exp", "exp2",
    "expm1", "floor", "ge", "gt", "igamma", "igamma_grad_a", "igammac", "imag",
    "integer_pow", "is_finite", "le", "le_to", "lgamma", "log", "log1p", "log2",
    "logistic", "lt", "lt_to", "max", "min", "mul", "mulhi", "ne", "neg", "nextafter",
    "not", "one_minus_square", "or", "polygamma", "polynomial", "population_count",
    "pow", "random_gamma_grad", "real", "reduce_precision",
    "regularized_incomplete_beta", "rem", "round", "rsqrt", "select_n", "shift_left",
    "shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sinh", "sqrt",
    "square", "stop_gradient", "sub", "tan", "tanh", "xor", "zeta",
))
# fmt: on

_SUMS = {"add", "add_any", "sub"}
_OF_ONE = {"neg", "copy", "copy_p", "real", "imag"}


def rule(replica: Replica, eqn: Any, values: list[Value]) -> list[Value]:
    """Parts of parts, along the same dimension; sums of sums, where it is linear."""
    dim = common_rows(values)
    refuse(eqn.outvars[0].aval.ndim != max(v.ndim for v in values))
    if dim is not None:
        parts = [replica.part_or_one(value, dim) for value in values]
        return replica.apply(eqn, parts, dim)
    if any(value.partial for value in values) and _is_linear(eqn, values):
        (result,) = replica.apply(eqn, _summands(replica, eqn, values), partial=True)
        result.over_rows = _over_rows(eqn, values)
        return [result]
    return replica.same(eqn, values)


def slicer(
    replica: Replica, eqn: Any, operands: list[Value], dim: int, depth: int
) -> Any:
    """A part of the result, of parts of the operands."""
    parts = [replica.part_or_one(value, dim, depth) for value in operands]
    return replica.apply(eqn, parts)[0].array


def _is_linear(eqn: Any, values: list[Value]) -> bool:
    """Whether the sum of results is the result of sums, with what is whole a factor."""
    name, partial = eqn.primitive.name, [value.partial for value in values]
    dtype = eqn.outvars[0].aval.dtype
    if name in _OF_ONE:
        return True
    if name in _SUMS:
        return all(value.partial or value.zero for value in values)
    if name == "select_n":
        return not partial[0] and all(v.partial or v.zero for v in values[1:])
    if name == "convert_element_type":
        before = values[0].array.dtype
        floats = jnp.issubdtype(before, jnp.floating)
        wider = jnp.issubdtype(dtype, jnp.inexact) and dtype.itemsize > before.itemsize
        return floats and wider  # Else the parts would be rounded, not the sum.
    if not jnp.issubdtype(dtype, jnp.inexact):
        return False
    return (name == "mul" and sum(partial) == 1) or (
        name == "div" and partial == [True, False]
    )


def _over_rows(eqn: Any, values: list[Value]) -> tuple[SumOverRows, ...]:
    """What a sum of sums over rows is made of, in whatever dtype."""
    if eqn.primitive.name not in ("add", "add_any", "convert_element_type"):
        return ()
    each = [value.over_rows for value in values if not value.zero]
    return tuple(itertools.chain(*each)) if all(each) else ()


def _summands(replica: Replica, eqn: Any, values: list[Value]) -> list[Any]:
    factors = eqn.primitive.name in ("mul", "div", "select_n")
    return [
        value.array if factors and not value.partial else replica.summand(value)
        for value in values
    ]
