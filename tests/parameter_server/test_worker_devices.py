"""A worker with several devices divides the rows of its batches: the numbers of one
device, whatever the number of rows.
"""

import jax
import keras
import numpy as np
import pytest
from keras import layers

import keras_distribute as kd
from keras_distribute.coordinator import ClusterCoordinator
from keras_distribute.servers.programs import exported, loaded
from tests.exactness.harness import (
    assert_same_outcome,
    fit_evaluate_predict,
    observe,
    table,
)
from tests.parameter_server.conftest import resolver_of
from tests.parameter_server.test_fit import network

X, Y = table(54)


@pytest.fixture(scope="module")
def wide():
    """Two workers of four devices each, and a parameter server."""
    with kd.testing.ParameterServerCluster(2, 1, devices_per_worker=4) as cluster:
        yield cluster


def made(cluster, **options):
    """A strategy on one of the workers."""
    return kd.ParameterServerStrategy(resolver_of(cluster, 1, 1), **options)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("batch_size", [16, 9])
def test_fit_evaluate_and_predict(wide, batch_size):
    """Batches that divide, a last one of 6 rows, and none that divides."""
    strategy = made(wide)
    run = fit_evaluate_predict(X, Y, batch_size=batch_size, sample_weight=X[:, 0] ** 2)
    assert_same_outcome(observe(network, run, strategy), observe(network, run))
    assert strategy.cluster.workers[0].num_devices == 4
    strategy.close()


def test_rows_of_a_table(wide):
    def build() -> keras.Model:
        model = keras.Sequential(
            [
                keras.Input((3,), dtype="int32"),
                layers.Embedding(50, 4),
                layers.Flatten(),
                layers.Dense(3),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adagrad(0.1), loss)
        return model

    strategy = made(wide)
    ids = np.random.default_rng(0).integers(0, 50, size=(54, 3))
    run = fit_evaluate_predict(ids, Y, batch_size=16)
    assert_same_outcome(observe(build, run, strategy), observe(build, run))
    strategy.close()


def test_local_steps(wide):
    """Stacked batches are divided along their second axis."""
    outer = keras.optimizers.SGD(1.0)
    strategy = made(wide, local_steps=3, outer_optimizer=outer)

    def build() -> keras.Model:
        model = keras.Sequential(
            [keras.Input((6,)), layers.BatchNormalization(), layers.Dense(3)]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.02, momentum=0.9), loss)
        return model

    run = fit_evaluate_predict(X, Y, batch_size=8)
    assert_same_outcome(observe(build, run, strategy), observe(build, run))
    strategy.close()


def test_batches_that_workers_read(wide):
    """Also such as change their shape, beside an argument with as many rows."""
    strategy = made(wide)
    coordinator = ClusterCoordinator(strategy)
    with strategy.scope():
        v = keras.Variable(np.zeros(6, "float32"))

    def batches():
        yield from (np.arange(n * 6.0).reshape(n, 6) for n in (8, 8, 5, 4))

    def step(iterator, weights):
        x = next(iterator)
        v.assign_add(keras.ops.sum(x, 0))
        return x * 2 + weights[0], weights

    weights = np.arange(8.0, dtype="float32")
    iterator = iter(coordinator.create_per_worker_dataset(batches))
    found = [coordinator.schedule(step, (iterator, weights)) for _ in range(4)]
    coordinator.join()
    for (doubled, same), x in zip(coordinator.fetch(found), batches(), strict=True):
        np.testing.assert_array_equal(doubled, x * 2)
        np.testing.assert_array_equal(same, weights)
    np.testing.assert_array_equal(v.numpy(), sum(x.sum(0) for x in batches()))
    strategy.close()


def test_two_workers_are_computed_again_to_the_bit(wide):
    strategy = kd.ParameterServerStrategy(wide.cluster_resolver)
    with strategy.scope():
        model = network()
    with kd.testing.RecordedUpdates(strategy) as updates:
        model.fit(X, Y, batch_size=8, epochs=4, verbose=0)
    again = updates.replayed()
    for variable in model.trainable_variables:
        np.testing.assert_array_equal(again[variable.path], variable.numpy())
    for worker in strategy.cluster.workers:
        worker.is_ready = False
    with pytest.raises(
        kd.errors.UnavailableError,
        match=r"as many devices as a worker had\.\n  Received: no worker with 4 device"
        r"(.|\n)*Fix: replayed\(\) before strategy\.close\(\)",
    ):
        updates.replayed()
    strategy.close()


def test_rows_are_divided_and_sums_are_made_once():
    """What stands in the compiled program."""
    x = np.arange(48.0, dtype="float32").reshape(8, 6)
    w = np.ones((6, 5), "float32")
    shapes = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in (w, x)]
    loss = lambda w, x: jax.numpy.sum((x @ w) ** 2)  # noqa: E731
    blob, _ = exported(lambda w, x: [jax.grad(loss)(w, x)], shapes, ["cpu"])
    divided = loaded(blob, [(1, 0)], 4)
    text = divided.lower(w, x).compile().as_text()
    assert "f32[2,6]" in text and "f32[8,6]" not in text
    assert text.count(" all-reduce(") == 1
    np.testing.assert_allclose(divided(w, x)[0], loaded(blob)(w, x)[0], rtol=1e-6)
    # Eight rows do not divide over three devices, which all compute all.
    whole = loaded(blob, [(1, 0)], 3)
    assert "all-reduce" not in whole.lower(w, x).compile().as_text()
    np.testing.assert_allclose(whole(w, x)[0], loaded(blob)(w, x)[0], rtol=1e-6)
