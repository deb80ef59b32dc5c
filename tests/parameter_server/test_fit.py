"""`fit`, `evaluate` and `predict` on workers: with one worker the numbers of one device,
with several each batch once.
"""

from typing import Any

import jax
import keras
import numpy as np
import pytest
from keras import layers

import keras_distribute as kd
from tests.exactness import zoo
from tests.exactness.harness import (
    assert_same_outcome,
    fit_evaluate_predict,
    fit_only,
    observe,
    table,
)
from tests.exactness.test_layers_optimizers_metrics import (
    OPTIMIZERS,
    classifier,
    make_optimizer,
)

X, Y = table(22)


def equals_one_device(strategy: Any, build: Any, run: Any) -> None:
    """Asserts that a run on the cluster leaves what one device does."""
    assert_same_outcome(observe(build, run, strategy), observe(build, run))


def test_predictions_on_a_batch_are_the_callers_to_change(one_worker):
    with one_worker.scope():
        model = keras.Sequential([keras.Input((4,)), layers.Dense(1)])
        model.compile("sgd", "mse")
    outputs = model.predict_on_batch(np.ones((3, 4), "float32"))
    before = outputs.copy()
    outputs += 1
    np.testing.assert_array_equal(outputs, before + 1)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer(one_worker, name):
    """On two servers: slots beside their weights, and shared state on both."""
    equals_one_device(
        one_worker,
        lambda: classifier(make_optimizer(name)),
        fit_only(X, Y, batch_size=8),
    )


@pytest.mark.parametrize("name", ["Adam", "ScheduleFreeAdamW"])
def test_optimizers_with_every_option(one_worker, name):
    options: dict[str, Any] = {
        "weight_decay": 0.01,
        "clipnorm": 0.2,
        "gradient_accumulation_steps": 2,
        "use_ema": True,
        "ema_momentum": 0.7,
    }

    def build() -> keras.Model:
        optimizer = make_optimizer(name, **options)
        optimizer.exclude_from_weight_decay(var_names=["bias"])
        optimizer.learning_rate = keras.optimizers.schedules.ExponentialDecay(
            0.02, 2, 0.5
        )
        return classifier(optimizer)

    equals_one_device(one_worker, build, fit_only(X, Y, batch_size=8))


def test_muon_knows_weights_by_their_names(one_worker):
    def build() -> keras.Model:
        model = keras.Sequential(
            [
                keras.Input((6,)),
                layers.Dense(4, name="embedding_of_rows"),
                layers.Dense(5, "tanh"),
                layers.Dense(3, name="head"),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Muon(0.05, exclude_layers=["head"]), loss)
        return model

    equals_one_device(one_worker, build, fit_only(X, Y, batch_size=8))


@pytest.mark.parametrize("local_steps", [1, 3])
def test_scales_of_float8_are_no_gradients(make, local_steps):
    """What a layer keeps of its scales takes its gradient as the new value, which is
    neither clipped nor rounded, nor a difference.
    """

    def scales(strategy: Any) -> list[Any]:
        keras.utils.set_random_seed(0)
        with strategy.scope():
            model = keras.Sequential([keras.Input((16,)), layers.Dense(16)])
            model.quantize("float8")
            model.compile(keras.optimizers.SGD(1e-4, clipnorm=1e-3), "mse")
        x = np.random.default_rng(0).normal(size=(20, 16)).astype("float32")
        model.fit(x, x, batch_size=4, shuffle=False, verbose=0)
        return [v.numpy() for v in model.trainable_variables if "scale" in v.path]

    strategy = make(1, local_steps=local_steps, communication_dtype="bfloat16")
    found, expected = scales(strategy), scales(kd.get_strategy())
    assert len(found) == 3
    assert any(value != 1.0 for value in expected)
    np.testing.assert_allclose(found, expected, rtol=1e-3)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("clip", ["clipnorm", "global_clipnorm", "clipvalue"])
def test_clipping_looks_at_whole_gradients(one_worker, clip):
    equals_one_device(
        one_worker,
        lambda: classifier(make_optimizer("SGD", **{clip: 0.05})),
        fit_only(X, Y, batch_size=8),
    )


def network(optimizer: Any = None, **options: Any) -> keras.Model:
    """Moving statistics, seeds, penalties; by default weighted metrics."""
    model = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(8, activation="relu", kernel_regularizer="l2"),
            layers.BatchNormalization(),
            layers.Dropout(0.3),
            layers.Dense(3),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    if optimizer is None:
        optimizer = keras.optimizers.Adam(0.02, epsilon=1e-2)
        weighted = [keras.metrics.SparseCategoricalCrossentropy(from_logits=True)]
        options = {"weighted_metrics": weighted}
    model.compile(optimizer, loss, metrics=["accuracy"], **options)
    return model


def assert_same_weights(model: keras.Model, other: keras.Model) -> None:
    """Up to rounding; counters and seeds aside."""
    for ours, theirs in zip(model.weights, other.weights, strict=True):
        if ours.dtype == "float32":
            np.testing.assert_allclose(
                ours.numpy(), theirs.numpy(), rtol=1e-5, atol=1e-6, err_msg=ours.path
            )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("steps", [1, 3])
def test_a_tail_and_validation(one_worker, steps):
    def build() -> keras.Model:
        model = network()
        model.steps_per_execution = steps
        return model

    run = fit_evaluate_predict(
        X, Y, batch_size=6, validation_data=(X[:9], Y[:9]), sample_weight=X[:, 0] ** 2
    )
    equals_one_device(one_worker, build, run)


@pytest.mark.sampled(14)
@pytest.mark.parametrize("inputs", zoo.INPUTS)
@pytest.mark.parametrize("kind", sorted(zoo.BUILDERS))
def test_models_of_every_kind_on_every_input(one_worker, kind, inputs):
    case = zoo.Case(
        kind=kind,
        flavour=1,
        replicas=1,
        batch_size=6,
        samples=20,
        reduction="sum_over_batch_size",
        optimizer=zoo.OptimizerChoice("Adam"),
        inputs=inputs,
        weights="none",
    )
    equals_one_device(one_worker, lambda: zoo.build_model(case), zoo.run_case(case))


def counting_each_row(strategy: Any) -> tuple[keras.Model, np.ndarray]:
    """Trains on some rows, whose error each epoch has counted once; returns them."""
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), layers.Dense(1, trainable=False)])
        model.compile("sgd", "mse", metrics=[keras.metrics.MeanAbsoluteError()])
        model.layers[0].set_weights([np.ones((1, 1)), np.zeros(1)])
    x = np.arange(100.0, dtype="float32")[:, None]
    history = model.fit(x, 0 * x, batch_size=7, epochs=3, verbose=0).history
    np.testing.assert_allclose(history["mean_absolute_error"], [49.5] * 3, rtol=1e-6)
    return model, x


def test_several_workers_count_each_batch_once(strategy):
    """Sums over the rows that were trained on, whoever had them."""
    model, x = counting_each_row(strategy)
    np.testing.assert_allclose(model.predict(x, batch_size=7, verbose=0), x)
    evaluated = model.evaluate(x, 0 * x, batch_size=7, verbose=0, return_dict=True)
    assert evaluated["mean_absolute_error"] == pytest.approx(49.5)


class Printing(layers.Layer):
    """Prints what it is given."""

    def call(self, x):
        jax.debug.print("{}", x)
        return x


@pytest.mark.parametrize("per_execution", [1, 3])
def test_callbacks_of_predict_see_arrays(strategy, per_execution):
    with strategy.scope():
        inputs = keras.Input((1,))
        outputs = {"twice": 2 * inputs, "same": inputs + 0.0}
        model = keras.Model(inputs, outputs)
        model.compile(steps_per_execution=per_execution)
    x, seen = np.arange(23.0, dtype="float32")[:, None], []

    def see(batch, logs):
        seen.extend((logs["twice"] - logs["same"])[:, 0].tolist())

    callback = keras.callbacks.LambdaCallback(on_predict_batch_end=see)
    model.predict(x, batch_size=4, callbacks=[callback], verbose=0)
    assert seen == x[:, 0].tolist()


def test_a_step_that_calls_python_is_an_error(strategy):
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), Printing()])
    message = r"calls no Python(.|\n)*host_callbacks(.|\n)*what a worker returns"
    with pytest.raises(kd.errors.StructureTypeError, match=message):
        model.predict(np.ones((4, 1)), verbose=0)


def test_several_workers_train(strategy):
    """Every step is applied once, and the model learns."""
    x, y = table(512)
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = network()
    history = model.fit(x, y, batch_size=16, epochs=4, verbose=0).history
    assert int(model.optimizer.iterations.numpy()) == 4 * 32
    assert history["loss"][-1] < 0.7 * history["loss"][0]
    assert sum(worker.steps for worker in strategy.cluster.workers) == 4 * 32
    assert all(worker.steps for worker in strategy.cluster.workers)


class Largest(keras.metrics.Metric):
    """A metric that is no sum."""

    def __init__(self, name: str = "largest") -> None:
        super().__init__(name=name)
        self.value = self.add_variable((), "zeros", name="value")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.value.assign(keras.ops.maximum(self.value, keras.ops.max(y_true)))

    def result(self) -> Any:
        return self.value.value


def test_a_metric_that_is_no_sum(strategy):
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), layers.Dense(1)])
        model.compile("sgd", "mse", metrics=[Largest()])
    x = np.arange(30.0, dtype="float32")[::-1, None].copy()
    with pytest.raises(kd.errors.StructureTypeError, match=r"largest/value(.|\n)*Fix"):
        model.fit(x, x, batch_size=7, verbose=0)
    assert model.evaluate(x, x, batch_size=7, verbose=0)[1] == 29.0


class Latest(Largest):
    """A metric of the last batch."""

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.value.assign(keras.ops.mean(y_true))


def test_a_metric_of_the_last_batch(strategy):
    """Which is not that of the worker that comes last."""
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), layers.Dense(1)])
        model.compile("sgd", "mse", metrics=[Latest("latest")])
    x = np.arange(32.0, dtype="float32")[:, None]
    with pytest.raises(kd.errors.StructureTypeError, match=r"latest/value(.|\n)*Fix"):
        model.fit(x, x, batch_size=8, verbose=0)
    assert model.evaluate(x, x, batch_size=8, verbose=0)[1] == 27.5


@pytest.mark.parametrize("num_workers", [1, 2])
def test_logs_of_a_batch_are_those_of_whole_steps(make, num_workers):
    """Every loss is 1: so is the mean of any steps, and nobody sees that of none."""
    with make(num_workers).scope():
        model = keras.Sequential(
            [keras.Input((4,)), layers.Dense(1, kernel_initializer="zeros")]
        )
        model.compile(keras.optimizers.SGD(0.0), "mse", metrics=["mae"])
    seen = []

    class Notes(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            assert logs is not None
            seen.append((float(logs["loss"]), float(logs["mae"])))

        def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
            assert logs is not None
            seen.append((float(logs["loss"]), float(logs["mae"])))

    x, y = np.ones((40, 4)), np.ones(40)
    model.fit(x, y, batch_size=4, epochs=2, verbose=0, callbacks=[Notes()])
    assert len(seen) == 20
    model.evaluate(x, y, batch_size=4, verbose=0, callbacks=[Notes()])
    assert len(seen) == 30
    assert set(seen) == {(1.0, 1.0)}


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_loss_that_is_no_number_is_seen_in_its_epoch(make, num_workers):
    """When the steps that were under way beside it have ended."""
    with make(num_workers).scope():
        model = keras.Sequential([keras.Input((4,)), layers.Dense(1)])
        model.compile("sgd", "mse")
    x = np.ones((50, 4), "float32")
    model.fit(x, x[:, 0], batch_size=2, verbose=0)
    x[12] = np.nan
    steps = []
    count = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: steps.append(batch)
    )
    callbacks = [count, keras.callbacks.TerminateOnNaN()]
    run = model.fit(
        x,
        x[:, 0],
        batch_size=2,
        epochs=3,
        shuffle=False,
        verbose=0,
        callbacks=callbacks,
    )
    assert len(run.epoch) == 1
    assert len(steps) <= 9 or num_workers > 1  # One may be slow.


@pytest.mark.parametrize("method", ["fit", "evaluate", "predict", "schedule", "join"])
def test_nothing_waits_for_a_strategy_that_is_closed(make, method):
    strategy = make()
    coordinator = kd.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), layers.Dense(1)])
        model.compile("sgd", "mse")
    x = np.ones((8, 1), "float32")
    model.fit(x, x, verbose=0)
    strategy.close()
    if method == "join":
        assert coordinator.done()
        coordinator.join()  # There is nothing to wait for.
        return
    calls = {
        "fit": lambda: model.fit(x, x, verbose=0),
        "evaluate": lambda: model.evaluate(x, x, verbose=0),
        "predict": lambda: model.predict(x, verbose=0),
        "schedule": lambda: coordinator.schedule(lambda: keras.ops.ones(2)),
    }
    with pytest.raises(kd.errors.UnavailableError, match=r"closed(.|\n)*before strat"):
        calls[method]()


def test_a_metric_that_is_no_sum_with_one_worker(one_worker):
    def build() -> keras.Model:
        model = keras.Sequential([keras.Input((6,)), layers.Dense(1)])
        model.compile("sgd", "mse", metrics=[Largest()])
        return model

    equals_one_device(one_worker, build, fit_only(X, Y, batch_size=4))


def test_callbacks_see_and_change_the_training(strategy):
    seen = []

    class Notes(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            seen.append(dict(logs))

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.model.optimizer.learning_rate = 0.0
            if epoch == 2:
                self.model.stop_training = True

    x, y = table(64)
    with strategy.scope():
        model = network()
    rates = []
    schedule = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: rates.append(
            float(model.optimizer.learning_rate)
        )
    )
    history = model.fit(
        x, y, batch_size=8, epochs=9, verbose=0, callbacks=[Notes(), schedule]
    ).history
    assert len(history["loss"]) == 3
    assert rates == pytest.approx([0.02, 0.0, 0.0])
    assert len(seen) == 24
    assert set(seen[0]) == set(history)
    weights = model.get_weights()
    model.fit(x, y, batch_size=8, verbose=0)  # With a learning rate of zero.
    np.testing.assert_array_equal(weights[0], model.get_weights()[0])


class OwnStep(keras.Model):
    """A `train_step` of the user's own, with logs of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = layers.Dense(3)

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def train_step(self, state: Any, data: Any) -> Any:
        logs, state = super().train_step(state, data)
        return {**logs, "rows": np.float32(1) * data[0].shape[0]}, state


class CountingStep(OwnStep):
    """One that looks into a metric's variables by itself."""

    def train_step(self, state: Any, data: Any) -> Any:
        logs, state = super().train_step(state, data)
        return {**logs, "seen": state[3][1] + 0}, state  # The loss' count.


@pytest.mark.parametrize("step", [OwnStep, CountingStep])
def test_logs_of_a_step_of_the_users_own(strategy, step):
    """Its own are of the last step, and metrics' of the epoch, whoever had them."""
    with strategy.scope():
        model = step()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.0), loss, metrics=["accuracy"])
    for _ in range(3):
        history = model.fit(X, Y, batch_size=3, epochs=2, shuffle=False, verbose=0)
        found = history.history
        assert found["rows"] == [1.0, 1.0]
        assert found.get("seen", [22.0, 22.0]) == [22.0, 22.0]
        expected = model.evaluate(X, Y, verbose=0, return_dict=True)
        for name in ("loss", "accuracy"):
            np.testing.assert_allclose(found[name], [expected[name]] * 2, rtol=1e-5)


def test_models_are_saved_and_loaded(strategy, tmp_path):
    with strategy.scope():
        model = network()
    model.fit(X, Y, batch_size=6, verbose=0)
    model.save(tmp_path / "model.keras")
    plain = keras.saving.load_model(tmp_path / "model.keras")
    for ours, theirs in zip(model.weights, plain.weights, strict=True):
        np.testing.assert_array_equal(ours.numpy(), theirs.numpy(), ours.path)
    plain.fit(X, Y, batch_size=6, verbose=0)
    plain.save_weights(tmp_path / "plain.weights.h5")
    model.load_weights(tmp_path / "plain.weights.h5")
    np.testing.assert_allclose(
        model.predict(X, verbose=0), plain.predict(X, verbose=0), rtol=1e-6
    )
    assert model.optimizer.iterations.numpy() == plain.optimizer.iterations.numpy()


def test_train_on_batch(one_worker):
    def run(model: keras.Model) -> Any:
        return [model.train_on_batch(X[:8], Y[:8], return_dict=True) for _ in range(3)]

    equals_one_device(one_worker, network, run)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("parts", [2, 3])
def test_divided_variables(cluster, parts):
    """Their parts are on both servers, and are put together."""

    def partitioner(shape: Any, dtype: Any) -> list[int]:
        return [min(parts, shape[0]), *[1] * (len(shape) - 1)]

    strategy = kd.ParameterServerStrategy(cluster.cluster_resolver, partitioner)
    strategy.cluster.workers[1].close(False)
    try:
        equals_one_device(
            strategy,
            lambda: classifier(make_optimizer("Adam")),
            fit_only(X, Y, batch_size=8),
        )
    finally:
        strategy.close()


def test_loss_scaling_is_refused(strategy):
    with strategy.scope():
        model = classifier(
            keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
        )
    with pytest.raises(kd.errors.StructureTypeError, match=r"mixed_bfloat16"):
        model.fit(X, Y, verbose=0)


@pytest.mark.parametrize("local_steps", [1, 2])
def test_a_layer_is_frozen_without_compiling(make, local_steps):
    with make(local_steps=local_steps).scope():
        model = network()
    model.fit(X, Y, batch_size=6, verbose=0)
    model.layers[0].trainable = False
    with pytest.raises(kd.errors.ValueStructureError, match=r"changed(.|\n)*compile\("):
        model.fit(X, Y, batch_size=6, verbose=0)
    assert len(model.predict(X, verbose=0)) == len(X)
    model.layers[0].trainable = True
    model.fit(X, Y, batch_size=6, verbose=0)
    model.layers[0].trainable = False
    model.compile("sgd", model.loss)
    frozen = model.layers[0].get_weights()
    model.fit(X, Y, batch_size=6, verbose=0)
    np.testing.assert_array_equal(frozen[0], model.layers[0].get_weights()[0])


def test_the_summary_says_where_steps_run(strategy):
    with strategy.scope():
        model = network()
    model.fit(X, Y, batch_size=6, verbose=0)
    assert "scheduled on a worker" in str(strategy.summary(model))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gradients_travel_in_16_bits(make, dtype):
    """Rounded once, on the worker; the update is made in the weight's own dtype."""
    gradients = [
        np.random.default_rng(0).normal(size=shape).astype("float32")
        for shape in ((300, 7), (5,))
    ]
    traffic = {}
    for communication_dtype in (None, dtype):
        strategy = make(1, communication_dtype=communication_dtype)
        coordinator = kd.coordinator.ClusterCoordinator(strategy)
        with strategy.scope():
            weights = [keras.Variable(np.ones(g.shape, "float32")) for g in gradients]
            table = keras.Variable(np.ones((50, 4), "float32"))
            optimizer = keras.optimizers.SGD(0.1)
            optimizer.build([*weights, table])

        def step(gradients: Any) -> None:
            ids = keras.ops.arange(3)
            loss = kd.value_and_grad(
                lambda: keras.ops.sum(keras.ops.take(table, ids, 0) * 1.001), [table]
            )
            optimizer.apply([*gradients, *loss()[1]], [*weights, table])

        coordinator.schedule(step, (gradients,)).fetch()
        before = strategy.bytes_of_servers
        for _ in range(4):
            coordinator.schedule(step, (gradients,)).fetch()
        traffic[communication_dtype] = strategy.bytes_of_servers - before
        narrow = np.dtype(communication_dtype or "float32")
        for weight, gradient in zip(weights, gradients, strict=True):
            expected = np.ones_like(gradient)
            for _ in range(5):
                expected -= np.float32(0.1) * gradient.astype(narrow).astype("float32")
            # What is left of 1 may be next to nothing: rounding of 1 remains.
            np.testing.assert_allclose(weight.numpy(), expected, rtol=1e-6, atol=5e-7)
        rounded = np.float32(1.001).astype(narrow).astype("float32")
        changed = np.full((3, 4), 1 - 0.5 * rounded)
        np.testing.assert_allclose(table.numpy()[:3], changed, rtol=1e-5)
        strategy.close()
    saved = 4 * 2 * (300 * 7 + 5 + 3 * 4)
    assert traffic[None] - traffic[dtype] == saved
