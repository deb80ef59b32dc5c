"""One set of contracts, over every strategy: what a user may rely on whichever one is
chosen.
"""

import keras
import numpy as np
import pytest

import keras_distribute as kd
from tests.logical import HIDDEN, tpu_strategy
from tests.support import central, mirrored

RNG = np.random.RandomState(0)
X = RNG.randn(46, 5).astype("float32")
Y = RNG.randint(0, 3, 46)
STRATEGIES = {
    "default": kd.get_strategy,
    "one device": lambda: kd.OneDeviceStrategy("cpu:3"),
    **{f"{n} replicas": lambda n=n: mirrored(n) for n in (1, 2, 3, 4, 8)},
    **{f"central storage, {n} replicas": lambda n=n: central(n) for n in (1, 2, 4, 8)},
    "central storage on a replica's device": lambda: central(4, "cpu:1"),
    "central storage on another device": lambda: central(2, "cpu:7"),
    **{f"tpu, {n} logical": lambda n=n: tpu_strategy(n) for n in (1, 2, 4)},
    **{
        f"tpu, divided over {n} logical": lambda n=n: tpu_strategy(n, layout_map=HIDDEN)
        for n in (2, 4)
    },
}


@pytest.fixture(params=STRATEGIES)
def strategy(request):
    return STRATEGIES[request.param]()


def make_model():
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((5,)),
            keras.layers.Dense(8, activation="relu", name="hidden"),
            keras.layers.BatchNormalization(synchronized=True),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(3, activation="softmax"),
        ]
    )
    model.compile(
        keras.optimizers.Adam(0.01, epsilon=1e-3),
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    return model


@pytest.fixture(scope="module")
def plain():
    model = make_model()
    history = model.fit(X, Y, batch_size=16, epochs=2, shuffle=False, verbose=0).history
    return history, model.evaluate(X, Y, verbose=0), model.predict(X, verbose=0), model


@pytest.mark.sampled(6)
def test_training_gives_the_numbers_of_one_device(strategy, plain, tmp_path):
    with strategy.scope():
        model = make_model()
    history = model.fit(X, Y, batch_size=16, epochs=2, shuffle=False, verbose=0).history
    for name, values in plain[0].items():
        np.testing.assert_allclose(history[name], values, rtol=1e-5)
    np.testing.assert_allclose(model.evaluate(X, Y, verbose=0), plain[1], rtol=1e-5)
    np.testing.assert_allclose(
        model.predict(X, verbose=0), plain[2], rtol=1e-5, atol=1e-6
    )
    for ours, theirs in zip(model.variables, plain[3].variables, strict=True):
        np.testing.assert_allclose(ours.numpy(), theirs.numpy(), rtol=1e-5, atol=1e-6)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(
        loaded.predict(X, verbose=0), plain[2], rtol=1e-5, atol=1e-6
    )


def loop_of_plain_keras():
    """Five steps on 24 rows in plain Keras: what each gave, and the model."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(3)])
    model.compile(
        keras.optimizers.SGD(0.1, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    steps = [model.train_on_batch(X[:24], Y[:24], return_dict=True) for _ in range(5)]
    return steps, model


@pytest.fixture(scope="module")
def plain_loop():
    return loop_of_plain_keras()


@pytest.mark.sampled(3)
def test_a_custom_loop_gives_the_numbers_of_one_device(strategy, plain_loop):
    """The batch is split by hand: 24 rows divide over each of the replica counts."""
    with strategy.scope():
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(3)])
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        metric = keras.metrics.SparseCategoricalAccuracy()

    def step(x, y):
        def loss_fn():
            logits = model(x, training=True)
            metric.update_state(y, logits)
            return loss(y, logits)

        value, grads = kd.value_and_grad(loss_fn, model.trainable_variables)()
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        return value

    rows = 24 // strategy.num_replicas_in_sync
    x, y = (
        strategy.experimental_distribute_values_from_function(
            lambda c, a=a: a[c.replica_id_in_sync_group * rows :][:rows]
        )
        for a in (X, Y)
    )
    if not kd.has_strategy() and strategy is kd.get_strategy():
        x, y = X[:24], Y[:24]
    losses = [
        float(strategy.reduce("SUM", strategy.run(step, args=(x, y)), axis=None))
        for _ in range(5)
    ]

    expected, reference = plain_loop
    np.testing.assert_allclose(losses, [e["loss"] for e in expected], rtol=1e-5)
    assert float(metric.result()) == pytest.approx(
        np.mean([e["accuracy"] for e in expected])
    )
    assert int(optimizer.iterations) == 5
    for ours, theirs in zip(model.weights, reference.weights, strict=True):
        np.testing.assert_allclose(ours.numpy(), theirs.numpy(), rtol=1e-5, atol=1e-6)


def test_an_array_dataset_gives_the_same_batches(strategy):
    """Each pass in an order of its own, which depends on the seed alone."""

    def passes(strategy):
        dataset = kd.ArrayDataset(X, batch_size=15, shuffle=True, seed=3)
        dataset = strategy.experimental_distribute_dataset(dataset)
        return [[strategy.gather(batch, axis=0) for batch in dataset] for _ in range(2)]

    ours, expected = passes(strategy), passes(kd.OneDeviceStrategy("cpu:0"))
    for one, other in zip(ours, expected, strict=True):
        assert [len(batch) for batch in one] == [15, 15, 15, 1]
        for batch, theirs in zip(one, other, strict=True):
            np.testing.assert_array_equal(batch, theirs)
    assert not np.array_equal(ours[0][0], ours[1][0])


def test_scope_and_contexts(strategy):
    assert strategy.num_replicas_in_sync == len(strategy.extended.worker_devices)
    with strategy.scope():
        assert kd.get_strategy() is strategy
        variable = keras.Variable(2.0)
        assert strategy.extended.variable_created_in_scope(variable)

    def fn():
        context = kd.get_replica_context()
        assert context.strategy is strategy
        assert context.num_replicas_in_sync == strategy.num_replicas_in_sync
        assert not kd.in_cross_replica_context()
        total = context.all_reduce("SUM", 1.0 + 0 * context.replica_id_in_sync_group)
        variable.assign(total)
        return context.all_gather(keras.ops.ones((1, 2)), axis=0)

    result = strategy.run(fn)
    n = strategy.num_replicas_in_sync
    assert float(variable.numpy()) == n
    assert all(
        np.shape(component) == (n, 2)
        for component in strategy.experimental_local_results(result)
    )
    assert float(strategy.reduce("MEAN", variable.value, axis=None)) == n
