"""A transformer that classifies texts, with padding that its embedding masks."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import layers, ops

WORDS, LENGTH, WIDTH = 20, 7, 8


class PositionEmbedding(layers.Layer):
    """Words and positions as vectors; padding is masked."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.words = layers.Embedding(WORDS, WIDTH, mask_zero=True)
        self.positions = layers.Embedding(LENGTH, WIDTH)

    def call(self, inputs: Any) -> Any:
        return self.words(inputs) + self.positions(ops.arange(ops.shape(inputs)[-1]))

    def compute_mask(self, inputs: Any, mask: Any = None) -> Any:
        return self.words.compute_mask(inputs, mask)


class TransformerBlock(layers.Layer):
    """Attention and a feed-forward network, each with what goes around it."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.supports_masking = True
        self.attention = layers.MultiHeadAttention(2, WIDTH // 2, dropout=0.1)
        self.feed_forward = keras.Sequential(
            [layers.Dense(12, activation="gelu"), layers.Dense(WIDTH)]
        )
        self.normalize_first = layers.LayerNormalization(epsilon=1e-6)
        self.normalize_second = layers.LayerNormalization(epsilon=1e-6)
        self.dropout = layers.Dropout(0.1)

    def call(self, inputs: Any, training: bool = False) -> Any:
        attended = self.attention(inputs, inputs, training=training)
        x = self.normalize_first(inputs + self.dropout(attended, training=training))
        return self.normalize_second(
            x + self.dropout(self.feed_forward(x), training=training)
        )


def program() -> Any:
    rng = np.random.default_rng(10)
    x = rng.integers(1, WORDS, (43, LENGTH)).astype("int32")
    x[np.arange(LENGTH) >= rng.integers(1, LENGTH + 1, (43, 1))] = 0
    y = (x.max(axis=1) > 15).astype("int32")

    inputs = keras.Input((LENGTH,), dtype="int32")
    hidden = TransformerBlock()(PositionEmbedding()(inputs))
    pooled = layers.GlobalAveragePooling1D()(hidden)
    outputs = layers.Dense(2, activation="softmax")(layers.Dropout(0.1)(pooled))
    model = keras.Model(inputs, outputs)
    schedule = keras.optimizers.schedules.CosineDecay(
        0.01, 8, warmup_target=0.02, warmup_steps=3
    )
    optimizer = keras.optimizers.AdamW(schedule, epsilon=1e-3, global_clipnorm=1.0)
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    history = model.fit(
        x, y, batch_size=15, epochs=3, class_weight={0: 1.0, 1: 2.0}, verbose=0
    )
    return {
        "history": history,
        "evaluation": model.evaluate(x, y, batch_size=43, return_dict=True, verbose=0),
        "predictions": model.predict(x, batch_size=43, verbose=0),
        "model": model,
    }
