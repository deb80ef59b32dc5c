"""A table of numbers, text and categories, through a `FeatureSpace`."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import layers
from keras.utils import FeatureSpace


def program() -> Any:
    import tensorflow as tf

    rng = np.random.default_rng(21)
    table = {
        "age": rng.integers(20, 80, 43).astype("int32"),
        "pressure": rng.normal(120, 15, 43).astype("float32"),
        "pain": rng.integers(0, 4, 43).astype("int32"),
        "defect": rng.choice(["normal", "fixed", "reversible"], 43),
    }
    y = ((table["age"] > 50) | (table["defect"] == "fixed")).astype("int32")
    dataset = tf.data.Dataset.from_tensor_slices((table, y))
    training, validation = dataset.take(34).batch(13), dataset.skip(34).batch(9)

    space = FeatureSpace(
        features={
            "age": FeatureSpace.float_discretized(num_bins=5),
            "pressure": FeatureSpace.float_normalized(),
            "pain": FeatureSpace.integer_categorical(num_oov_indices=0),
            "defect": FeatureSpace.string_categorical(num_oov_indices=0),
        },
        crosses=[FeatureSpace.cross(("pain", "defect"), crossing_dim=8)],
        output_mode="concat",
    )
    space.adapt(training.map(lambda x, _: x))
    encoded = space.get_encoded_features()
    hidden = layers.Dropout(0.2)(layers.Dense(8, activation="relu")(encoded))
    model = keras.Model(encoded, layers.Dense(1, activation="sigmoid")(hidden))
    model.compile(
        keras.optimizers.Adam(0.02, epsilon=1e-3),
        "binary_crossentropy",
        metrics=["accuracy", "auc"],
    )
    ready = training.map(
        lambda x, y: (space(x), y), num_parallel_calls=tf.data.AUTOTUNE
    ).prefetch(2)
    ready_validation = validation.map(lambda x, y: (space(x), y))
    history = model.fit(ready, epochs=2, validation_data=ready_validation, verbose=0)
    return {
        "history": history,
        "predictions": model.predict(ready_validation, verbose=0),
        "model": model,
    }
