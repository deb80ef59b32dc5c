"""Knowledge distillation: a student learns from the softened outputs of a teacher."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import layers, ops


class Distiller(keras.Model):
    """Trains `student` on labels and on the outputs of a `teacher` that stays."""

    def __init__(self, student: keras.Model, teacher: keras.Model) -> None:
        super().__init__()
        self.student, self.teacher = student, teacher
        self.teacher.trainable = False
        self.distance = keras.metrics.Mean(name="distance")

    def compile(
        self, distillation_loss: Any, alpha: float, temperature: float, **options: Any
    ) -> None:
        super().compile(**options)
        self.distillation_loss, self.alpha, self.temperature = (
            distillation_loss,
            alpha,
            temperature,
        )

    def call(self, x: Any, training: bool = False) -> Any:
        return self.student(x, training=training)

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        **_: Any,
    ) -> Any:
        hard = super().compute_loss(x, y, y_pred, sample_weight)
        taught = self.teacher(x, training=False)
        soft = self.distillation_loss(
            ops.softmax(taught / self.temperature),
            ops.softmax(y_pred / self.temperature),
        )
        soft = soft * self.temperature**2
        self.distance.update_state(soft)
        return self.alpha * hard + (1 - self.alpha) * soft


def network(width: int, name: str) -> keras.Model:
    """A small image classifier."""
    inputs = keras.Input((8, 8, 1))
    x = layers.Conv2D(width, 3, strides=2, padding="same")(inputs)
    x = layers.LeakyReLU(negative_slope=0.2)(x)
    x = layers.MaxPooling2D(2, strides=1, padding="same")(x)
    return keras.Model(inputs, layers.Dense(4)(layers.Flatten()(x)), name=name)


def program() -> Any:
    rng = np.random.default_rng(4)
    y = rng.integers(0, 4, 44).astype("int32")
    x = rng.normal(size=(44, 8, 8, 1)).astype("float32") + y[:, None, None, None] / 2

    def loss() -> Any:
        return keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    teacher = network(8, "teacher")
    teacher.compile(
        keras.optimizers.Adam(0.01, epsilon=1e-3),
        loss(),
        metrics=["sparse_categorical_accuracy"],
    )
    taught = teacher.fit(x, y, batch_size=13, epochs=2, verbose=0)

    distiller = Distiller(network(3, "student"), teacher)
    distiller.compile(
        optimizer=keras.optimizers.Adam(0.01, epsilon=1e-3),
        loss=loss(),
        metrics=["sparse_categorical_accuracy"],
        distillation_loss=keras.losses.KLDivergence(),
        alpha=0.3,
        temperature=5.0,
    )
    history = distiller.fit(x, y, batch_size=13, epochs=2, verbose=0)
    return {
        "taught": taught,
        "history": history,
        "evaluation": distiller.evaluate(
            x, y, batch_size=44, return_dict=True, verbose=0
        ),
        "predictions": distiller.predict(x, batch_size=44, verbose=0),
        "models": [teacher, distiller],
    }
