"""The models of `published_steps.py`, each as its source says that it was trained."""

from __future__ import annotations

from typing import Any

import keras
from keras import layers


def _compiled(model: Any, optimizer: Any) -> Any:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss)
    return model


def _convolved(
    x: Any, filters: int, size: int, strides: int = 1, relu: bool = True
) -> Any:
    x = layers.Conv2D(filters, size, strides, padding="same", use_bias=False)(x)
    x = layers.BatchNormalization()(x)
    return layers.ReLU()(x) if relu else x


def _bottleneck(x: Any, filters: int, strides: int, is_rs: bool) -> Any:
    """A block of ResNet v1.5, whose second convolution has the stride; of ResNet-RS
    with what it adds: squeeze-and-excite, and an average in place of a stride.
    """
    y = _convolved(x, filters, 1)
    y = _convolved(y, filters, 3, strides)
    y = _convolved(y, 4 * filters, 1, relu=False)
    if is_rs:
        scale = layers.GlobalAveragePooling2D(keepdims=True)(y)
        scale = layers.Conv2D(filters, 1, activation="relu")(scale)
        scale = layers.Conv2D(4 * filters, 1, activation="sigmoid")(scale)
        y = layers.Multiply()([y, scale])
    if strides > 1 or x.shape[-1] != 4 * filters:
        if is_rs and strides > 1:
            x, strides = layers.AveragePooling2D(2, padding="same")(x), 1
        x = _convolved(x, 4 * filters, 1, strides, relu=False)
    return layers.ReLU()(layers.Add()([x, y]))


def resnet50(policy: str, size: int = 224, is_rs: bool = False) -> Any:
    """ResNet-50 v1.5, or ResNet-RS-50, with momentum."""
    keras.mixed_precision.set_dtype_policy(policy)
    x = images = keras.Input((size, size, 3))
    if is_rs:
        x = _convolved(_convolved(_convolved(x, 32, 3, 2), 32, 3), 64, 3)
        x = _convolved(x, 64, 3, 2)
    else:
        x = _convolved(x, 64, 7, 2)
        x = layers.MaxPooling2D(3, 2, padding="same")(x)
    for stage, blocks in enumerate((3, 4, 6, 3)):
        for block in range(blocks):
            strides = 2 if stage and not block else 1
            x = _bottleneck(x, 64 * 2**stage, strides, is_rs)
    x = layers.GlobalAveragePooling2D()(x)
    logits = layers.Dense(1000, dtype="float32")(x)
    return _compiled(
        keras.Model(images, logits), keras.optimizers.SGD(0.1, momentum=0.9)
    )


def vit(policy: str, width: int, heads: int) -> Any:
    """A vision transformer of 12 blocks over patches of 16 by 16."""
    keras.mixed_precision.set_dtype_policy(policy)
    images = keras.Input((224, 224, 3))
    x = layers.Reshape((196, width))(layers.Conv2D(width, 16, 16)(images))
    for _ in range(12):
        y = layers.LayerNormalization()(x)
        y = layers.MultiHeadAttention(heads, width // heads)(y, y)
        x = layers.Add()([x, y])
        y = layers.Dense(4 * width, "gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dense(width)(y)])
    x = layers.GlobalAveragePooling1D()(layers.LayerNormalization()(x))
    x = layers.Dense(width, "tanh")(x)
    logits = layers.Dense(1000, dtype="float32")(x)
    return _compiled(keras.Model(images, logits), keras.optimizers.Adam())


def bert_base() -> Any:
    """A classifier of BERT base's size: 12 blocks of 768, 12 heads, 512 tokens, dropout
    of 0.1; in float32.
    """
    keras.mixed_precision.set_dtype_policy("float32")
    tokens = keras.Input((512,), dtype="int32")
    x = layers.LayerNormalization()(layers.Embedding(30522, 768)(tokens))
    x = layers.Dropout(0.1)(x)
    for _ in range(12):
        y = layers.Dropout(0.1)(layers.MultiHeadAttention(12, 64, dropout=0.1)(x, x))
        x = layers.LayerNormalization()(layers.Add()([x, y]))
        y = layers.Dense(768)(layers.Dense(3072, activation="gelu")(x))
        x = layers.LayerNormalization()(layers.Add()([x, layers.Dropout(0.1)(y)]))
    pooled = layers.Dense(768, activation="tanh")(x[:, 0])
    logits = layers.Dense(2)(layers.Dropout(0.1)(pooled))
    return _compiled(keras.Model(tokens, logits), keras.optimizers.AdamW())


class DecoderBlock(layers.Layer):
    """A block of a decoder: causal attention, and a gated layer of `wide` units."""

    def __init__(self, width: int, heads: int, wide: int, is_recomputed: bool) -> None:
        super().__init__()
        self._norms = [layers.RMSNormalization() for _ in range(2)]
        self._attend = layers.MultiHeadAttention(heads, 128, use_bias=False)
        self._wide = [layers.Dense(wide, use_bias=False) for _ in range(2)]
        self._narrow = layers.Dense(width, use_bias=False)
        self._is_recomputed = is_recomputed

    def build(self, shape: Any) -> None:
        """Creates the weights."""
        for norm in self._norms:
            norm.build(shape)
        self._attend.build(shape, shape)
        for dense in self._wide:
            dense.build(shape)
        self._narrow.build((*shape[:-1], self._wide[0].units))

    def call(self, x: Any) -> Any:
        """The block, or the block whose backward pass computes it once more."""
        forward = self._forward
        return (keras.remat(forward) if self._is_recomputed else forward)(x)

    def _forward(self, x: Any) -> Any:
        y = self._norms[0](x)
        x = x + self._attend(y, y, use_causal_mask=True)
        y = self._norms[1](x)
        gate, value = (dense(y) for dense in self._wide)
        return x + self._narrow(keras.ops.silu(gate) * value)


def decoder(width: int, heads: int, wide: int, blocks: int, remat: bool) -> Any:
    """A decoder of so many blocks, with AdamW."""
    keras.mixed_precision.set_dtype_policy("mixed_bfloat16")
    tokens = keras.Input((2048,), dtype="int32")
    x = layers.Embedding(32_000, width)(tokens)
    for _ in range(blocks):
        x = DecoderBlock(width, heads, wide, remat)(x)
    x = layers.RMSNormalization()(x)
    logits = layers.Dense(32_000, use_bias=False)(x)
    return _compiled(keras.Model(tokens, logits), keras.optimizers.AdamW())
