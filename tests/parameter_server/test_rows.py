"""Tables of which steps look rows up: those rows travel, and the numbers stay those of
one device.
"""

import time
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

import keras_distribute as kd
from keras_distribute.servers.store import Values
from tests.exactness.harness import (
    assert_same_outcome,
    fit_evaluate_predict,
    fit_only,
    observe,
)

RANDOM = np.random.default_rng(0)
IDS = RANDOM.integers(0, 500, (60, 3)).astype("int32")
Y = RANDOM.normal(size=(60, 1)).astype("float32")


def recommender(optimizer: Any, **options: Any) -> keras.Model:
    """A table of 500 rows, of which a step of 5 examples looks up 15."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((3,), dtype="int32"),
            layers.Embedding(500, 4, name="table", **options),
            layers.Flatten(),
            layers.Dense(1),
        ]
    )
    model.compile(optimizer, "mse", metrics=["mae"])
    return model


def tables_of(strategy: Any) -> list[tuple[str, int]]:
    """What all programs of a strategy look up: the tables' paths, and how many rows."""
    found: set[tuple[str, int]] = set()
    for _, by_code in strategy.programs._by_anchor.values():
        for programs in by_code.values():
            for program in programs.values():
                found |= {(each.variable.path, each.size) for each in program.lookups}
    return sorted(found)


EXACT = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "clipnorm": lambda: keras.optimizers.Adagrad(0.1, clipnorm=0.05),
    "clipvalue": lambda: keras.optimizers.SGD(0.1, clipvalue=0.01),
    "global_clipnorm": lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.05),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", EXACT)
def test_rows_alone_give_the_numbers_of_one_device(one_worker, name):
    def build() -> keras.Model:
        return recommender(EXACT[name]())

    run = fit_only(IDS, Y, batch_size=5)
    assert_same_outcome(observe(build, run, one_worker), observe(build, run))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("steps", [1, 3])
def test_a_tail_a_mask_and_two_layers_of_one_table(one_worker, steps):
    """On divided tables; also `evaluate` and `predict`."""

    def build() -> keras.Model:
        keras.utils.set_random_seed(1)
        ids = keras.Input((3,), dtype="int32")
        shared = layers.Embedding(500, 4, mask_zero=True)
        own = layers.Embedding(500, 4)
        x = layers.LSTM(4)(shared(ids)) + layers.GlobalAveragePooling1D()(own(ids))
        x = x + layers.Flatten()(shared(500 - 1 - ids))[:, :4]
        model = keras.Model(ids, layers.Dense(1)(x))
        model.compile(keras.optimizers.Adagrad(0.1), "mse", steps_per_execution=steps)
        return model

    run = fit_evaluate_predict(IDS, Y, batch_size=7)
    assert_same_outcome(observe(build, run, one_worker), observe(build, run))
    assert [size for _, size in tables_of(one_worker)]


PARTS = kd.experimental.partitioners.FixedShardsPartitioner


@pytest.fixture
def divided(make):
    """One worker, and tables divided over two servers."""
    return make(1, variable_partitioner=PARTS(2))


def test_divided_tables(divided):
    def build() -> keras.Model:
        return recommender(keras.optimizers.Adagrad(0.1))

    run = fit_evaluate_predict(IDS, Y, batch_size=5)
    assert_same_outcome(observe(build, run, divided), observe(build, run))
    assert ("sequential/table/embeddings", 15) in [
        (path.split("_")[0] + path[path.index("/") :], size)
        for path, size in tables_of(divided)
    ]


def test_a_layer_of_ones_own_and_ids_outside_of_the_table(one_worker):
    class Rows(layers.Layer):
        def build(self, shape: Any) -> None:
            self.table = self.add_weight((500, 4), name="table")

        def call(self, ids: Any) -> Any:
            return keras.ops.take(self.table, ids, axis=0)

    def build() -> keras.Model:
        keras.utils.set_random_seed(1)
        model = keras.Sequential(
            [keras.Input((3,), dtype="int32"), Rows(), layers.Flatten()]
        )
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    run = fit_only(IDS - 499, np.repeat(Y, 12, 1), batch_size=5)
    assert_same_outcome(observe(build, run, one_worker), observe(build, run))
    assert [size for _, size in tables_of(one_worker)] == [15]


def test_adam_needs_whole_tables(one_worker, caplog):
    def build() -> keras.Model:
        return recommender(keras.optimizers.Adam(0.01, epsilon=1e-3))

    run = fit_only(IDS, Y, batch_size=5)
    assert_same_outcome(observe(build, run, one_worker), observe(build, run))
    assert tables_of(one_worker) == []
    assert "lazy_rows" not in caplog.text  # It is small.


def test_a_large_table_that_travels_says_why(one_worker, caplog, monkeypatch):
    monkeypatch.setattr("keras_distribute.scheduling.cluster._LARGE_TABLE", 1000)
    with one_worker.scope():
        model = recommender("adam")
    model.fit(IDS[:10], Y[:10], batch_size=5, verbose=0)
    found = [text for text in caplog.messages if "travel" in text]
    assert len(found) == 1
    assert "table/embeddings" in found[0]
    assert "Adam changes rows whose gradient is zero" in found[0]
    assert "lazy_rows=True" in found[0]


def test_lazy_rows_are_those_of_lazy_adam(make):
    """As computed by hand: the slots of a row go on when it is looked up."""
    strategy = make(1, lazy_rows=True)
    with strategy.scope():
        table = keras.Variable(RANDOM.normal(size=(20, 2)), dtype="float32")
        optimizer = keras.optimizers.Adam(0.1, epsilon=1e-3)
    both = kd.value_and_grad(
        lambda ids: keras.ops.sum(keras.ops.take(table, ids, axis=0) ** 2), [table]
    )

    def step(ids):
        loss, grads = both(ids)
        optimizer.apply(grads, [table])
        return loss

    coordinator = kd.coordinator.ClusterCoordinator(strategy)
    weights = table.numpy().astype("float64")
    m, v = np.zeros_like(weights), np.zeros_like(weights)
    for t in range(1, 9):
        ids = RANDOM.integers(0, 20, 6).astype("int32")
        coordinator.schedule(step, (ids,))
        gradient = np.zeros_like(weights)
        np.add.at(gradient, ids, 2 * weights[ids])
        own = np.unique(ids)
        m[own] += 0.1 * (gradient[own] - m[own])
        v[own] += 0.001 * (gradient[own] ** 2 - v[own])
        rate = 0.1 * np.sqrt(1 - 0.999**t) / (1 - 0.9**t)
        weights[own] -= rate * m[own] / (np.sqrt(v[own]) + 1e-3)
        coordinator.join()
    assert tables_of(strategy) == [(table.path, 6)]
    np.testing.assert_allclose(table.numpy(), weights, rtol=1e-4, atol=1e-5)


def test_what_travels_is_in_proportion_to_distinct_ids(one_worker):
    with one_worker.scope():
        model = recommender(keras.optimizers.Adagrad(0.1))

    def traffic(ids: np.ndarray) -> int:
        before = one_worker.cluster.bytes_of_servers()
        model.fit(ids, Y[:50], batch_size=50, verbose=0)
        return one_worker.cluster.bytes_of_servers() - before

    few = np.tile(np.arange(3, dtype="int32"), (50, 1))
    traffic(few)
    row = 4 * 4 * 2  # Pulled, and pushed.
    many = np.arange(150, dtype="int32").reshape(50, 3)
    ids = 2 * 4 * 147
    assert traffic(many) - traffic(few) == row * 147 + ids


def test_computed_again(strategy):
    """Of two workers, on divided tables."""
    with strategy.scope():
        model = recommender(keras.optimizers.Adagrad(0.1))
    with kd.testing.RecordedUpdates(strategy) as updates:
        model.fit(IDS, Y, batch_size=5, epochs=3, verbose=0)
    again = updates.replayed()
    assert tables_of(strategy)
    for variable in [*model.trainable_variables, *model.optimizer.variables]:
        if variable.path in again:
            np.testing.assert_array_equal(variable.numpy(), again[variable.path])


def test_batches_that_workers_read(strategy):
    """Whose last one is smaller."""
    table, lookup = lookup_step(strategy)

    def dataset():
        while True:
            yield np.arange(8, dtype="int32")
            yield np.arange(3, dtype="int32")

    def step(iterator):
        lookup(next(iterator))

    coordinator = kd.coordinator.ClusterCoordinator(strategy)
    iterator = iter(coordinator.create_per_worker_dataset(dataset))
    for _ in range(12):
        coordinator.schedule(step, (iterator,))
    coordinator.join()
    counts = [worker.steps for worker in strategy.cluster.workers]
    large = sum(-(-count // 2) for count in counts)
    expected = np.ones((100, 2))
    expected[:3] -= 12
    expected[3:8] -= large
    np.testing.assert_array_equal(table.numpy(), expected)


def lookup_step(strategy):
    """A table of ones, and a function that takes one of each row that it looks up."""
    with strategy.scope():
        table = keras.Variable(np.ones((100, 2)), dtype="float32")
        optimizer = keras.optimizers.SGD(1.0)
    both = kd.value_and_grad(
        lambda ids: keras.ops.sum(keras.ops.take(table, ids, axis=0)), [table]
    )

    def step(ids):
        value, grads = both(ids)
        optimizer.apply(grads, [table])
        return value

    return table, step


def test_each_function_sees_what_the_one_before_has_done(one_worker):
    """Of a loop, where its rows come with the answer to the last push, and of functions
    that are alone.
    """
    table, step = lookup_step(one_worker)
    coordinator = kd.coordinator.ClusterCoordinator(one_worker)
    batches = RANDOM.integers(0, 20, (40, 6)).astype("int32")
    expected, losses = np.ones((100, 2), "float32"), []
    for ids in batches:
        losses.append(expected[ids].sum())
        np.subtract.at(expected, ids, 1.0)
    found = [coordinator.schedule(step, (ids,)) for ids in batches[:30]]
    assert [value.fetch() for value in found] == losses[:30]
    found = [coordinator.schedule(step, (ids,)).fetch() for ids in batches[30:]]
    assert found == losses[30:]
    np.testing.assert_array_equal(table.numpy(), expected)


def test_rows_that_a_worker_has_are_not_the_table(one_worker):
    """A function that reads all of it comes right after one that looks up some."""
    coordinator = kd.coordinator.ClusterCoordinator(one_worker)
    with one_worker.scope():
        table = keras.Variable(np.arange(20.0, dtype="float32").reshape(10, 2))

    def some(ids):
        return keras.ops.sum(keras.ops.take(table, ids, axis=0))

    def whole():
        return keras.ops.sum(table)

    args = (np.int32([1, 4]),)
    functions = [(some, args), (whole, ())] * 10
    found = coordinator.fetch([coordinator.schedule(*each) for each in functions])
    assert found == [22.0, 190.0] * 10


def test_a_batch_that_is_not_there_holds_up_nothing(one_worker, tmp_path):
    """What a function made is there before the next one has its batch."""
    table, step = lookup_step(one_worker)
    gate = tmp_path / "open"

    def dataset():
        yield np.arange(6, dtype="int32")
        while not gate.exists():
            time.sleep(0.01)
        yield np.arange(6, dtype="int32")

    coordinator = kd.coordinator.ClusterCoordinator(one_worker)
    iterator = iter(coordinator.create_per_worker_dataset(dataset))
    first, second = (
        coordinator.schedule(lambda it: step(next(it)), (iterator,)) for _ in range(2)
    )
    assert first.fetch() == 12.0
    np.testing.assert_array_equal(table.numpy()[:7, 0], [0] * 6 + [1])
    gate.touch()
    assert second.fetch() == 0.0


INITIALIZERS = {
    "uniform": lambda: keras.initializers.RandomUniform(seed=3),
    "normal": lambda: keras.initializers.RandomNormal(seed=2**31 + 5),
    "generator": lambda: keras.initializers.TruncatedNormal(
        seed=keras.random.SeedGenerator(4)
    ),
    "ones": lambda: keras.initializers.Ones(),
    "constant": lambda: keras.initializers.Constant(0.25),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", INITIALIZERS)
def test_large_tables_are_drawn_by_the_servers(make, monkeypatch, name):
    """The same values on one server, on two, and here."""
    monkeypatch.setattr("keras_distribute.variables.drawing.LARGE", 1000)
    monkeypatch.setattr("keras_distribute.variables.drawing._ELEMENTS", 4 * 7)
    found = []
    for parts in (1, 2):
        strategy = make(1, variable_partitioner=PARTS(parts))
        with strategy.scope():
            table = keras.Variable(INITIALIZERS[name](), shape=(250, 4))
            unused = keras.Variable(INITIALIZERS[name](), shape=(250, 4))
        assert table.drawing is not None
        read = lambda ids: keras.ops.take(table, ids, axis=0)  # noqa: E731
        coordinator = kd.coordinator.ClusterCoordinator(strategy)
        ids = np.arange(0, 250, 50)
        rows = coordinator.schedule(read, (ids,)).fetch()
        assert table.drawing is None
        assert tables_of(strategy) == [(table.path, 5)]
        np.testing.assert_array_equal(table.numpy()[ids], rows)
        found += [table.numpy(), unused.numpy()]
        strategy.close()
    for other in found[1:]:
        np.testing.assert_array_equal(found[0], other)
    if name in ("uniform", "normal", "generator"):
        assert len(np.unique(found[0])) > 990


def test_other_initializers_look_at_the_whole_shape(one_worker, monkeypatch):
    monkeypatch.setattr("keras_distribute.variables.drawing.LARGE", 1000)
    with one_worker.scope():
        table = keras.Variable(keras.initializers.HeNormal(seed=1), shape=(250, 4))
    assert table.drawing is None
    expected = keras.initializers.HeNormal(seed=1)((250, 4))
    np.testing.assert_array_equal(table.numpy(), expected)


def test_training_a_table_that_is_drawn(divided, monkeypatch):
    """Its slots are drawn by the servers, too; the numbers are those of one device
    that begins with it.
    """
    monkeypatch.setattr("keras_distribute.variables.drawing.LARGE", 4000)
    with divided.scope():
        model = recommender(keras.optimizers.Adagrad(0.1))
    table = model.layers[0].embeddings
    assert table.drawing is not None
    first = table.numpy()
    model.fit(IDS, Y, batch_size=5, verbose=0, shuffle=False)
    assert table.drawing is None
    plain = recommender(keras.optimizers.Adagrad(0.1))
    plain.layers[0].embeddings.assign(first)
    plain.fit(IDS, Y, batch_size=5, verbose=0, shuffle=False)
    for ours, theirs in zip(model.weights, plain.weights, strict=True):
        np.testing.assert_allclose(ours.numpy(), theirs.numpy(), rtol=1e-5, atol=1e-6)


def test_a_table_on_its_way_does_not_change():
    """It is written in place, while a message with it may still be sent."""
    values = Values({7: np.ones((4, 2), "float32"), 8: np.ones(3, "float32")})
    whole, some = values.sent(7), values.sent(7, slice(1, 3))
    values.changing(7)[2] = 5.0
    assert whole.tolist() == [[1, 1]] * 4 and some.tolist() == [[1, 1]] * 2
    assert values.sent(7)[2].tolist() == [5, 5]
    values.apply({"updates": [], "adds": [8], "sets": []}, [np.full(3, 2, "float32")])
    sum_now = values.sent(8)
    assert np.shares_memory(sum_now, values[8])  # It is never written: no copy.
    with pytest.raises(ValueError, match="read-only"):
        sum_now[0] = 1
    values.changing(8)[0] = 1
    assert sum_now.tolist() == [3, 3, 3] and values[8].tolist() == [1, 3, 3]
