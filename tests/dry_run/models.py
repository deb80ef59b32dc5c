"""Small compiled models, by name; each is made in whatever scope is open."""

import keras
from keras import layers

import keras_distribute as kd


def _compiled(model, **options):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(
        options.pop("optimizer", "adam"), loss, metrics=["accuracy"], **options
    )
    return model


def _mlp_layers():
    return [
        keras.Input((16,)),
        layers.Dense(32, "relu", name="hidden"),
        layers.Dense(5, name="logits"),
    ]


def mlp():
    return _compiled(keras.Sequential(_mlp_layers()))


def several_steps():
    return _compiled(keras.Sequential(_mlp_layers()), steps_per_execution=4)


def accumulating():
    optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
    return _compiled(keras.Sequential(_mlp_layers()), optimizer=optimizer)


def cnn():
    parts = [
        layers.Conv2D(8, 3, name="conv"),
        layers.BatchNormalization(name="norm"),
        layers.ReLU(),
    ]
    return _compiled(
        keras.Sequential(
            [
                keras.Input((12, 12, 3)),
                *parts,
                layers.GlobalAveragePooling2D(),
                layers.Dense(5),
            ]
        )
    )


def deep():
    """Enough small weights to travel in a few buffers, and to be one to the optimizer."""
    return _compiled(
        keras.Sequential(
            [
                keras.Input((8,)),
                *[layers.Dense(8, "tanh") for _ in range(33)],
                layers.Dense(5),
            ]
        )
    )


def lstm():
    return _compiled(
        keras.Sequential(
            [keras.Input((20, 8)), layers.LSTM(16, name="lstm"), layers.Dense(5)]
        )
    )


def transformer():
    tokens = keras.Input((16,), dtype="int32")
    x = layers.Embedding(50, 32, name="embedding")(tokens)
    x = layers.Add()([x, layers.MultiHeadAttention(2, 16, name="attention")(x, x)])
    x = layers.Dense(32, "gelu", name="mlp")(layers.LayerNormalization()(x))
    return _compiled(
        keras.Model(tokens, layers.Dense(5)(layers.GlobalAveragePooling1D()(x)))
    )


def resnet50():
    model = keras.applications.ResNet50(weights=None)
    model.compile(
        keras.optimizers.SGD(0.1, momentum=0.9), "sparse_categorical_crossentropy"
    )
    return model


SHAPES = {"cnn": (12, 12, 3), "deep": (8,), "lstm": (20, 8), "transformer": (16,)}
EVERY = ("mlp", "cnn", "transformer", "lstm")


def decoder_of_a_billion():
    """1.04 billion weights, divided, that travel in half precision."""
    policy = keras.mixed_precision.dtype_policy()
    keras.mixed_precision.set_dtype_policy("mixed_bfloat16")
    options = {"shard_variables": True, "communication_dtype": "bfloat16"}
    try:
        with kd.MirroredStrategy(["cpu:0"], **options).scope():
            ids = keras.Input((512,), dtype="int32")
            hidden = layers.Embedding(32_000, 2048)(ids)
            for _ in range(18):
                normed = layers.LayerNormalization()(hidden)
                attend = layers.MultiHeadAttention(16, 128)
                hidden += attend(normed, normed, use_causal_mask=True)
                wide = layers.Dense(8192, "gelu")(layers.LayerNormalization()(hidden))
                hidden += layers.Dense(2048)(wide)
            logits = layers.Dense(32_000)(layers.LayerNormalization()(hidden))
            return _compiled(keras.Model(ids, logits))
    finally:
        keras.mixed_precision.set_dtype_policy(policy)
