"""An encoder and a decoder of LSTMs, taught with teacher forcing, decoded by steps."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import layers

SYMBOLS, STEPS, WIDTH, START = 8, 5, 7, 1


def program() -> Any:
    rng = np.random.default_rng(9)
    source = rng.integers(2, SYMBOLS, (37, STEPS))
    source[np.arange(STEPS) >= rng.integers(2, STEPS + 1, (37, 1))] = 0
    wanted = source[:, ::-1]
    shifted = np.concatenate([np.full((37, 1), START), wanted[:, :-1]], axis=1)
    one_hot = np.eye(SYMBOLS, dtype="float32")

    encoder_inputs = keras.Input((None, SYMBOLS))
    _, *states = layers.LSTM(WIDTH, return_state=True)(layers.Masking()(encoder_inputs))
    decoder_inputs = keras.Input((None, SYMBOLS))
    decoder_lstm = layers.LSTM(WIDTH, return_sequences=True, return_state=True)
    decoded, *_ = decoder_lstm(decoder_inputs, initial_state=states)
    decoder_dense = layers.Dense(SYMBOLS, activation="softmax")
    model = keras.Model([encoder_inputs, decoder_inputs], decoder_dense(decoded))
    model.compile(
        keras.optimizers.RMSprop(0.01, epsilon=1e-3),
        "categorical_crossentropy",
        metrics=["accuracy"],
    )
    inputs = [one_hot[source], one_hot[shifted]]
    history = model.fit(inputs, one_hot[wanted], batch_size=14, epochs=2, verbose=0)

    # The trained layers again, in two models that decode one symbol at a time.
    encoder = keras.Model(encoder_inputs, states)
    state_inputs = [keras.Input((WIDTH,)), keras.Input((WIDTH,))]
    outputs, *new_states = decoder_lstm(decoder_inputs, initial_state=state_inputs)
    decoder = keras.Model(
        [decoder_inputs, *state_inputs], [decoder_dense(outputs), *new_states]
    )
    texts = []
    for row in source[:2]:
        state = encoder.predict(one_hot[row][None], verbose=0)
        symbol, text = START, []
        for _ in range(STEPS):
            scores, *state = decoder.predict([one_hot[[[symbol]]], *state], verbose=0)
            symbol = int(np.argmax(scores[0, -1]))
            text.append(symbol)
        texts.append(text)
    return {
        "history": history,
        "evaluation": model.evaluate(inputs, one_hot[wanted], batch_size=37, verbose=0),
        "texts": np.array(texts),
        "model": model,
    }
