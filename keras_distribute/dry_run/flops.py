"""The floating-point operations of matrix products and convolutions in a traced
program.

The compilers' own counts leave out the iterations of loops, and are missing on GPUs, so
a recurrent network, or steps in a loop on the device, would look as if they cost
nothing. Counted here is what the program says: two operations for each multiplication
and addition, each as often as its loop runs. Multiplications with zeros that a strided
convolution's gradient is filled up with do not count, those with padding do.
Elementwise work is bounded by memory.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

from jax.extend import core

from keras_distribute._compat import jax_internals


def of_program(jaxpr: Any) -> Counter[str]:
    """The operations of all devices together, by the dtype of the operands."""
    total: Counter[str] = Counter()
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        name = eqn.primitive.name
        if name in _COUNTS:
            total[eqn.invars[0].aval.dtype.name] += _COUNTS[name](eqn)
        elif name == "cond":
            branches = map(of_program, eqn.params["branches"])
            total += max(branches, key=lambda counts: sum(counts.values()))
        else:
            times = _times(name, eqn.params)
            for inner in core.jaxprs_in_params(eqn.params):
                for dtype, count in of_program(inner).items():
                    total[dtype] += times * count
    return total


def _times(name: str, params: Any) -> int:
    """How often what an equation contains runs, over all devices."""
    if name == "scan":
        return int(params["length"])
    if name == "shard_map":
        return jax_internals.mapped_times(params)
    if name == "pallas_call":
        grid = params["grid_mapping"].grid
        return math.prod(size for size in grid if isinstance(size, int))
    return 1


def _dot(eqn: Any) -> int:
    (contracted, _), _ = eqn.params["dimension_numbers"]
    left = eqn.invars[0].aval.shape
    products = math.prod(left[axis] for axis in contracted)
    return 2 * math.prod(eqn.outvars[0].aval.shape) * products


def _convolution(eqn: Any) -> int:
    kernel = eqn.invars[1].aval.shape
    features = kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
    products = math.prod(kernel) // features
    filled = math.prod(eqn.params["lhs_dilation"])
    return 2 * math.prod(eqn.outvars[0].aval.shape) * products // filled


_COUNTS: dict[str, Callable[[Any], int]] = {
    "dot_general": _dot,
    "conv_general_dilated": _convolution,
}
