"""The models of the benchmarks, with the data of a round."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Workload:
    """What is trained.

    Args:
        title: Of its column.
        build: Makes the model.
        shape: Of an example.
        batch: The global batch.
        steps: Of a round.
        tokens: How many different integers an example is made of; 0 for floats.
    """

    title: str
    build: Callable[[], Any]
    shape: tuple[int, ...]
    batch: int
    steps: int
    tokens: int = 0

    def data(self) -> tuple[Any, Any]:
        """The examples of a round, and their labels."""
        import numpy as np

        rng = np.random.default_rng(0)
        count = self.batch * self.steps
        x = (
            rng.integers(0, self.tokens, (count, *self.shape))
            if self.tokens
            else rng.normal(size=(count, *self.shape))
        )
        return x.astype("int32" if self.tokens else "float32"), rng.integers(
            0, 10, count
        ).astype("int32")


def mlp() -> Any:
    """A dense model 784-128-10."""
    import keras
    from keras import layers

    return keras.Sequential(
        [keras.Input((784,)), layers.Dense(128, activation="relu"), layers.Dense(10)]
    )


def cnn() -> Any:
    """Three blocks of convolution and BatchNormalization."""
    import keras
    from keras import layers

    blocks: list[Any] = []
    for filters in (16, 32, 32):
        blocks += [
            layers.Conv2D(
                filters,
                3,
                strides=1 if filters == 16 else 2,
                padding="same",
                use_bias=False,
            ),
            layers.BatchNormalization(),
            layers.ReLU(),
        ]
    return keras.Sequential(
        [
            keras.Input((32, 32, 3)),
            *blocks,
            layers.GlobalAveragePooling2D(),
            layers.Dense(10),
        ]
    )


def deep() -> Any:
    """161 dense layers of 32: 324 trainable arrays, about 1,000 with those of Adam."""
    import keras
    from keras import layers

    narrow = [layers.Dense(32, activation="relu") for _ in range(161)]
    return keras.Sequential([keras.Input((32,)), *narrow, layers.Dense(10)])


def transformer() -> Any:
    """Two blocks of attention over 32 tokens."""
    import keras
    from keras import layers

    tokens = keras.Input((32,), dtype="int32")
    x = layers.Embedding(200, 64)(tokens)
    for _ in range(2):
        y = layers.LayerNormalization()(x)
        x = layers.Add()([x, layers.MultiHeadAttention(4, 16)(y, y)])
        y = layers.Dense(128, activation="gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dense(64)(y)])
    return keras.Model(tokens, layers.Dense(10)(layers.GlobalAveragePooling1D()(x)))


def decoder(length: int, vocabulary: int, width: int, heads: int, blocks: int) -> Any:
    """A decoder without dropout, whose head is not tied to its embedding."""
    import keras
    from keras import layers

    ids = keras.Input((length,), dtype="int32")
    hidden = layers.Embedding(vocabulary, width)(ids)
    for _ in range(blocks):
        normed = layers.LayerNormalization()(hidden)
        attention = layers.MultiHeadAttention(heads, width // heads)
        attended = attention(normed, normed, use_causal_mask=True)
        hidden = layers.Add()([hidden, attended])
        normed = layers.LayerNormalization()(hidden)
        wide = layers.Dense(4 * width, activation="gelu")(normed)
        hidden = layers.Add()([hidden, layers.Dense(width)(wide)])
    return keras.Model(
        ids, layers.Dense(vocabulary)(layers.LayerNormalization()(hidden))
    )


def lstm() -> Any:
    """A recurrent layer over 50 time steps."""
    import keras
    from keras import layers

    return keras.Sequential([keras.Input((50, 16)), layers.LSTM(64), layers.Dense(10)])


def resnet50() -> Any:
    """Keras's ResNet-50, for small images."""
    import keras

    logits = {"classes": 10, "classifier_activation": "linear"}
    return keras.applications.ResNet50(weights=None, input_shape=(64, 64, 3), **logits)


VARIANTS = {
    "dropout": "with dropout",
    "bfloat16": "in mixed_bfloat16",
    "own_layer": "with a layer of one's own",
    "own_step": "with a `train_step` of one's own",
}


def varied(build: Callable[[], Any], variant: str) -> Callable[[], Any]:
    """What makes the model of a workload in a variant."""

    def made() -> Any:
        import jax
        import keras
        from keras import layers

        class Scaled(layers.Layer):
            """A layer that Keras does not have."""

            def build(self, shape: Any) -> None:
                self.scale = self.add_weight(shape=shape[-1:], initializer="ones")

            def call(self, x: Any) -> Any:
                return keras.ops.tanh(x * self.scale)

        class OwnStep(keras.Model):
            """The training step of Keras's guide to custom steps in JAX."""

            def train_step(self, state: Any, data: Any) -> Any:
                weights, others, slots, metrics = state
                x, y = data[:2]

                def loss_of(weights: Any) -> Any:
                    outputs, new = self.stateless_call(
                        weights, others, x, training=True
                    )
                    return self.compute_loss(x, y, outputs), new

                graded = jax.value_and_grad(loss_of, has_aux=True)
                (loss, others), grads = graded(weights)
                weights, slots = self.optimizer.stateless_apply(slots, grads, weights)
                (metric,) = self.metrics
                metrics = metric.stateless_update_state(metrics, loss, len(x))
                logs = {"loss": metric.stateless_result(metrics)}
                return logs, (weights, others, slots, metrics)

        if variant == "bfloat16":
            keras.config.set_dtype_policy("mixed_bfloat16")
        model = build()
        keras.config.set_dtype_policy("float32")
        if variant == "own_step":
            return OwnStep(model.inputs, model.outputs)
        if variant == "bfloat16":
            return model
        inside = layers.Dropout(0.3) if variant == "dropout" else Scaled()
        outputs = layers.Dense(10)(inside(model.layers[-1].input))
        return keras.Model(model.inputs, outputs)

    return made


PLAIN = {
    "mlp": Workload("MLP 784-128-10", mlp, (784,), 256, 100),
    "cnn": Workload("CNN, 3 × (conv, BatchNorm)", cnn, (32, 32, 3), 128, 12),
    "deep": Workload("161 dense layers of 32", deep, (32,), 256, 20),
    "transformer": Workload(
        "transformer, 2 blocks", transformer, (32,), 64, 20, tokens=200
    ),
    "lstm": Workload("LSTM, 50 time steps", lstm, (50, 16), 64, 40),
}
WORKLOADS = PLAIN | {
    f"{name}_{variant}": dataclasses.replace(
        PLAIN[name],
        title=f"{PLAIN[name].title}, {title}",
        build=varied(PLAIN[name].build, variant),
    )
    for name in ("mlp", "cnn", "transformer")
    for variant, title in VARIANTS.items()
}
WORKLOADS["resnet50_small"] = Workload(
    "ResNet-50, 16 rows of 64 × 64", resnet50, (64, 64, 3), 16, 1
)


def published(name: str, *arguments: Any) -> Callable[[], Any]:
    """What makes a model of `published_models.py`."""

    def made() -> Any:
        import published_models

        return getattr(published_models, name)(*arguments)

    return made


# Large enough for a GPU.
WORKLOADS |= {
    "resnet50": Workload(
        "ResNet-50 in mixed_bfloat16",
        published("resnet50", "mixed_bfloat16"),
        (224, 224, 3),
        128,
        10,
    ),
    "bert": Workload(
        "BERT base in float32", published("bert_base"), (512,), 32, 10, tokens=30522
    ),
}

# A call of `fit` on a GPU costs as much as 20 to 40 steps of a small model: of a round,
# that is not to be the larger part.
WORKLOADS |= {
    f"{name}_long": dataclasses.replace(workload, steps=200)
    for name, workload in PLAIN.items()
}
