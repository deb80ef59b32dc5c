"""What steps do to the state of layers: with one worker what one device does, with
several whatever can be put together is.
"""

from typing import Any

import jax
import keras
import numpy as np
import pytest
from keras import layers, ops

import keras_distribute as kd
from keras_distribute.coordinator import ClusterCoordinator
from tests.exactness.harness import fit_only, table
from tests.parameter_server.test_fit import equals_one_device

X, Y = table(22)


class Bounds(layers.Layer):
    """Keeps the smallest and the largest of what it has seen."""

    def build(self, input_shape: Any) -> None:
        def kept(value: float) -> Any:
            initializer = keras.initializers.Constant(value)
            return self.add_weight(shape=(), initializer=initializer, trainable=False)

        self.least, self.most = kept(1e30), kept(-np.inf)

    def call(self, inputs: Any, training: bool = False) -> Any:
        if training:
            self.least.assign(ops.minimum(self.least.value, ops.min(inputs)))
            self.most.assign(ops.maximum(self.most.value, ops.max(inputs)))
        return inputs


def bounded() -> keras.Model:
    model = keras.Sequential([keras.Input((6,)), Bounds(), layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss)
    return model


@pytest.mark.parametrize("local_steps", [1, 2])
def test_bounds_that_begin_far_away(make, local_steps):
    options: dict[str, Any] = {}
    if local_steps > 1:
        outer = keras.optimizers.SGD(1.0)
        options = {"local_steps": local_steps, "outer_optimizer": outer}
    equals_one_device(make(1, **options), bounded, fit_only(X, Y, batch_size=6))


def test_several_workers_raise_a_bound_once(strategy):
    with strategy.scope():
        model = bounded()
    model.fit(np.full((40, 6), 5.0), np.zeros(40, "int32"), batch_size=2, verbose=0)
    assert [float(v.numpy()) for v in model.non_trainable_variables] == [5.0, 5.0]


def test_elements_that_several_workers_replace_and_add_to(strategy):
    coordinator = ClusterCoordinator(strategy)
    with strategy.scope():
        replaced = keras.Variable(np.zeros(5, "float32"))
        counts = keras.Variable(np.zeros(5, "int32"), dtype="int32")

    def function(i: Any) -> None:
        replaced.assign(replaced.value.at[i].set(2.0 * i))
        counts.assign(counts.value.at[i].add(1))

    for i in range(5):
        coordinator.schedule(function, (np.int32(i),))
    coordinator.join()
    assert counts.numpy().tolist() == [1] * 5
    assert replaced.numpy().tolist() == [0.0, 2.0, 4.0, 6.0, 8.0]


class Target(keras.Model):
    """A network, and another that follows its new weights."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.target = layers.Dense(1), layers.Dense(1, trainable=False)

    def build(self, input_shape: Any) -> None:
        self.net.build(input_shape)
        self.target.build(input_shape)

    def call(self, x: Any) -> Any:
        return self.net(x)

    def train_step(self, state: Any, data: Any) -> Any:
        weights, others, slots, metrics = state
        x, y = data

        def loss_of(weights: Any) -> Any:
            return ops.mean((self.stateless_call(weights, others, x)[0] - y) ** 2)

        loss, grads = jax.value_and_grad(loss_of)(weights)
        weights, slots = self.optimizer.stateless_apply(slots, grads, weights)
        logs, others = self.followed(loss, weights, others, slots)
        return logs, (weights, others, slots, metrics)

    def followed(self, loss: Any, weights: Any, others: Any, slots: Any) -> Any:
        mixed = [0.9 * a + 0.1 * b for a, b in zip(others, weights, strict=True)]
        return {"loss": loss}, mixed


class Counting(Target):
    """Its logs say how many steps there were."""

    def followed(self, loss: Any, weights: Any, others: Any, slots: Any) -> Any:
        return {"loss": loss, "steps": slots[0] + 0}, others


class Twice(Target):
    """Takes gradients at its new weights, too."""

    def followed(self, loss: Any, weights: Any, others: Any, slots: Any) -> Any:
        grads = jax.grad(lambda weights: ops.sum(weights[0] ** 2))(weights)
        return {"loss": loss, "norm": ops.sum(grads[0] ** 2)}, others


@pytest.mark.parametrize("kind", [Target, Counting, Twice])
def test_a_step_that_looks_at_what_servers_make_later(make, kind):
    def train(strategy: Any) -> keras.Model:
        with strategy.scope():
            model = kind()
            model.build((None, 6))
            model.compile("sgd")
        model.fit(X, Y[:, None].astype("float32"), batch_size=6, verbose=0)
        return model

    with pytest.raises(kd.errors.ContextError, match=r"in fit, read it in a callback"):
        train(make())
    train(make(local_steps=2))
