"""The LSTM of cuDNN, on each replica's rows. What is replaced in JAX, and why, is in
`_compat/recurrent.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from keras_distribute import context
from keras_distribute.devices.mesh import ReplicaMesh
from keras_distribute.training.own_rows import is_in_program, is_of_gpus, of_rows

_HAS_ROWS = (True, True, True, False, True)
_DTYPES = ("float32", "float64")


def lstm(
    original: Callable[..., Any],
    x: Any,
    h_0: Any,
    c_0: Any,
    weights: Any,
    seq_lengths: Any,
    **options: Any,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`jax.experimental.rnn.lstm` of a strategy's programs.

    Args:
        x: Of shape `(batch, length, size)`.
        h_0: As `c_0` of shape `(layers and directions, batch, size)`.
        weights: All of them, in one dimension.
        seq_lengths: Of shape `(batch,)`.

    Raises:
        NotImplementedError: Where cuDNN cannot do it. Keras does without it then.
    """
    if not context.has_strategy():
        return original(x, h_0, c_0, weights, seq_lengths, **options)
    mesh: ReplicaMesh = context.get_strategy().replica_mesh
    if not is_of_gpus(mesh) or mesh.num_logical > 1:
        # Keras has asked for the process's GPUs, not for the strategy's devices.
        raise NotImplementedError("cuDNN is for GPUs, and does not follow layouts.")
    if jnp.result_type(x) not in _DTYPES:
        # JAX says so when it compiles, where Keras does not look for it (JAX 0.12).
        raise NotImplementedError("JAX calls cuDNN's LSTM in 32 or 64 bits alone.")
    if not is_in_program(mesh):
        return original(x, h_0, c_0, weights, seq_lengths, **options)

    def of_own(x: Any, h_0: Any, c_0: Any, weights: Any, lengths: Any) -> Any:
        states = jnp.swapaxes(h_0, 0, 1), jnp.swapaxes(c_0, 0, 1)
        y, h_n, c_n = original(x, *states, weights, lengths, **options)
        return y, jnp.swapaxes(h_n, 0, 1), jnp.swapaxes(c_n, 0, 1)

    states = jnp.swapaxes(h_0, 0, 1), jnp.swapaxes(c_0, 0, 1)
    given = [jnp.asarray(each) for each in (x, *states, weights, seq_lengths)]
    y, h_n, c_n = of_rows(mesh, of_own, given, _HAS_ROWS)
    return y, jnp.swapaxes(h_n, 0, 1), jnp.swapaxes(c_n, 0, 1)
