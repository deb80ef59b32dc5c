"""Layers that know of replicas: batch normalization, spectral normalization and random
streams.

- `BatchNormalization.__init__` refuses `synchronized=True` on JAX, `ops.moments`
  likewise; `call` is where statistics are taken. Goes when Keras has per-replica
  statistics on JAX.
- `SpectralNormalization` computes its state from its kernel, so that it is the same on
  all replicas. Goes when Keras says so by an aggregation.
- `SeedGenerator.next` is where every random layer gets its seed.
- `in_symbolic_scope` tells that a layer is only asked for shapes, with made-up sizes in
  place of unknown ones.
"""

# pyright: reportAttributeAccessIssue=false
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keras import backend, ops
from keras.layers import BatchNormalization, SpectralNormalization
from keras.random import SeedGenerator
from keras.src.backend.common.symbolic_scope import in_symbolic_scope

from keras_distribute._compat.names import jax_nn
from keras_distribute._compat.seams import Replacements, check

check(BatchNormalization, "_reduction_axes")


def install(
    replaced: Replacements,
    around_call: Callable[..., Any],
    synchronized_moments: Callable[[Any, Any, bool, Callable[..., Any]], Any],
    global_sum: Callable[[Any], Any],
    replica_seed: Callable[[Any], Any],
) -> None:
    """Hooks for batch normalization's statistics and for seeds, and the state of
    spectral normalization.

    Args:
        around_call: `around_call(layer, original, inputs, training, mask)` in place of
            `BatchNormalization.call`.
        synchronized_moments: `(x, axes, keepdims, local_moments)` in place of
            `ops.moments(synchronized=True)`.
        global_sum: The sum over the replicas, for masked synchronized statistics;
            `None` where there is none.
        replica_seed: This replica's seed from the common one.
    """
    init, call = BatchNormalization.__init__, BatchNormalization.call
    moments = jax_nn.moments
    next_seed = SeedGenerator.next
    add_weight = SpectralNormalization.add_weight

    def new_init(
        self: Any, *args: Any, synchronized: bool = False, **kwargs: Any
    ) -> None:
        init(self, *args, synchronized=False, **kwargs)
        self.synchronized = synchronized

    def new_call(self: Any, inputs: Any, training: Any = None, mask: Any = None) -> Any:
        return around_call(self, call, inputs, training, mask)

    def new_moments(
        x: Any, axes: Any, keepdims: bool = False, synchronized: bool = False
    ) -> Any:
        if synchronized:
            return synchronized_moments(x, axes, keepdims, moments)
        return moments(x, axes, keepdims)

    def new_next(self: Any, ordered: bool = True) -> Any:
        return replica_seed(next_seed(self, ordered))

    def new_add_weight(self: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("name") == "vector_u":
            kwargs.setdefault("aggregation", "only_first_replica")
        return add_weight(self, *args, **kwargs)

    replaced.replace(BatchNormalization, "__init__", new_init)
    replaced.replace(BatchNormalization, "call", new_call)
    replaced.replace(BatchNormalization, "_moments", _masked_moments(global_sum))
    replaced.replace(jax_nn, "moments", new_moments)
    replaced.replace(SpectralNormalization, "add_weight", new_add_weight)
    replaced.replace(SeedGenerator, "next", new_next)


def _masked_moments(global_sum: Callable[[Any], Any]) -> Callable[..., Any]:
    """`BatchNormalization._moments`: those of masked, synchronized rows count the rows
    of all replicas.
    """
    local_moments = BatchNormalization._moments

    def _moments(self: Any, inputs: Any, mask: Any) -> Any:
        if mask is None or not self.synchronized:
            return local_moments(self, inputs, mask)
        axes, of_rows = self._reduction_axes, ops.expand_dims(mask, -1)
        whole = ops.cast(ops.broadcast_to(of_rows, inputs.shape), "bool")
        count = ops.sum(ops.cast(whole, inputs.dtype), axes, keepdims=True)
        count = global_sum(count)
        if count is None:
            return local_moments(self, inputs, mask)
        # From here on as Keras does, with each sum taken over all replicas.
        count += backend.epsilon()
        total = ops.sum(ops.where(whole, inputs, 0), axes, keepdims=True)
        mean = global_sum(total) / count
        squares = ops.square(ops.where(whole, inputs - mean, 0))
        variance = global_sum(ops.sum(squares, axes, keepdims=True)) / count
        return ops.squeeze(mean), ops.squeeze(variance)

    return _moments


def statistics(layer: Any) -> list[Any]:
    """The layer's non-trainable variables, which its `call` updates."""
    return list(layer.non_trainable_variables)


def is_symbolic() -> bool:
    """Whether Keras runs a layer only to learn the shapes of its outputs."""
    return in_symbolic_scope()
