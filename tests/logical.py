"""Strategies with several logical devices a replica, on the CPU devices of the tests, and models to divide."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

import keras_distribute as kd

COMPUTATION_SHAPES = {1: [1, 1, 1, 1], 2: [1, 2, 1, 1], 4: [2, 2, 1, 1], 8: [2, 4, 1, 1]}
HIDDEN = {".*hidden/kernel": (None, "logical"), ".*hidden/bias": ("logical",)}
RNG = np.random.RandomState(0)
IMAGES, LABELS = RNG.randn(38, 8, 8, 3).astype("float32"), RNG.randint(0, 3, 38)


def tpu_strategy(num_logical: int, **options: Any) -> Any:
    """A `TPUStrategy` over all eight CPU devices."""
    resolver = kd.cluster_resolver.TPUClusterResolver("cpu")
    topology = kd.tpu.experimental.initialize_tpu_system(resolver)
    assignment = kd.tpu.experimental.DeviceAssignment.build(
        topology, computation_shape=COMPUTATION_SHAPES[num_logical], num_replicas=8 // num_logical
    )
    return kd.TPUStrategy(resolver, assignment, **options)


class Divided(keras.layers.Layer):
    """Divides its input over the logical devices of a `TPUStrategy`."""

    def __init__(self, parts: Any) -> None:
        super().__init__()
        self.parts = parts

    def call(self, x: Any) -> Any:
        strategy: Any = kd.get_strategy()
        return strategy.experimental_split_to_logical_devices(x, self.parts) if self.parts else x


def image_classifier(parts: Any = None, **compiling: Any) -> Any:
    """Convolutions over images that are divided, batch normalization, and a dense layer that a layout map divides."""
    keras.utils.set_random_seed(0)
    layers = [
        keras.Input((8, 8, 3)),
        Divided(parts),
        keras.layers.Conv2D(4, 3, padding="same", activation="relu"),
        keras.layers.BatchNormalization(),
        keras.layers.Conv2D(6, 3, strides=2, padding="same", activation="relu"),
        keras.layers.Flatten(),
        keras.layers.Dense(16, activation="relu", name="hidden"),
        keras.layers.Dense(3),
    ]
    model = keras.Sequential(layers)
    optimizer = keras.optimizers.Adam(0.01, epsilon=1e-3)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"], **compiling)
    return model
