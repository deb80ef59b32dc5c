"""`fit` and `evaluate` of a `DatasetCreator`: each worker reads its own dataset."""

import time
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

import keras_distribute as kd
from tests.exactness.harness import assert_same_outcome, observe, table
from tests.parameter_server.test_fit import network

X, Y = table(22)
Creator = kd.experimental.DatasetCreator


def made() -> Any:
    """A function that is pickled by value: workers do not have the tests. Its batches
    have six rows, and a tail has four; again and again.
    """
    x, y = X, Y

    def batches(context: Any) -> Any:
        assert context.num_replicas_in_sync == 1
        while True:
            for start in range(0, len(x), 6):
                yield x[start : start + 6], y[start : start + 6]

    return batches


def batches(context: Any = None) -> Any:
    """The same here."""
    return made()(context or kd.InputContext())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("steps", [1, 3])
def test_one_worker_is_one_device(one_worker, steps):
    """Over epochs that go on in the data, with tails, validation and `evaluate`."""

    def build() -> keras.Model:
        model = network()
        model.steps_per_execution = steps
        return model

    def run(data: Any, validation: Any) -> Any:
        def of_model(model: keras.Model) -> Any:
            options: dict[str, Any] = {"steps_per_epoch": 6, "epochs": 2, "verbose": 0}
            options |= {"validation_data": validation, "validation_batch_size": 6}
            if isinstance(validation, Creator):
                options["validation_steps"] = 3
            return model.fit(data, **options).history

        return of_model

    ours = observe(build, run(Creator(made()), Creator(made())), one_worker)
    expected = observe(build, run(batches(), (X[:18], Y[:18])))
    assert_same_outcome(ours, expected)
    assert set(ours.result) >= {"loss", "val_loss"}


IDS = np.random.default_rng(0).integers(0, 5000, (26, 3))
LABELS = np.random.default_rng(1).integers(0, 3, 26)


def recommender() -> keras.Model:
    """A model that looks up rows of a table, and takes five steps at once."""
    inputs = keras.Input((3,), dtype="int32")
    rows = layers.Flatten()(layers.Embedding(5000, 4)(inputs))
    model = keras.Model(inputs, layers.Dense(3)(rows))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adagrad", loss, metrics=["accuracy"], steps_per_execution=5)
    return model


def test_rows_of_a_table(one_worker):
    """Where a step asks for the rows of the next one, which was read before."""
    ids, labels = IDS, LABELS

    def batches(context: Any = None) -> Any:
        del context
        while True:
            for start in range(0, 26, 6):
                yield ids[start : start + 6], labels[start : start + 6]

    def run(data: Any) -> Any:
        return lambda model: (
            model.fit(data, steps_per_epoch=15, epochs=2, verbose=0).history
        )

    ours = observe(recommender, run(Creator(batches)), one_worker)
    assert_same_outcome(ours, observe(recommender, run(batches())))


def test_what_was_computed_before_a_batch_that_cannot_be_read(one_worker):
    """It is pushed, though the next batch was asked for before."""
    ids, labels = IDS, LABELS

    def batches(context: Any) -> Any:
        del context
        for _ in range(8):
            yield ids[:6], labels[:6]
        raise OSError("the disk is gone")

    with one_worker.scope():
        model = recommender()

    def pushes() -> int:
        (server, *_) = one_worker.cluster.servers
        return server.call({"op": "status"})[0]["version"]

    before = pushes()
    with pytest.raises(kd.errors.RemoteError, match="the disk is gone"):
        model.fit(Creator(batches), steps_per_epoch=15, verbose=0)
    assert pushes() - before == 8


@pytest.mark.sampled(2)
@pytest.mark.parametrize("local_slots", [False, True])
def test_local_steps_of_one_worker_are_those_of_one_device(make, local_slots):
    """Also where a batch among them has fewer rows, and another round fewer steps."""
    strategy = make(
        1,
        local_steps=4,
        local_slots=local_slots,
        outer_optimizer=keras.optimizers.SGD(1.0),
    )

    def run(data: Any) -> Any:
        return lambda model: (
            model.fit(data, steps_per_epoch=6, epochs=2, verbose=0).history
        )

    ours = observe(network, run(Creator(made())), strategy)
    assert_same_outcome(ours, observe(network, run(batches())))
    assert strategy.steps_of_workers == {"worker:0": 12}


class Total(keras.metrics.Metric):
    """The sum of all labels."""

    def __init__(self) -> None:
        super().__init__(name="total")
        self.total = keras.metrics.Sum()

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.total.update_state(y_true)

    def result(self) -> Any:
        return self.total.result()


class Rows(layers.Layer):
    """Counts the rows, of which each program knows the number."""

    def build(self, shape: Any) -> None:
        del shape
        self.seen = self.add_weight((), "zeros", "int32", trainable=False)

    def call(self, x: Any) -> Any:
        self.seen.assign_add(x.shape[0] or 0)
        return x


def counting(strategy: Any, group: int = 1) -> tuple[keras.Model, Any]:
    """A model whose metric adds up the labels, and data whose labels say which worker
    has read them: one row of 1, or one of 1000; sometimes two with half of it.
    """
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), Rows(), layers.Dense(1)])
        model.compile(
            keras.optimizers.SGD(0.0),
            "mse",
            metrics=[Total()],
            steps_per_execution=group,
        )

    def dataset_fn(context: Any) -> Any:
        assert context.num_input_pipelines == 2
        label = 1000.0**context.input_pipeline_id
        while True:
            for rows in [1, 1, 1, 2, 1, 1, 1] if group > 1 else [1]:
                labels = np.full((rows, 1), label / rows, "float32")
                yield np.ones((rows, 2), "float32"), labels

    return model, Creator(dataset_fn)


IN_ROUNDS = {"local_steps": 5, "local_slots": True}


@pytest.mark.parametrize(
    ("options", "group"),
    [({}, 1), (IN_ROUNDS, 1), ({}, 5)],
    ids=["steps", "rounds", "groups"],
)
def test_each_worker_reads_its_own(make, options, group):
    """A step takes the next batch of the worker that it runs on."""
    strategy = make(2, **options)
    model, data = counting(strategy, group)
    history = model.fit(data, steps_per_epoch=40, epochs=2, verbose=0).history
    read = np.array([divmod(int(total), 1000) for total in history["total"]])
    np.testing.assert_array_equal(read.sum(axis=1), [40, 40])
    np.testing.assert_array_equal(
        read.sum(axis=0)[::-1], list(strategy.steps_of_workers.values())
    )
    rows = sum(n + ((n + 3) // 7 if group > 1 else 0) for n in read.sum(axis=0))
    assert options or int(model.layers[0].seen.numpy()) == rows
    of_one_group = 40 if options else 80
    assert int(model.optimizer.iterations.numpy()) == of_one_group
    found = model.evaluate(data, steps=10, verbose=0, return_dict=True)["total"]
    assert sum(divmod(int(found), 1000)) == 10
    assert sum(strategy.steps_of_workers.values()) == 90


@pytest.mark.parametrize(
    ("options", "group"),
    [({}, 1), (IN_ROUNDS, 1), ({}, 4)],
    ids=["steps", "rounds", "groups"],
)
def test_a_worker_dies(own_cluster, options, group):
    """Each step counts once; the worker that comes back makes its dataset anew."""
    strategy = kd.ParameterServerStrategy(own_cluster.cluster_resolver, **options)
    model, data = counting(strategy, group)

    class Kills(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch // group == 20 // group and self.epoch == 0:
                own_cluster.kill("worker", 1)

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.epoch = epoch
            if epoch == 1:
                own_cluster.start("worker", 1)
                while not strategy.cluster.workers[1].is_ready:
                    time.sleep(0.05)

    history = model.fit(
        data, steps_per_epoch=60, epochs=2, verbose=0, callbacks=[Kills()]
    ).history
    read = [divmod(int(total), 1000) for total in history["total"]]
    assert [sum(each) for each in read] == [60, 60]
    assert read[1][0] > 0
    of_one_group = 60 if options else 120
    assert int(model.optimizer.iterations.numpy()) == of_one_group
    strategy.close()


def test_a_backup_goes_on_in_the_epoch(strategy, tmp_path):
    """The steps that are left; the datasets begin anew."""
    model, data = counting(strategy)

    class Stops(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 24:
                raise KeyboardInterrupt

    backup = kd.callbacks.BackupAndRestore(tmp_path / "backup", save_freq=10)
    with pytest.raises(KeyboardInterrupt):
        model.fit(data, steps_per_epoch=40, verbose=0, callbacks=[backup, Stops()])
    strategy.wait_for_steps()
    backup = kd.callbacks.BackupAndRestore(tmp_path / "backup", save_freq=10)
    history = model.fit(data, steps_per_epoch=40, verbose=0, callbacks=[backup]).history
    assert sum(divmod(int(history["total"][0]), 1000)) == 40
    assert int(model.optimizer.iterations.numpy()) == 40


def test_a_fit_after_another(strategy, monkeypatch):
    """It traces nothing again, and leaves no dataset on the workers."""
    model, data = counting(strategy)
    model.fit(data, steps_per_epoch=4, verbose=0)
    monkeypatch.setattr(strategy.cluster, "_made", None)
    before = len(strategy.cluster.dropped)
    assert before == 2  # The dataset and its iterator.
    history = model.fit(data, steps_per_epoch=4, verbose=0).history
    assert sum(divmod(int(history["total"][0]), 1000)) == 4
    assert len(strategy.cluster.dropped) == 4


def test_tf_data_and_grain(one_worker):
    tf = pytest.importorskip("tensorflow")
    grain = pytest.importorskip("grain.python")
    x, y = X[:18], Y[:18]

    def of_tf(context: Any) -> Any:
        data = tf.data.Dataset.from_tensor_slices((x, y))
        data = data.shard(context.num_input_pipelines, context.input_pipeline_id)
        return data.batch(6).repeat()

    def of_grain(context: Any) -> Any:
        rows = grain.MapDataset.source(list(zip(x, y, strict=True)))
        return rows.repeat().to_iter_dataset().batch(6)

    def run(data: Any) -> Any:
        return lambda model: model.fit(data, steps_per_epoch=5, verbose=0).history

    ours = [observe(network, run(Creator(fn)), one_worker) for fn in (of_tf, of_grain)]
    assert_same_outcome(*ours)


def test_under_a_synchronous_strategy_and_none():
    """As `distribute_datasets_from_function`: batches are those of replicas."""
    told = []

    def dataset_fn(context: Any) -> Any:
        told.append(context)
        return ((X[i : i + 4], Y[i : i + 4]) for i in range(0, 16, 4))

    def run(data: Any) -> Any:
        return lambda model: model.fit(data, steps_per_epoch=2, verbose=0).history

    mirrored = kd.MirroredStrategy(["cpu:0", "cpu:1"])

    def build() -> keras.Model:
        model = keras.Sequential([keras.Input((6,)), layers.Dense(3)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("sgd", loss)
        return model

    ours = observe(build, run(Creator(dataset_fn)), mirrored)
    whole = ((X[i : i + 8], Y[i : i + 8]) for i in (0, 8))
    assert_same_outcome(ours, observe(build, run(whole), mirrored))
    alone = observe(build, run(Creator(dataset_fn)))
    assert alone.result["loss"]
    assert told == [kd.InputContext(1, 0, 2), kd.InputContext()]


def test_what_is_wrong_is_said():
    with pytest.raises(kd.errors.StructureTypeError) as found:
        Creator([1, 2])  # type: ignore[arg-type]
    assert str(found.value) == (
        "A DatasetCreator has a function of an InputContext.\n"
        "  Received: dataset_fn=[1, 2].\n"
        "  Fix: kd.experimental.DatasetCreator(lambda context: make_dataset())"
    )
    with pytest.raises(kd.errors.StructureTypeError, match="options of a dataset are"):
        Creator(batches, {"buffer": 2})  # type: ignore[arg-type]
    assert "batches" in repr(Creator(batches))
    model = keras.Sequential([keras.Input((6,)), layers.Dense(3)])
    model.compile("sgd", "mse")
    with pytest.raises(
        kd.errors.InputError, match=r"(?s)How many steps.*steps_per_epoch=100.*steps=10"
    ):
        model.fit(Creator(batches))
    with pytest.raises(kd.errors.InputError, match="How many steps"):
        model.evaluate(Creator(batches))
    with pytest.raises(kd.errors.InputError, match="How many steps"):
        model.fit(X, X[:, :3], validation_data=Creator(batches), verbose=0)
    with pytest.raises(kd.errors.InputError) as wrong:
        model.fit(Creator(batches), Y, steps_per_epoch=1)
    assert str(wrong.value).startswith(
        "A DatasetCreator's dataset already holds all that a step needs; y cannot be "
        "added."
    )


def test_what_workers_cannot_do_is_said(make):
    strategy = make(1, local_steps=2)
    with strategy.scope():
        model = network()
    with pytest.raises(kd.errors.ContextError) as found:
        model.predict(Creator(batches), steps=2, verbose=0)
    assert str(found.value).startswith(
        "predict returns rows in the order of the data, and rows that several workers "
        "read have none.\n  Received: model.predict(DatasetCreator("
    )
    options = kd.InputOptions(experimental_fetch_to_device=False)
    with pytest.raises(kd.errors.InputError, match="no options apply"):
        model.evaluate(Creator(batches, options), steps=2, verbose=0)
    with pytest.raises(kd.errors.InputError, match=r"iterated\.\n  Received: None\."):
        model.evaluate(Creator(lambda context: None), steps=2, verbose=0)
    assert model.evaluate(Creator(made()), steps=2, verbose=0)


def test_a_dataset_that_ends(one_worker):
    """On the worker an error, and no epoch that is shorter than it says."""
    x, y = X, Y
    with one_worker.scope():
        model = network()

    def three(context: Any) -> Any:
        del context
        return [(x[:6], y[:6])] * 3

    with pytest.raises(kd.errors.InputError) as found:
        model.fit(Creator(three), steps_per_epoch=5, verbose=0)
    assert (
        "The dataset of the worker 0 has ended after 3 batch(es), and steps are left."
        in str(found.value)
    )
    assert "dataset.repeat()" in str(found.value)
    with pytest.raises(kd.errors.InputError, match=r"after 0 batch\(es\)"):
        model.fit(Creator(lambda context: []), steps_per_epoch=5, verbose=0)
    history = model.fit(Creator(three), steps_per_epoch=3, verbose=0).history
    assert np.isfinite(history["loss"]).all()
