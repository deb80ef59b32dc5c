"""Quickstart: train a digit classifier on four replicas, then check it against one
device.

    python tutorials/quickstart.py

On a machine without accelerators the four replicas are virtual CPU devices, which are
there to try things out, not to be fast. With several GPUs or TPU cores the same script
uses those.
"""

from __future__ import annotations

# Importing keras_distribute before keras makes Keras run on JAX. CPU devices are chosen
# before JAX starts.
import keras_distribute as kd

kd.config.set_cpu_devices(4)

import tempfile
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras import layers
from sklearn.datasets import load_digits

EPOCHS = 6
BATCH_SIZE = 128  # of all replicas together, as everywhere in keras_distribute

Data = tuple[np.ndarray, np.ndarray]  # images and labels


def load_data() -> tuple[Data, Data]:
    """1,797 scanned digits of 8 x 8 pixels: 1,437 to train on, 360 to test."""
    digits: Any = load_digits()
    images = (digits.images / 16).astype("float32")[..., None]
    order = np.random.default_rng(0).permutation(len(images))
    train, test = order[:1437], order[1437:]
    return (images[train], digits.target[train]), (images[test], digits.target[test])


def make_model() -> keras.Model:
    """An ordinary Keras model: nothing in it knows of replicas.

    But for one word: `synchronized=True` normalises by the statistics of the whole
    batch, as one device does. Without it, each replica normalises its own rows by their
    own statistics.
    """
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(16, 3, padding="same", use_bias=False),
            layers.BatchNormalization(momentum=0.9, synchronized=True),
            layers.ReLU(),
            layers.Conv2D(32, 3, strides=2, padding="same", activation="relu"),
            layers.Flatten(),
            layers.Dropout(0.3),
            layers.Dense(10),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.Adam(3e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def train_and_evaluate(model: keras.Model, train: Data, test: Data) -> dict[str, float]:
    """`fit` and `evaluate`, as for any Keras model; returns the numbers to compare."""
    start = time.perf_counter()
    # 1,437 images in batches of 128 leave a last batch of 29, which four replicas
    # cannot share evenly: it counts as 29.
    history = model.fit(*train, batch_size=BATCH_SIZE, epochs=EPOCHS, verbose=0).history
    print(f"  trained {EPOCHS} epochs in {time.perf_counter() - start:.1f} s")
    results = model.evaluate(*test, batch_size=BATCH_SIZE, verbose=0, return_dict=True)
    return {
        "loss, first epoch": history["loss"][0],
        "loss, last epoch": history["loss"][-1],
        "accuracy, last epoch": history["accuracy"][-1],
        "test loss": results["loss"],
        "test accuracy": results["accuracy"],
    }


def main() -> None:
    train, test = load_data()

    # 1. The strategy says which devices hold a replica: without arguments, all of this
    # machine.
    strategy = kd.MirroredStrategy()
    print(
        f"{strategy.num_replicas_in_sync} replicas: "
        f"{', '.join(strategy.extended.worker_devices)}"
    )

    # 2. Build and compile in its scope. From here on the model runs on all replicas,
    # inside the scope or outside.
    with strategy.scope():
        model = make_model()
    on_replicas = train_and_evaluate(model, train, test)

    # 3. Predictions come back in order, one row for each image.
    predictions = model.predict(test[0], verbose=0)
    print(
        f"  predicted {len(predictions)} images; the first ten are "
        f"{predictions[:10].argmax(axis=1)}"
    )

    # 4. What is saved is an ordinary Keras file: it loads under any strategy, or under
    # none.
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "digits.keras"
        model.save(path)
        loaded = keras.models.load_model(path)
    difference = np.abs(loaded.predict(test[0], verbose=0) - predictions).max()
    print(
        "  saved, and loaded without a strategy: predictions differ by at most "
        f"{difference:.0e}"
    )

    # 5. The same training on one device, without a strategy.
    print("1 device")
    plain = make_model()
    on_one_device = train_and_evaluate(plain, train, test)

    replicas = f"{strategy.num_replicas_in_sync} replicas"
    print(f"\n{'':22}{replicas:>12}{'1 device':>12}{'difference':>12}")
    for name, value in on_replicas.items():
        plain_value = on_one_device[name]
        difference = abs(value - plain_value)
        print(f"{name:22}{value:12.6f}{plain_value:12.6f}{difference:12.0e}")
    weights = zip(model.get_weights(), plain.get_weights(), strict=True)
    difference = max(np.abs(a - b).max() for a, b in weights)
    print(f"{'weights, the largest':46}{difference:12.0e}")


if __name__ == "__main__":
    main()
