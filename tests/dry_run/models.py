"""Small compiled models, by name; each is made in whatever scope is open."""

import keras
from keras import layers


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
