"""Windows over what is divided over the devices, of which an array has several.

XLA fills up a device's part once for all windows of one form over the same array
(JAX 0.10.2: `ReshardAsWindowedInput` in `spmd_partitioner.cc`), with the number of the
first: with zeros for a sum, and then a product has them, too. So each window has an
array of its own.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from keras_distribute.devices import jaxprs
from keras_distribute.devices.rewriting import Rewriting, may_be_divided


def each_by_itself(rows: int | None) -> Rewriting:
    """Cumulative sums and the like, and pooling, over what may be divided."""

    def is_one(eqn: Any) -> bool:
        name, shape = eqn.primitive.name, eqn.invars[0].aval.shape if eqn.invars else ()
        if name.startswith("cum"):
            axes = (eqn.params["axis"],)
        elif name.startswith("reduce_window"):
            sizes = eqn.params["window_dimensions"]
            axes = tuple(i for i, size in enumerate(sizes) if size > 1)
        else:
            return False
        return may_be_divided(shape, axes, rows)

    return Rewriting(is_one, _of_own_array)


def _of_own_array(eqn: Any, given: list[Any]) -> list[Any]:
    own = [lax.optimization_barrier(a) if jnp.ndim(a) else a for a in given]
    return jaxprs.bound(eqn, own)
