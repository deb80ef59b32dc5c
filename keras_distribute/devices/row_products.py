"""Products of the rows of two arrays, as the gradient of a dense layer's weights is,
where XLA for CPUs makes them slowly.

JAX makes a gradient as the product of what comes back and the layer's inputs, and turns
it round. XLA (JAX 0.10) makes one product of both, with its operands exchanged, which
is slow in two cases:

- Rows in several dimensions (a batch of sequences) are first copied into another
  layout. As one dimension they are not.
- The exchanged product of a layer with few outputs has few columns, and the fast code
  goes over the columns of a row at once. A barrier keeps the product that JAX makes. It
  is no slower with 32 rows or more, 16 outputs or less and 32 inputs or more.

Those of bfloat16 and float16 are as fast either way, and left alone
(`benchmarks/cpu_programs.py` measures all of it).
"""

from __future__ import annotations

import math
from typing import Any

from jax import lax

from keras_distribute.devices.rewriting import Rewriting

_DTYPES = {"float32", "float64"}
_FEW, _MANY = 16, 32


def _is_one(eqn: Any) -> bool:
    if not _is_of_rows(eqn):
        return False
    left, right = (variable.aval for variable in eqn.invars)
    if not {left.dtype.name, right.dtype.name} <= _DTYPES:
        return False
    return left.ndim > 2 or _has_few_outputs(left, right)


def _is_of_rows(eqn: Any) -> bool:
    """Whether only the last dimension of each array is left, in their order."""
    if eqn.primitive.name != "dot_general":
        return False
    contracted, batch = eqn.params["dimension_numbers"]
    if any(batch):
        return False
    return all(
        tuple(axes) == tuple(range(variable.aval.ndim - 1))
        for axes, variable in zip(contracted, eqn.invars, strict=True)
    )


def _has_few_outputs(left: Any, right: Any) -> bool:
    rows, outputs, inputs = math.prod(left.shape[:-1]), left.shape[-1], right.shape[-1]
    # With one output it is a product of a matrix and a vector.
    return 1 < outputs <= _FEW and min(rows, inputs) >= _MANY


def _of_one_dimension(eqn: Any, given: list[Any]) -> list[Any]:
    left, right = (lax.collapse(array, 0, array.ndim - 1) for array in given)
    product = lax.dot_general(
        left,
        right,
        (((0,), (0,)), ((), ())),
        precision=eqn.params["precision"],
        preferred_element_type=eqn.params["preferred_element_type"],
    )
    if _has_few_outputs(left, right):
        product = lax.optimization_barrier(product)
    return [product]


IN_ONE_DIMENSION = Rewriting(_is_one, _of_one_dimension)
