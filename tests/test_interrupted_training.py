"""What goes wrong in the middle of `fit`, `evaluate` or `predict` loses nothing, and
says what it was.
"""

import keras
import numpy as np
import pytest

from keras_distribute import errors
from tests.support import mirrored

RNG = np.random.RandomState(0)
X, Y = RNG.randn(40, 3).astype("float32"), RNG.randn(40, 1).astype("float32")


@pytest.fixture
def model():
    with mirrored(4).scope():
        keras.utils.set_random_seed(0)
        model = keras.Sequential(
            [
                keras.Input((3,)),
                keras.layers.Dense(4),
                keras.layers.BatchNormalization(),
                keras.layers.Dense(1),
            ]
        )
        model.compile("adam", "mse", metrics=["mae"])
    return model


def batches(count, fail):
    for _ in range(count):
        yield X[:8], Y[:8]
    if fail:
        raise LookupError("the pipeline broke")


class Raise(keras.callbacks.Callback):
    def __init__(self, method, at=0):
        super().__init__()
        setattr(self, method, self.fail)
        self.left = at

    def fail(self, *args, **kwargs):
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt


def values(model):
    return [v.numpy() for v in (*model.variables, *model.optimizer.variables)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "method",
    ["on_train_batch_begin", "on_train_batch_end", "on_epoch_begin", "on_epoch_end"],
)
@pytest.mark.parametrize("at", [0, 1])
def test_a_callback_raises(model, method, at):
    with pytest.raises(KeyboardInterrupt):
        model.fit(
            X, Y, batch_size=8, epochs=3, verbose=0, callbacks=[Raise(method, at)]
        )
    assert all(np.isfinite(v).all() for v in values(model))
    before = int(model.optimizer.iterations)
    model.fit(X, Y, batch_size=8, verbose=0)
    assert int(model.optimizer.iterations) == before + 5


@pytest.mark.parametrize("count", [1, 3])
def test_the_input_raises(model, count):
    with pytest.raises(LookupError, match="the pipeline broke"):
        model.fit(batches(count, fail=True), epochs=1, verbose=0)
    assert all(np.isfinite(v).all() for v in values(model))
    before = values(model)
    for call in (model.evaluate, model.predict):
        with pytest.raises(LookupError, match="the pipeline broke"):
            call(batches(count, fail=True), verbose=0)
        for a, b in zip(values(model)[:6], before[:6], strict=True):
            np.testing.assert_array_equal(a, b)
    with pytest.raises(KeyboardInterrupt):
        model.predict(X, verbose=0, callbacks=[Raise("on_predict_batch_begin")])
    assert model.predict(X, verbose=0).shape == (40, 1)


def test_wrong_shapes(model):
    before = values(model)
    for call in (
        lambda: model.fit(X[:, :2], Y, verbose=0),
        lambda: model.predict(X[:, :2], verbose=0),
    ):
        with pytest.raises(ValueError, match="shape"):
            call()
    for a, b in zip(values(model), before, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("data", ["arrays", "generator"])
def test_no_data(model, data):
    x, y = (X[:0], Y[:0]) if data == "arrays" else (batches(0, fail=False), None)
    wanted = (
        errors.ValueStructureError,
        "(?s)the data has no batch.*Fix: pass at least one row",
    )
    if data == "generator":  # Keras looks at the first batch itself.
        wanted = (ValueError, "must yield at least one batch")
    for call in (
        lambda: model.fit(x, y, verbose=0),
        lambda: model.evaluate(x, y, verbose=0),
        lambda: model.predict(x, verbose=0),
    ):
        with pytest.raises(wanted[0], match=wanted[1]):
            call()
    model.fit(X, Y, verbose=0)


def test_a_generator_that_runs_dry_in_a_later_epoch_ends_training_as_in_keras(model):
    plain = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    plain.compile("adam", "mse")
    for trained in (plain, model):
        trained.fit(batches(3, fail=False), epochs=2, verbose=0)
    assert int(model.optimizer.iterations) == int(plain.optimizer.iterations)
