"""Weights in parts on several servers: what looks at a whole weight still sees it."""

from typing import Any

import keras
import numpy as np
import pytest
from keras import constraints, layers, ops

import keras_distribute as kd
from tests.exactness.harness import fit_only, table
from tests.parameter_server.test_fit import equals_one_device

X, Y = table(22)
PARTS = kd.experimental.partitioners.FixedShardsPartitioner


class ZeroMean(constraints.Constraint):
    """A constraint of the user's own, of a mean over all of a weight."""

    def __call__(self, w: Any) -> Any:
        return w - ops.mean(w)


CONSTRAINTS = {
    "unit_norm": (lambda: constraints.UnitNorm(), 1),
    "of_all": (lambda: constraints.MaxNorm(0.5, axis=[-1, -2]), 1),
    "own": (ZeroMean, 1),
    "of_rows": (lambda: constraints.MaxNorm(0.5, axis=1), 2),
    "non_neg": (lambda: constraints.NonNeg(), 2),
}


def model_of(optimizer: Any, **options: Any) -> keras.Model:
    model = keras.Sequential([keras.Input((6,)), layers.Dense(3, **options)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss)
    return model


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_constraints(make, name):
    """A weight is divided only where its constraint looks at each row alone."""
    constraint, parts = CONSTRAINTS[name]
    strategy = make(1, variable_partitioner=PARTS(2))

    def build() -> keras.Model:
        return model_of(keras.optimizers.SGD(0.5), kernel_constraint=constraint())

    equals_one_device(strategy, build, fit_only(X, Y, batch_size=8))
    places = {v.path: place for v, place in strategy.cluster.served.places()}
    found = [len(place.parts) for path, place in places.items() if "kernel" in path]
    assert set(found) == {parts}


def test_a_constraint_that_comes_between_two_fits(one_worker):
    with one_worker.scope():
        optimizer = keras.optimizers.SGD(0.5)
        model = model_of(optimizer)
    model.fit(X, Y, batch_size=8, verbose=0)
    for axis, most in ((0, 0.5), (1, 0.1), (1, 0.05)):
        constraint = constraints.MaxNorm(most, axis=axis)
        model.layers[0].kernel.constraint = constraint
        model.compile(optimizer, model.loss)
        model.fit(X, Y, batch_size=8, verbose=0)
        norms = np.linalg.norm(model.get_weights()[0], axis=axis)
        assert norms.max() == pytest.approx(most, rel=1e-3)


def test_a_constraint_that_comes_when_the_weight_is_divided(make):
    with make(1, variable_partitioner=PARTS(2)).scope():
        model = model_of("sgd")
    model.evaluate(X, Y, verbose=0)
    model.layers[0].kernel.constraint = ZeroMean()
    with pytest.raises(
        kd.errors.ValueStructureError, match=r"ZeroMean looks at(.|\n)*kernel(.|\n)*Fix"
    ):
        model.fit(X, Y, verbose=0)


def test_clipping_of_accumulated_gradients(make):
    """The norm is that of a whole gradient, and each server has a part of it."""
    with make(1, variable_partitioner=PARTS(2)).scope():
        model = model_of(
            keras.optimizers.SGD(0.1, clipnorm=0.1, gradient_accumulation_steps=2)
        )
    before = np.array(model.layers[0].kernel)
    with pytest.raises(
        kd.errors.ValueStructureError, match=r"clipnorm of(.|\n)*2 parts(.|\n)*Fix"
    ):
        model.fit(X, Y, verbose=0)
    np.testing.assert_array_equal(before, model.layers[0].kernel)
