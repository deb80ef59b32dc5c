"""A text classifier on a BERT of KerasHub, from a configuration, with LoRA."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

keras_hub = pytest.importorskip("keras_hub")


def program() -> Any:
    rng = np.random.default_rng(28)
    tokens = rng.integers(1, 20, (21, 6)).astype("int32")
    there = (np.arange(6) < rng.integers(1, 7, (21, 1))).astype("int32")
    x = {
        "token_ids": tokens * there,
        "segment_ids": np.zeros_like(tokens),
        "padding_mask": there,
    }
    y = (tokens[:, 0] > 9).astype("int32")

    backbone = keras_hub.models.BertBackbone(
        vocabulary_size=20,
        num_layers=1,
        num_heads=2,
        hidden_dim=8,
        intermediate_dim=12,
        max_sequence_length=6,
    )
    backbone.enable_lora(2)
    outputs = layers.Dense(2)(
        layers.Dropout(0.1)(backbone(backbone.input)["pooled_output"])
    )
    model = keras.Model(backbone.input, outputs)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(
        keras.optimizers.AdamW(0.02, epsilon=1e-3), loss, metrics=["accuracy"]
    )
    history = model.fit(x, y, batch_size=11, epochs=2, verbose=0)
    return {
        "history": history,
        "predictions": model.predict(x, batch_size=21, verbose=0),
        "model": model,
    }
