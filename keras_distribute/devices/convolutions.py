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

from keras_distribute.devices.jaxprs import bound

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


def in_a_loop(eqn: Any, given: Sequence[Any]) -> list[Any]:
    """The results of an operation for other operands; of a convolution, with batch,
    space, features as the order of its dimensions.
    """
    if eqn.primitive.name != "conv_general_dilated":
        return bound(eqn, given)
    dims = eqn.params["dimension_numbers"]
    (batch, features, *space), kernel, out = dims.lhs_spec, dims.rhs_spec, dims.out_spec
    rank = len(out)
    letters = "DHW"[-len(space) :] if len(space) <= 3 else ""
    if not letters:
        return bound(eqn, given)
    result = lax.conv_general_dilated(
        jnp.transpose(given[0], (batch, *space, features)),
        jnp.transpose(given[1], (*kernel[2:], kernel[1], kernel[0])),
        dimension_numbers=(f"N{letters}C", f"{letters}IO", f"N{letters}C"),
        **{name: eqn.params[name] for name in _OTHER},
    )
    places = [out[0], *out[2:], out[1]]  # Where batch, space and features belong.
    return [jnp.transpose(result, [places.index(i) for i in range(rank)])]
