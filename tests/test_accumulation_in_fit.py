"""Gradient accumulation in `fit`: one device's numbers, and gradients that travel only
when the optimizer updates.
"""

import contextlib
import re

import jax
import keras
import numpy as np
import pytest

import keras_distribute as kd
from keras_distribute import context
from keras_distribute.training import adoption, batches
from keras_distribute.training.steps import choose
from tests.support import mirrored

pytestmark = pytest.mark.sampled(5)

RNG = np.random.RandomState(0)
TOKENS = RNG.randint(0, 10, (70, 6))
TARGETS = RNG.randn(70, 6, 1).astype("float32")
WEIGHTS = RNG.rand(70, 6).astype("float32")


class Scaled(keras.layers.Layer):
    """Mixes rows: each is divided by the mean of all."""

    def call(self, x):
        return x / (1 + keras.ops.mean(keras.ops.abs(x), axis=0, keepdims=True))


def make_model(kind):
    keras.utils.set_random_seed(0)
    layers = [
        keras.Input((6,)),
        keras.layers.Embedding(10, 8, mask_zero=True),
        keras.layers.LSTM(8, return_sequences=True, kernel_regularizer="l2"),
        keras.layers.BatchNormalization(synchronized=True),
        keras.layers.Dense(
            1, activity_regularizer="l2" if kind == "activity regularizer" else None
        ),
    ]
    if kind == "own layer":
        layers.insert(3, Scaled())
    if kind == "dropout":
        layers.insert(3, keras.layers.Dropout(0.4))
    model = keras.Sequential(layers)
    optimizer = keras.optimizers.Adam(
        0.01, epsilon=1e-3, gradient_accumulation_steps=3, global_clipnorm=0.1
    )
    if kind == "loss scaling":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=4.0)
    model.compile(
        optimizer,
        "mse",
        metrics=["mae"],
        weighted_metrics=["mse"],
        auto_scale_loss=False,
    )
    return model


def train(model, **kwargs):
    history = model.fit(
        TOKENS,
        TARGETS,
        sample_weight=WEIGHTS,
        batch_size=32,
        epochs=3,
        shuffle=False,
        verbose=0,
        **kwargs,
    ).history
    state = [np.asarray(v) for v in (*model.variables, *model.optimizer.variables)]
    return (
        history,
        model.evaluate(TOKENS, TARGETS, verbose=0),
        model.predict(TOKENS, verbose=0),
        state,
    )


@pytest.fixture(scope="module")
def one_device():
    results = {}

    def get(kind):
        if kind not in results:
            results[kind] = train(make_model(kind))
        return results[kind]

    return get


@pytest.mark.parametrize(
    ("kind", "n"),
    [("row-wise", n) for n in (1, 2, 3, 8)]
    + [
        (kind, n)
        for kind in ("activity regularizer", "own layer", "loss scaling", "dropout")
        for n in (2, 3)
    ],
)
def test_the_numbers_of_one_device(one_device, kind, n):
    with mirrored(n).scope():
        model = make_model(kind)
    ours, theirs = train(model), one_device(kind)
    for name, values in theirs[0].items():
        np.testing.assert_allclose(ours[0][name], values, rtol=1e-5)
    np.testing.assert_allclose(ours[1], theirs[1], rtol=1e-5)
    np.testing.assert_allclose(ours[2], theirs[2], rtol=1e-5, atol=1e-6)
    for a, b in zip(ours[3], theirs[3], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def compiled_step(model, rows):
    """The text of the training step that XLA compiled for a batch of `rows`."""
    strategy = model.layers[0].weights[0].distribute_strategy
    with context.entered(adoption.frame_for(strategy)):
        model.train_function = None
        model.train_on_batch(TOKENS[:rows], TARGETS[:rows])
        placed = batches.place(
            (TOKENS[:rows], TARGETS[:rows], None), strategy.replica_mesh
        )
        return (
            choose.compile_step(model, "train").executable(placed).compile().as_text()
        )


def test_gradients_travel_only_when_the_optimizer_updates():
    with mirrored(2).scope():
        model, *others = map(make_model, ("row-wise", "own layer", "dropout"))
    largest = max(v.value.size for v in model.trainable_variables)
    text = compiled_step(model, 32)
    entry = text[text.index("\nENTRY") :]
    in_entry = [line for line in entry.splitlines() if " all-reduce" in line]
    assert all(size < 16 for line in in_entry for size in _elements(line)), (
        "only statistics, losses and metrics"
    )
    elsewhere = [
        line
        for line in text[: text.index("\nENTRY")].splitlines()
        if " all-reduce(" in line
    ]
    assert largest in [size for line in elsewhere for size in _elements(line)]
    for other in others:
        text = compiled_step(other, 32)
        lines = text[text.index("\nENTRY") :].splitlines()
        in_entry = [line for line in lines if " all-reduce" in line]
        sizes = [size for line in in_entry for size in _elements(line)]
        assert max(sizes) <= 6 * 8  # The mean of the own layer's rows.


def test_another_optimizer_in_a_step_of_the_users_own():
    """It makes its step at once, beside the model's, which accumulates."""

    class Own(keras.Sequential):
        def train_step(self, state, data):
            weights, others, slots, metrics = state
            x, y = data[:2]

            def loss_of(weights):
                outputs, new = self.stateless_call(weights, others, x, training=True)
                return self.compute_loss(x, y, outputs), new

            graded = jax.value_and_grad(loss_of, has_aux=True)
            (loss, others), grads = graded(weights)
            last, slots = self.optimizer.stateless_apply(slots, grads, weights)
            values = [variable.value for variable in self.second.variables]
            weights, _ = self.second.stateless_apply(values, grads, last)
            return {"loss": loss}, (weights, others, slots, metrics)

    def trained(scope):
        keras.utils.set_random_seed(0)
        with scope:
            model = Own([keras.Input((6,)), keras.layers.Dense(1)])
            optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
            model.compile(optimizer, "mse")
            model.second = keras.optimizers.SGD(0.1)
            model.second.build(model.trainable_variables)
        x = WEIGHTS[:32]
        model.fit(x, x[:, :1], batch_size=8, shuffle=False, verbose=0)
        return model.get_weights()

    expected = trained(contextlib.nullcontext())
    for ours, theirs in zip(trained(mirrored(2).scope()), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def _elements(line):
    result = line.split(" all-reduce")[0]
    return [
        int(np.prod([int(d) for d in s.split(",") if d]))
        for s in re.findall(r"f32\[([\d,]*)\]", result)
    ]


def test_accumulators_are_each_replicas_own_and_survive_the_epoch():
    with mirrored(2).scope():
        model = make_model("row-wise")
    # 4 steps: 3 and 1.
    model.fit(
        TOKENS[:64], TARGETS[:64], batch_size=16, epochs=1, verbose=0, shuffle=False
    )
    accumulator = next(
        v
        for v in model.optimizer.variables
        if v.path.endswith("lstm_cell_kernel_gradient_accumulator")
    )
    first, second = (np.asarray(c) for c in accumulator.values)
    assert np.abs(first).max() > 0
    assert np.abs(second).max() > 0
    assert np.abs(first - second).max() > 0


def test_callbacks_see_and_change_accumulating_state(one_device):
    seen = []

    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.jax_state_sync()
            seen.append(int(self.model.optimizer.iterations))

    with mirrored(4).scope():
        model = make_model("row-wise")
    ours, theirs = train(model, callbacks=[Look()]), one_device("row-wise")
    assert seen == [0, 0, 1, 1, 1, 2, 2, 2, 3]
    np.testing.assert_allclose(ours[0]["loss"], theirs[0]["loss"], rtol=1e-5)
    for a, b in zip(ours[3], theirs[3], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("n", [1, 2])
def test_a_loop_that_keeps_the_state_by_itself(n):
    def trained():
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2)])
        optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
        model.compile(optimizer, "mse")
        optimizer.build(model.trainable_variables)
        model.make_train_function()
        groups = (
            model.trainable_variables,
            model.non_trainable_variables,
            optimizer.variables,
            model.metrics_variables,
        )
        state = [[np.array(v) for v in group] for group in groups]
        for _ in range(3):
            batch = TOKENS[:8].astype("float32"), TARGETS[:8, :2, 0]
            _, state = model.train_function(state, iter([batch]))
        return [np.asarray(array) for array in jax.tree.leaves(state)]

    with mirrored(n).scope():
        ours = trained()
    for a, b in zip(ours, trained(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_training_goes_on_in_a_custom_loop():
    """Accumulators filled by `fit` are the ones that `run` goes on with."""
    x, y = RNG.randn(24, 3).astype("float32"), RNG.randn(24, 1).astype("float32")

    def make():
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1, gradient_accumulation_steps=3), "mse")
        return model

    plain = make()
    plain.fit(x, y, batch_size=8, verbose=0, shuffle=False)
    strategy = mirrored(2)
    with strategy.scope():
        model = make()
        loss = keras.losses.MeanSquaredError()
    model.fit(x[:16], y[:16], batch_size=8, verbose=0, shuffle=False)

    def step(x, y):
        _, grads = kd.value_and_grad(
            lambda: loss(y, model(x)), model.trainable_variables
        )()
        model.optimizer.apply(grads, model.trainable_variables)

    halves = [
        strategy.experimental_distribute_values_from_function(
            lambda c, a=a: a[16 + 4 * c.replica_id_in_sync_group :][:4]
        )
        for a in (x, y)
    ]
    strategy.run(step, args=tuple(halves))
    for a, b in zip(model.weights, plain.weights, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-5, atol=1e-6)
