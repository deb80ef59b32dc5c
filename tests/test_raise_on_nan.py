"""`kd.callbacks.RaiseOnNaN` in one process: what it names, and what it leaves alone."""

import jax
import keras
import numpy as np
import pytest

import keras_distribute as kd
from keras_distribute.training import calls
from tests.support import mirrored


def model_of(strategy, loss="mse"):
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1), loss)
    return model


def fit(x, y, **options):
    model = model_of(mirrored(2), **options)
    guard = kd.callbacks.RaiseOnNaN()
    return model.fit(
        x, y, batch_size=4, epochs=2, shuffle=False, verbose=0, callbacks=[guard]
    )


def test_finite_losses_are_left_alone():
    assert len(fit(np.ones((10, 3)), np.ones((10, 1))).history["loss"]) == 2


@pytest.mark.parametrize(
    ("row", "where"),
    [(0, "y of replica 0 (process 0)"), (6, "y of replica 1 (process 0)")],
)
def test_the_array_and_the_replica_are_named(row, where):
    y = np.ones((8, 1))
    y[row] = np.inf
    with pytest.raises(
        kd.errors.NonFiniteError, match=f"since step {1 + row // 4} of epoch 1"
    ) as caught:
        fit(np.ones((8, 3)), y)
    assert f"values that are not finite in {where}." in str(caught.value)


def test_a_loss_that_diverges_is_told_apart():
    with pytest.raises(
        FloatingPointError,
        match="a batch whose values are all finite, in every one of 1 process",
    ) as e:
        fit(np.ones((8, 3)), np.ones((8, 1)), loss=lambda y, p: 0.0 * p / 0.0)
    assert "a smaller learning rate" in str(e.value)


class Calls(keras.callbacks.Callback):
    def __init__(self, function):
        super().__init__()
        self.on_train_batch_end = lambda batch, logs=None: function(self.model)


def test_a_fit_that_another_exception_ends_keeps_no_batch():
    def interrupt(model):
        raise KeyboardInterrupt

    model, guard = model_of(mirrored(2)), kd.callbacks.RaiseOnNaN()
    x, y = np.ones((8, 3)), np.ones((8, 1))
    with pytest.raises(KeyboardInterrupt):
        model.fit(x, y, verbose=0, callbacks=[guard, Calls(interrupt)])
    assert calls.stack.batches is None


def test_what_a_callback_has_called_is_not_taken_for_the_batch():
    def call(model):
        model.predict(np.ones((4, 3)), verbose=0)
        other.fit(np.ones((4, 3)), np.ones((4, 1)), verbose=0, callbacks=[guards[1]])

    guards = [kd.callbacks.RaiseOnNaN() for _ in range(2)]
    model, other = model_of(mirrored(2)), model_of(mirrored(2))
    with pytest.raises(kd.errors.NonFiniteError, match="not finite in x of replica 0"):
        model.fit(
            np.full((4, 3), np.nan),
            np.ones((4, 1)),
            verbose=0,
            callbacks=[Calls(call), guards[0]],
        )


def test_without_a_strategy_the_step_is_named():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(
        kd.errors.NonFiniteError,
        match="(?s)since step 1 of epoch 1.*a batch that was not looked at",
    ):
        model.fit(
            np.full((8, 3), np.nan),
            np.ones((8, 1)),
            verbose=0,
            callbacks=[kd.callbacks.RaiseOnNaN()],
        )


@pytest.mark.parametrize("steps_per_execution", [1, 2])
def test_rows_that_fill_up_a_batch_name_no_replica(steps_per_execution):
    """Of 5 rows on 4 replicas the third has the last one, and the fourth has none."""
    x = np.ones((10, 3))
    x[9] = np.nan
    with mirrored(4).scope():
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("sgd", "mse", steps_per_execution=steps_per_execution)
    guard = kd.callbacks.RaiseOnNaN()
    with pytest.raises(kd.errors.NonFiniteError) as caught:
        model.fit(
            x, np.ones(10), batch_size=5, shuffle=False, verbose=0, callbacks=[guard]
        )
    assert "not finite in x of replica 2 (process 0).\n" in str(caught.value)


def test_what_jax_looks_for_is_found_in_every_call_of_a_step():
    x, y = np.ones((4, 3)), np.ones((4, 1))
    model = model_of(mirrored(2))
    with jax.debug_nans(True):
        model.train_on_batch(x, y)
        model.train_on_batch(x, y)
        before = model.get_weights()
        for _ in range(2):
            with pytest.raises(FloatingPointError, match="jax_debug_nans"):
                model.train_on_batch(x * np.nan, y)
        # As without a strategy, the model is what it was.
        np.testing.assert_equal(model.get_weights(), before)
        model.train_on_batch(x, y)
    assert np.isnan(model.test_on_batch(x * np.nan, y))
    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        model.test_on_batch(x * np.nan, y)
    model.test_on_batch(x, y)


@pytest.mark.parametrize("look", [jax.debug_nans, jax.debug_infs])
def test_what_jax_looks_for_is_found_in_run(look):
    strategy = mirrored(2)
    value = np.float32({jax.debug_nans: -1, jax.debug_infs: 0}[look])
    with look(True):
        with pytest.raises(FloatingPointError):
            strategy.run(keras.ops.log, (value,))
        strategy.run(keras.ops.log, (np.float32(1),))
        with pytest.raises(FloatingPointError):
            strategy.run(keras.ops.log, (value,))


class Sum(keras.layers.Layer):
    """Many small weights, which an optimizer gets as one, of an odd number."""

    def build(self, input_shape):
        self.parts = [self.add_weight(shape=(), initializer="ones") for _ in range(65)]

    def call(self, inputs):
        return inputs * sum(self.parts)


@pytest.mark.parametrize("shard", [False, True])
def test_what_a_long_weight_is_filled_up_with_stays_a_number(shard):
    """Ftrl divides by a sum of squares of gradients, which there are none of."""
    with mirrored(2, shard_optimizer_state=shard).scope():
        model = keras.Sequential([keras.Input((1,)), Sum()])
        model.compile(keras.optimizers.Ftrl(0.01), "mse")
    x = np.ones((4, 1))
    with jax.debug_nans(True):
        for _ in range(3):
            model.train_on_batch(x, x)
