"""Layers that know of replicas: batch normalization and random streams.

- `BatchNormalization.__init__` refuses `synchronized=True` on JAX, `ops.moments` likewise; `call` is where statistics
  are taken. Goes when Keras has per-replica statistics on JAX.
- `SeedGenerator.next` is where every random layer gets its seed.
"""

# pyright: reportAttributeAccessIssue=false
from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from keras.src.backend.jax import nn as jax_nn
from keras.src.layers.normalization.batch_normalization import BatchNormalization
from keras.src.random.seed_generator import SeedGenerator

Undo = Callable[[], None]


def install(
    around_call: Callable[..., Any],
    synchronized_moments: Callable[[Any, Any, bool, Callable[..., Any]], Any],
    gather_rows: Callable[[Any], Any],
    replica_seed: Callable[[Any], Any],
) -> Undo:
    """Hooks for batch normalization's statistics and for seeds.

    Args:
        around_call: `around_call(layer, original, inputs, training, mask)` in place of `BatchNormalization.call`.
        synchronized_moments: `(x, axes, keepdims, local_moments)` in place of `ops.moments(synchronized=True)`.
        gather_rows: The rows of all replicas, for masked synchronized statistics.
        replica_seed: This replica's seed from the common one.
    """
    init, call, moments = BatchNormalization.__init__, BatchNormalization.call, jax_nn.moments
    masked_moments, next_seed = BatchNormalization._moments, SeedGenerator.next

    @functools.wraps(init)
    def new_init(self: Any, *args: Any, synchronized: bool = False, **kwargs: Any) -> None:
        init(self, *args, synchronized=False, **kwargs)
        self.synchronized = synchronized

    def new_call(self: Any, inputs: Any, training: Any = None, mask: Any = None) -> Any:
        return around_call(self, call, inputs, training, mask)

    def new_moments(x: Any, axes: Any, keepdims: bool = False, synchronized: bool = False) -> Any:
        return synchronized_moments(x, axes, keepdims, moments) if synchronized else moments(x, axes, keepdims)

    def new_masked_moments(self: Any, inputs: Any, mask: Any) -> Any:
        if mask is not None and self.synchronized:
            inputs, mask = gather_rows(inputs), gather_rows(mask)
        return masked_moments(self, inputs, mask)

    def new_next(self: Any, ordered: bool = True) -> Any:
        return replica_seed(next_seed(self, ordered))

    new_init.__signature__ = inspect.signature(init)  # Keras reads it to serialize the layer.
    BatchNormalization.__init__, BatchNormalization.call = new_init, new_call
    BatchNormalization._moments, jax_nn.moments, SeedGenerator.next = new_masked_moments, new_moments, new_next

    def undo() -> None:
        BatchNormalization.__init__, BatchNormalization.call = init, call
        BatchNormalization._moments, jax_nn.moments, SeedGenerator.next = masked_moments, moments, next_seed

    return undo


def statistics(layer: Any) -> list[Any]:
    """The layer's non-trainable variables, which its `call` updates."""
    return list(layer.non_trainable_variables)
