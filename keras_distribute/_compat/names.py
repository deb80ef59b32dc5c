"""Private classes and modules of Keras that are called otherwise in other versions.

Up to Keras 3.15 the trainers are `Trainer` and `JAXTrainer`, and the operations of a
backend stand in it directly. Each goes when Keras 3.16 is the oldest version that is
supported.
"""

from __future__ import annotations

from typing import Any

from keras.src.trainers.epoch_iterator import EpochIterator

from keras_distribute._compat.seams import check, find

BaseTrainer: Any = find(
    "keras.src.trainers.trainer:BaseTrainer", "keras.src.trainers.trainer:Trainer"
)
"""The trainer of all backends."""

JAXTrainer: Any = find(
    "keras.src.backend.jax.trainer:JAXTrainer", "keras.src.backend.jax.trainer:Trainer"
)
"""The trainer of JAX, from which `keras.Model` inherits."""

jax_nn: Any = find("keras.src.backend.jax.ops.nn", "keras.src.backend.jax.nn")
"""The operations of neural networks on JAX."""

# For `trainer` and `epochs`.
check(BaseTrainer, "_flatten_layers", "_symbolic_build")
check(JAXTrainer, "_get_jax_state", "_jax_state", "_jax_state_synced")
check(EpochIterator, "_current_iterator", "_enumerate_iterator", "_get_iterator")
check(EpochIterator, "_num_batches", "_steps_seen")
