"""Two towers for users and films: the other films of the batch are the wrong ones."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import layers, ops


class TwoTowers(keras.Model):
    """Scores pairs by the product of two embeddings, and learns ratings beside."""

    def __init__(self) -> None:
        super().__init__()
        self.users = layers.Embedding(9, 4)
        self.films = layers.Embedding(14, 4)
        self.rating = keras.Sequential(
            [layers.Dense(6, activation="relu"), layers.Dense(1)]
        )

    def call(self, inputs: Any) -> Any:
        user, film = self.users(inputs["user"]), self.films(inputs["film"])
        rating = self.rating(ops.concatenate([user, film], axis=-1))
        return {"user": user, "film": film, "rating": rating}

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        **_: Any,
    ) -> Any:
        scores = ops.matmul(y_pred["user"], ops.transpose(y_pred["film"]))
        # The same film twice in a batch is no wrong one.
        same = ops.cast(x["film"][:, None] == x["film"][None], "float32")
        scores = scores - 1e6 * (same - ops.eye(ops.shape(scores)[0]))
        labels = ops.arange(ops.shape(scores)[0])
        retrieval = keras.losses.sparse_categorical_crossentropy(
            labels, scores, from_logits=True
        )
        rating = ops.square(y - y_pred["rating"][:, 0])
        return ops.sum(retrieval * sample_weight) + ops.mean(rating)

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any) -> Any:
        return super().compute_metrics(x, y, y_pred["rating"], sample_weight)


def program() -> Any:
    rng = np.random.default_rng(31)
    x = {name: rng.integers(0, n, 43) for name, n in (("user", 9), ("film", 14))}
    y = rng.integers(1, 6, 43).astype("float32")
    weight = rng.random(43).astype("float32")
    model = TwoTowers()
    optimizer = keras.optimizers.Adagrad(0.05, epsilon=1e-3)
    model.compile(optimizer, metrics=[keras.metrics.RootMeanSquaredError(name="rmse")])
    history = model.fit(x, y, batch_size=16, epochs=3, sample_weight=weight, verbose=0)
    predictions = model.predict(x, batch_size=43, verbose=0)
    best = ops.top_k(predictions["user"] @ model.films.embeddings.numpy().T, 3)[1]
    return {
        "history": history,
        "predictions": predictions,
        "best": best,
        "model": model,
    }
