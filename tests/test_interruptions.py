"""Ctrl-C at any place loses nothing: the state is that of a whole step, and goes on.

Each kind of step is interrupted at places drawn at random, half of them in the
package's own code, some of them twice. `INTERRUPTIONS` says how often.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

import keras_distribute as kd
from keras_distribute import context
from keras_distribute.training import calls
from tests.interruptions import Interrupter
from tests.support import pack_from

TRIES = int(os.environ.get("INTERRUPTIONS", "3"))
RNG = np.random.RandomState(0)
X = RNG.randn(42, 6).astype("float32")
Y = RNG.randint(0, 3, 42)
DEVICES = [f"cpu:{i}" for i in range(4)]


class OwnStep(keras.Sequential):
    """The same numbers by a step that the package knows nothing of."""

    def train_step(self, state: Any, data: Any) -> Any:
        return super().train_step(state, data)


def small(*inside: Any, cls: Any = keras.Sequential, **compiled: Any) -> keras.Model:
    options = {"optimizer": keras.optimizers.Adam(0.01), "metrics": ["accuracy"]}
    blocks = [layers.Dense(8, "tanh"), layers.BatchNormalization(), *inside]
    model = cls([keras.Input((6,)), *blocks, layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(**{**options, "loss": loss, **compiled})
    return model


def accumulating() -> keras.Model:
    optimizer = keras.optimizers.Adam(0.01, gradient_accumulation_steps=3)
    return small(optimizer=optimizer)


MODELS: dict[str, Callable[[], keras.Model]] = {
    "local": small,
    "global": lambda: small(layers.Dropout(0.5)),
    "own step": lambda: small(cls=OwnStep),
    "accumulating": accumulating,
    "fused": lambda: small(steps_per_execution=2),
    "eager": lambda: small(run_eagerly=True),
}


def generator() -> Any:
    for i in range(0, 42, 8):
        yield X[i : i + 8], Y[i : i + 8]


class Batches(keras.utils.PyDataset):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        return X[8 * index : 8 * index + 8], Y[8 * index : 8 * index + 8]


def train_on_batches(model: keras.Model) -> None:
    for x, y in generator():
        model.train_on_batch(x, y)


CALLS: dict[str, Callable[[keras.Model], Any]] = {
    "fit": lambda model: model.fit(
        X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0, validation_data=(X, Y)
    ),
    "fit a generator": lambda model: model.fit(generator(), verbose=0),
    "fit a PyDataset": lambda model: model.fit(Batches(), shuffle=False, verbose=0),
    "evaluate": lambda model: model.evaluate(X, Y, batch_size=8, verbose=0),
    "predict": lambda model: model.predict(X, batch_size=8, verbose=0),
    "train_on_batch": train_on_batches,
}
KINDS = [
    *((name, "fit") for name in MODELS),
    *(("local", name) for name in CALLS if name != "fit"),
    ("packed", "fit"),
    ("packed", "train_on_batch"),
    ("packed, global", "fit"),
    ("accumulating", "train_on_batch"),
]


def weights_and_slots(model: keras.Model) -> list[Any]:
    return [*model.variables, *model.optimizer.variables]


def state_of(model: keras.Model) -> list[np.ndarray[Any, Any]]:
    """All that training changes; each variable must be readable."""
    return [np.array(variable) for variable in weights_and_slots(model)]


def fingerprint(state: list[np.ndarray[Any, Any]]) -> bytes:
    return b"".join(array.tobytes() for array in state)


def set_state(model: keras.Model, state: list[np.ndarray[Any, Any]]) -> None:
    for variable, value in zip(weights_and_slots(model), state, strict=True):
        variable.assign(value)


class Note(keras.callbacks.Callback):
    """The state after each step."""

    def __init__(self, states: dict[bytes, int]) -> None:
        super().__init__()
        self.states = states

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.states.setdefault(fingerprint(state_of(self.model)), len(self.states))


def noting(model: keras.Model, call: str, states: dict[bytes, int]) -> None:
    """Makes the call, and notes all states of whole steps."""
    states[fingerprint(state_of(model))] = 0
    if call == "train_on_batch":
        for x, y in generator():
            model.train_on_batch(x, y)
            states.setdefault(fingerprint(state_of(model)), len(states))
        return
    fit = model.fit

    def with_note(*args: Any, **kwargs: Any) -> Any:
        return fit(*args, callbacks=[Note(states)], **kwargs)

    model.fit = with_note
    try:
        CALLS[call](model)
    finally:
        del model.fit


@pytest.fixture
def made(request: Any, monkeypatch: Any) -> tuple[keras.Model, str]:
    kind, call = request.param
    if kind.startswith("packed"):
        pack_from(monkeypatch, 4)
        kind = "global" if "global" in kind else "local"
    with kd.MirroredStrategy(DEVICES).scope():
        keras.utils.set_random_seed(0)
        return MODELS[kind](), call


@pytest.mark.sampled(8)
@pytest.mark.parametrize("made", KINDS, indirect=True, ids=" | ".join)
@pytest.mark.timeout(1800)
def test_an_interruption_leaves_the_state_of_a_whole_step(made: Any) -> None:
    model, call = made
    CALLS[call](model)  # It compiles, and is interrupted there by the test below.
    model.fit(X[:8], Y[:8], batch_size=8, verbose=0)
    begin = state_of(model)
    states: dict[bytes, int] = {}
    set_state(model, begin)
    noting(model, call, states)
    end = state_of(model)
    counts = {}
    for inside in ("", "keras_distribute"):
        set_state(model, begin)
        counter = Interrupter(None, inside=inside)
        counter(lambda: CALLS[call](model))
        counts[inside] = counter.count
    frames = context.frames()
    for attempt in range(TRIES):
        draw = random.Random(f"{call} {attempt}")
        inside = draw.choice(list(counts))
        second = draw.choice([None, draw.randrange(40)])
        set_state(model, begin)
        interrupter = Interrupter(draw.randrange(counts[inside]), second, inside)
        interrupted = interrupter(lambda: CALLS[call](model))
        told = f"{attempt}: {interrupter.where}"
        assert context.frames() == frames, told
        assert calls.stack.calls == [], told
        state = state_of(model)
        assert fingerprint(state) in states, told
        if not interrupted:
            continue  # Keras, or Python's finalizers, swallowed it.
        set_state(model, begin)
        CALLS[call](model)
        np.testing.assert_equal(state_of(model), end, err_msg=told)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("attempt", range(max(2, TRIES // 3)))
def test_an_interruption_while_a_step_is_compiled(attempt: int) -> None:
    def made() -> keras.Model:
        with kd.MirroredStrategy(DEVICES[:2]).scope():
            keras.utils.set_random_seed(0)
            return small()

    expected = made()
    expected.fit(X, Y, batch_size=8, shuffle=False, verbose=0)
    draw = random.Random(f"compiling {attempt}")
    counter = Interrupter(None)
    model = made()
    counter(lambda: model.fit(X, Y, batch_size=8, shuffle=False, verbose=0))
    model = made()
    begin = state_of(model)[: len(model.variables)]
    first = draw.randrange(counter.count)
    interrupter = Interrupter(first, draw.choice([None, draw.randrange(40)]))
    interrupter(lambda: model.fit(X, Y, batch_size=8, shuffle=False, verbose=0))
    done = int(model.optimizer.iterations)
    if done == 0:
        for a, b in zip(state_of(model), begin, strict=False):
            np.testing.assert_array_equal(a, b, err_msg=interrupter.where)
        model.fit(X, Y, batch_size=8, shuffle=False, verbose=0)
        for a, b in zip(state_of(model), state_of(expected), strict=True):
            np.testing.assert_array_equal(a, b, err_msg=interrupter.where)
    assert keras.ops.convert_to_numpy(keras.ops.add(1, 1)) == 2, interrupter.where
