"""Convolutions in the bodies of loops, where XLA for CPUs leaves them as they are.

Outside of loops and conditions it rewrites each to the one order of dimensions that
its fast code takes (`ConvCanonicalization`, JAX 0.10, looks at the entry computation
alone); inside, the gradient of a kernel, whose dimensions are in another order, is a
plain loop, 15 times slower. So the rewriting is done here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from keras_distribute.devices.rewriting import Rewriting

_OTHER = (
    "window_strides",
    "padding",
    "lhs_dilation",
    "rhs_dilation",
    "feature_group_count",
    "batch_group_count",
    "precision",
    "preferred_element_type",
)


def is_convolution(eqn: Any) -> bool:
    """Whether an operation is a convolution."""
    return eqn.primitive.name == "conv_general_dilated"


def _is_one(eqn: Any) -> bool:
    return is_convolution(eqn) and len(eqn.params["dimension_numbers"].out_spec) <= 5


def _in_order(eqn: Any, given: Sequence[Any]) -> list[Any]:
    dims = eqn.params["dimension_numbers"]
    (batch, features, *space), kernel, out = dims.lhs_spec, dims.rhs_spec, dims.out_spec
    rank = len(out)
    letters = "DHW"[3 - len(space) :]
    result = lax.conv_general_dilated(
        jnp.transpose(given[0], (batch, *space, features)),
        jnp.transpose(given[1], (*kernel[2:], kernel[1], kernel[0])),
        dimension_numbers=(f"N{letters}C", f"{letters}IO", f"N{letters}C"),
        **{name: eqn.params[name] for name in _OTHER},
    )
    places = [out[0], *out[2:], out[1]]  # Where batch, space and features belong.
    return [jnp.transpose(result, [places.index(i) for i in range(rank)])]


IN_ORDER = Rewriting(_is_one, _in_order)
"""Batch, space, features as the order of their dimensions."""
