"""A model built for a batch of shapes alone, and traced as if other devices were there.

- `Trainer._symbolic_build`: what `fit` does before its first step; Keras has no public
  name for it. Goes when it has.
- `jax.devices`, `jax.default_backend`: Keras and others ask them, while a step is
  traced, which kernels the accelerator has
  (`keras.src.backend.jax.nn.dot_product_attention`). JAX has no way to say which
  devices a trace is for.
"""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from typing import Any

import jax

from keras_distribute._compat.names import BaseTrainer
from keras_distribute._compat.seams import check

check(BaseTrainer, "_symbolic_build")


def build(trainer: Any, batch: Any) -> None:
    """Builds what is not built yet: layers, metrics, losses, the optimizer.

    Args:
        batch: What a step takes; anything with shapes and dtypes.
    """
    trainer._symbolic_build(data_batch=batch)


@contextlib.contextmanager
def seen_as(devices: Sequence[Any]) -> Generator[None]:
    """In the `with` block, code that asks JAX for its devices sees these."""
    known, backend = jax.devices, jax.default_backend

    def seen_devices(platform: Any = None) -> Any:
        if platform in (None, devices[0].platform):
            return list(devices)
        return known(platform)

    jax.devices, jax.default_backend = seen_devices, lambda: devices[0].platform
    try:
        yield
    finally:
        jax.devices, jax.default_backend = known, backend
