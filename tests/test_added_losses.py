"""Losses that layers add: all of them count, in every trace, in `fit` and in loops of
one's own.
"""

import jax.numpy as jnp
import keras
import numpy as np
import pytest
import scipy.sparse
from keras import ops

import keras_distribute as kd
from tests.exactness import harness
from tests.support import distributed


class Switched(keras.layers.Layer):
    """Adds one and the same loss, if switched on."""

    loss = jnp.ones(())
    on = False

    def call(self, inputs):
        if self.on:
            self.add_loss(self.loss)
        return inputs


class MeanSquare(keras.layers.Layer):
    """Adds the mean square of what passes."""

    def call(self, inputs):
        self.add_loss(ops.mean(ops.square(inputs)))
        return inputs


def test_an_old_loss_does_not_take_a_new_one_away():
    # A loss that comes again stands for a new one that got the `id` of one which is
    # gone.
    early, late = Switched(), Switched()
    model = keras.Sequential([keras.Input((2,)), early, late])

    def losses():
        return model.stateless_call(
            [], [], np.ones((1, 2), "float32"), return_losses=True
        )[2]

    late.on = True
    assert losses() == [Switched.loss]
    early.on, late.on = True, False
    assert losses() == [Switched.loss]
    late.on = True
    assert len(losses()) == 2 * 2  # Either layer finds the common object twice.


def test_nothing_is_noted_beyond_its_scope():
    model = keras.Sequential(
        [
            keras.Input((2,)),
            MeanSquare(),
            keras.layers.Dense(1, activity_regularizer="l2"),
        ]
    )
    with keras.StatelessScope(collect_losses=True):
        model(np.ones((1, 2), "float32"))
        assert len(model.losses) == 2
    assert [layer._loss_ids for layer in model.layers] == [set(), set()]


def build():
    return keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(
                5, activation="tanh", kernel_regularizer="l2", activity_regularizer="l2"
            ),
            MeanSquare(),
            keras.layers.Dense(3),
        ]
    )


def train(strategy, x, y, steps=3):
    """A loop as on tensorflow.org: the loss of the rows and `model.losses`, the latter
    for all replicas together.
    """
    keras.utils.set_random_seed(4)
    with strategy.scope():
        model, optimizer = build(), keras.optimizers.SGD(0.1)
        optimizer.build(model.trainable_variables)
    counts = []

    def step(x, y):
        def loss_of():
            per_row = keras.losses.sparse_categorical_crossentropy(
                y, model(x, training=True), from_logits=True
            )
            counts.append(len(model.losses))
            return kd.nn.compute_average_loss(
                per_row
            ) + kd.nn.scale_regularization_loss(sum(model.losses))

        loss, gradients = kd.value_and_grad(loss_of, model.trainable_variables)()
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    def parts(data):
        split = np.split(data, strategy.num_replicas_in_sync)
        return distributed(strategy, split)

    batch = (parts(x), parts(y))
    losses = [
        float(strategy.reduce("SUM", strategy.run(step, args=batch), axis=None))
        for _ in range(steps)
    ]
    assert set(counts) == {3}
    return losses, [np.asarray(variable) for variable in model.variables]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("replicas", [1, 2, 4, 8])
def test_losses_of_a_loop_equal_one_device(replicas):
    x, y = harness.table(16)
    keras.utils.set_random_seed(4)
    model, optimizer = build(), keras.optimizers.SGD(0.1)
    expected = []
    for _ in range(3):

        def loss_of():
            per_row = keras.losses.sparse_categorical_crossentropy(
                y, model(x, training=True), from_logits=True
            )
            return ops.mean(per_row) + sum(model.losses)

        loss, gradients = kd.value_and_grad(loss_of, model.trainable_variables)()
        optimizer.apply(gradients, model.trainable_variables)
        expected.append(float(loss))
    losses, weights = train(harness.mirrored(replicas), x, y)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    for ours, theirs in zip(weights, model.variables, strict=True):
        np.testing.assert_allclose(ours, np.asarray(theirs), rtol=1e-5, atol=1e-6)


def test_losses_in_run_without_gradients():
    strategy = harness.mirrored(2)
    with strategy.scope():
        model = build()
    x, _ = harness.table(8)
    model(x[:4])
    expected = float(sum(model.losses))
    results = strategy.run(lambda x: (model(x), sum(model.losses))[1], args=(x[:4],))
    np.testing.assert_allclose(
        strategy.experimental_local_results(results), [expected] * 2, rtol=1e-6
    )


@pytest.mark.parametrize("replicas", [2, 4, 8])
def test_of_sparse_rows_and_nothing_else(replicas):
    def fitted(devices):
        keras.utils.set_random_seed(0)
        with kd.MirroredStrategy([f"cpu:{i}" for i in range(devices)]).scope():
            model = keras.Sequential(
                [keras.Input((12,), sparse=True), keras.layers.Dense(3), MeanSquare()]
            )
            model.compile("sgd")
        x = scipy.sparse.random(20, 12, 0.4, "csr", "float32", random_state=0)
        history = model.fit(x, batch_size=8, epochs=2, verbose=0).history
        return history["loss"], model.get_weights()[0]

    for ours, plain in zip(fitted(replicas), fitted(1), strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-6, atol=1e-7)
