"""Strategies with several logical devices a replica, on the CPU devices of the tests,
and models to divide.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

import keras_distribute as kd
from tests.support import without_tensorflow

COMPUTATION_SHAPES = {
    1: [1, 1, 1, 1],
    2: [1, 2, 1, 1],
    4: [2, 2, 1, 1],
    8: [2, 4, 1, 1],
}
HIDDEN = {".*hidden/kernel": (None, "logical"), ".*hidden/bias": ("logical",)}
RNG = np.random.RandomState(0)
IMAGES, LABELS = RNG.randn(22, 8, 8, 3).astype("float32"), RNG.randint(0, 3, 22)
ROWS = IMAGES.reshape(22, 192)


def tpu_strategy(num_logical: int, **options: Any) -> Any:
    """A `TPUStrategy` over all eight CPU devices."""
    resolver = kd.cluster_resolver.TPUClusterResolver("cpu")
    topology = kd.tpu.experimental.initialize_tpu_system(resolver)
    assignment = kd.tpu.experimental.DeviceAssignment.build(
        topology,
        computation_shape=COMPUTATION_SHAPES[num_logical],
        num_replicas=8 // num_logical,
    )
    return kd.TPUStrategy(resolver, assignment, **options)


class Divided(keras.layers.Layer):
    """Divides its input over the logical devices of a `TPUStrategy`."""

    def __init__(self, parts: Any) -> None:
        super().__init__()
        self.parts = parts

    def call(self, x: Any) -> Any:
        strategy: Any = kd.get_strategy()
        return (
            strategy.experimental_split_to_logical_devices(x, self.parts)
            if self.parts
            else x
        )


def image_classifier(parts: Any = None) -> Any:
    """A convolution over images that are divided, batch normalization, and a dense
    layer that a layout map divides.
    """
    keras.utils.set_random_seed(0)
    layers = [
        keras.Input((8, 8, 3)),
        Divided(parts),
        keras.layers.Conv2D(4, 3, padding="same", activation="relu"),
        keras.layers.BatchNormalization(),
        keras.layers.GlobalAveragePooling2D(),
        keras.layers.Dense(16, activation="relu", name="hidden"),
        keras.layers.Dense(3),
    ]
    return compiled(keras.Sequential(layers))


def dense_classifier(**compiling: Any) -> Any:
    """Dense layers of which a layout map divides one."""
    keras.utils.set_random_seed(0)
    hidden = keras.layers.Dense(16, activation="tanh", name="hidden")
    return compiled(
        keras.Sequential([keras.Input((192,)), hidden, keras.layers.Dense(3)]),
        **compiling,
    )


def compiled(model: Any, **compiling: Any) -> Any:
    """The model, ready to train."""
    optimizer = keras.optimizers.Adam(0.01, epsilon=1e-3)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"], **compiling)
    return model


def names_of_a_nan(strategy: Any, rows: int, row: int) -> str:
    """What `RaiseOnNaN` says of a value that is no number, in one row of a batch."""
    x = ROWS[:rows].copy()
    x[row, 0] = np.nan
    with strategy.scope():
        model = dense_classifier()
    guard = kd.callbacks.RaiseOnNaN()
    options: Any = {"batch_size": rows, "shuffle": False, "verbose": 0}
    try:
        model.fit(x, LABELS[:rows], callbacks=[guard], **options)
    except kd.errors.NonFiniteError as error:
        return str(error).splitlines()[1].strip()
    return "nothing"


def on_hosts(folder: Any) -> dict[str, Any]:
    """What one of several processes trains, saves and gets back, with two logical
    devices a replica.
    """
    without_tensorflow()
    strategy = tpu_strategy(2, layout_map=HIDDEN)
    with strategy.scope():
        model = dense_classifier()
    history = model.fit(
        ROWS, LABELS, batch_size=16, epochs=2, shuffle=False, verbose=0
    ).history
    model.save(f"{folder}/model.keras")
    kd.Checkpoint(model=model).write(f"{folder}/checkpoint")
    expected = model.get_weights()
    model.set_weights([0 * weight for weight in expected])
    kd.Checkpoint(model=model).read(f"{folder}/checkpoint")
    values = strategy.experimental_distribute_values_from_function(
        lambda context: np.full((2, 2), context.replica_id_in_sync_group, "float32")
    )

    def step(x: Any) -> Any:
        return strategy.experimental_split_to_logical_devices(x, [1, 2]).sum()

    return {
        "strategy": repr(strategy),
        "loss": history["loss"],
        "weights": expected,
        "restored": model.get_weights(),
        "predictions": np.asarray(model.predict(ROWS, verbose=0)),
        "sums": [float(value) for value in strategy.run(step, args=(values,)).values],
        "total": float(
            strategy.reduce("SUM", strategy.run(step, args=(values,)), axis=None)
        ),
        "nan": names_of_a_nan(strategy, 16, 13),
        "placed": len(
            strategy.experimental_split_to_logical_devices(
                np.ones((2, 2)), [1, 2]
            ).addressable_shards
        ),
    }
