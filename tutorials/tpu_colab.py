"""A spatially partitioned classifier on a TPU: the same program on one chip, on eight, and on CPU devices.

On Colab, Kaggle or a TPU virtual machine:

    python tutorials/tpu_colab.py

On a machine without a TPU, eight CPU devices stand in for it:

    TPU_NAME=cpu python tutorials/tpu_colab.py
"""

from __future__ import annotations

# Importing keras_distribute before keras makes Keras run on JAX. CPU devices are chosen before JAX starts.
import keras_distribute as kd

kd.config.set_cpu_devices(8)  # These stand in where there is no TPU; a TPU's devices do not change.

import os
from typing import Any

import keras
import numpy as np
from sklearn.datasets import load_digits

EPOCHS = int(os.environ.get("EPOCHS", "5"))


def strategies() -> dict[str, kd.TPUStrategy]:
    """Every device a replica, and two devices a replica where there is more than one."""
    resolver = kd.cluster_resolver.TPUClusterResolver("")
    topology = kd.tpu.experimental.initialize_tpu_system(resolver)
    print(topology)
    found = {"data parallel": kd.TPUStrategy(resolver)}
    pair = [1, 2, 1, 1] if topology.mesh_shape[1] > 1 else [1, 1, 1, 2]
    if all(size <= room for size, room in zip(pair, topology.mesh_shape, strict=True)):
        count = topology.num_tasks * topology.num_tpus_per_task // 2
        assignment = kd.tpu.experimental.DeviceAssignment.build(topology, computation_shape=pair, num_replicas=count)
        layouts = {".*hidden/kernel": (None, "logical"), ".*hidden/bias": ("logical",)}
        found["two logical devices a replica"] = kd.TPUStrategy(resolver, assignment, layout_map=layouts)
    return found


class DividedHeight(keras.layers.Layer):
    """Divides the height of images over the logical devices of each replica."""

    def call(self, images: Any) -> Any:
        strategy: Any = kd.get_strategy()
        return strategy.experimental_split_to_logical_devices(images, [1, strategy.num_logical_devices, 1, 1])


def classifier() -> keras.Model:
    """A small convolutional network for images of 8 by 8."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            DividedHeight(),
            keras.layers.Conv2D(16, 3, padding="same", activation="relu"),
            keras.layers.Conv2D(32, 3, strides=2, padding="same", activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu", name="hidden"),
            keras.layers.Dense(10),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(3e-3), loss, metrics=["accuracy"], steps_per_execution=4)
    return model


def main() -> None:
    digits = load_digits()
    images, labels = (digits.images[..., None] / 16).astype("float32"), digits.target
    accuracies = {}
    for name, strategy in strategies().items():
        print(f"{name}: {strategy}")
        with strategy.scope():
            model = classifier()
        batch = 256  # For all replicas together, so that the numbers do not depend on how many there are.
        model.fit(images[:1500], labels[:1500], batch_size=batch, epochs=EPOCHS, verbose=2)
        accuracies[name] = model.evaluate(images[1500:], labels[1500:], batch_size=batch, verbose=0)[1]
    for name, accuracy in accuracies.items():
        print(f"test accuracy, {name}: {accuracy:.3f}")
    assert np.ptp(list(accuracies.values())) < 0.02, "the devices are divided otherwise, the numbers are the same"


if __name__ == "__main__":
    main()
