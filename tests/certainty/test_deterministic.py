"""`deterministic=True`: the same bits on any number of devices and processes."""

import os
import pathlib
import random
import subprocess
import sys
import warnings

import jax
import keras
import numpy as np
import pytest
from keras import layers, ops

import keras_distribute as kd
from keras_distribute.callbacks import same_bits
from keras_distribute.training.steps.plan import plan_of
from tests.support import mirrored

from . import drawn_runs, training

EVERY_CASE = bool(os.environ.get("EVERY_CASE"))
# On how many devices, and the draws: some to a child, which takes long to start. Those
# with few programs to compile; 5 and 97 differed once.
DRAWS = [
    ("1,8", [5, 10, 42, 97]),
    ("1,4", [4, 98, 119, 132]),
    ("1,2", [12, 59, 64, 129]),
]
if EVERY_CASE:
    DRAWS = [("1,2,4,8,2x4", list(range(i, i + 10))) for i in range(0, 200, 10)]
ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("devices", "seeds"), DRAWS, ids=str)
def test_drawn_trainings_have_the_same_bits(devices, seeds):
    """Compiled as for users, unlike what runs in the tests' own processes."""
    unlike = ("JAX_DISABLE_MOST_OPTIMIZATIONS", "XLA_FLAGS", "TESTS_XLA_FLAGS")
    environment = {k: v for k, v in os.environ.items() if k not in unlike}
    draws = "tests.certainty.drawn_runs", devices, *map(str, seeds)
    done = subprocess.run(
        [sys.executable, "-m", *draws],
        cwd=ROOT,
        env=environment | {"KERAS_BACKEND": "jax"},
        capture_output=True,
        text=True,
        timeout=880,
    )
    lines = [line for line in done.stdout.splitlines() if ": model=" in line]
    assert len(lines) == len(seeds), done.stderr[-2000:]
    assert [line for line in lines if not line.startswith("same")] == []
    assert done.returncode == 0


class Stopped(Exception):
    pass


class StopsAt(keras.callbacks.Callback):
    def __init__(self, batch):
        self.left = batch

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if self.left == 0:
            raise Stopped


def deterministic(devices, **options):
    return mirrored(devices, deterministic=True, **options)


def moved(folder, choice):
    """A training of 12 steps that goes on from one number of devices to another, where
    it was stopped.
    """
    callbacks, stops = [kd.callbacks.BackupAndRestore(folder, save_freq=1)], []
    for devices in (1, 8, 2, 4):
        model = training.built(deterministic(devices))
        last = devices == 4
        stop = [] if last else [StopsAt(choice.randint(1, 3))]
        try:
            training.fitted(model, *callbacks, *stop, epochs=2)
        except Stopped:
            stops.append(int(model.optimizer.iterations))
    assert len(stops) == 3 and int(model.optimizer.iterations) == 12
    return model


@pytest.mark.timeout(240)
@pytest.mark.sampled(20)
@pytest.mark.parametrize("seed", range(20))
def test_a_training_that_moves_has_the_bits_of_one_that_stays(seed, tmp_path):
    model = training.built(deterministic(2))
    training.fitted(model, epochs=2)
    assert training.bits_of(moved(tmp_path, random.Random(seed))) == training.bits_of(
        model
    )


def test_a_fit_that_goes_on_under_other_conditions_warns(tmp_path, monkeypatch):
    for here, stops in (("32", 2), ("32", 2), ("4", None)):
        monkeypatch.setattr(kd.config._chosen, "pool_size", int(here))
        model = training.built(deterministic(2))
        backup = kd.callbacks.BackupAndRestore(tmp_path, save_freq=1)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                training.fitted(model, backup, *([StopsAt(stops)] if stops else []))
            except Stopped:
                assert stops
        said = [str(each.message) for each in said if "deterministic" in str(each)]
        assert len(said) == (here == "4")
    pool = "threads in XLA's pool (NPROC)"
    assert f"Saved with {pool}: 32; here {pool}: 4. Its numbers are right" in said[0]


@pytest.mark.parametrize("option", [{"run_eagerly": True}, {"jit_compile": False}])
def test_steps_that_are_not_compiled_have_the_same_bits(option):
    found = []
    for devices in (1, 4):
        model = training.built(deterministic(devices), compiled=option)
        history = training.fitted(model).history
        predicted = model.predict(training.X, batch_size=8, verbose=0)
        found.append([*training.bits_of(model), str(history), predicted.tobytes()])
    assert found[0] == found[1]


def test_conditions_without_the_promise_of_bits():
    assert same_bits.conditions(training.built(mirrored(2))) == {}
    assert "replicas" in same_bits.conditions(training.built(deterministic(2)))


def bits_in_a_process(devices):
    """Of a deterministic training over all processes."""
    training.without_tensorflow()
    strategy = kd.MultiWorkerMirroredStrategy(deterministic=True)
    assert strategy.replica_mesh.mesh.size == devices
    model = training.built(strategy)
    history = training.fitted(model, epochs=2).history
    predicted = model.predict(training.X, batch_size=8, verbose=0)
    return [*training.bits_of(model), str(history), predicted.tobytes()]


@pytest.mark.timeout(240)
def test_processes_have_the_bits_of_one():
    model = training.built(deterministic(1))
    history = training.fitted(model, epochs=2).history
    predicted = model.predict(training.X, batch_size=8, verbose=0)
    alone = [*training.bits_of(model), str(history), predicted.tobytes()]
    environment = {"NPROC": os.environ["NPROC"]}
    for found in kd.testing.run_in_processes(
        bits_in_a_process, 2, 4, cpu_devices=2, timeout=200, environment=environment
    ):
        assert found == alone


@pytest.mark.sampled(1)
@pytest.mark.parametrize("devices", [1, 2, 8])
def test_a_tpu_strategy_has_the_same_bits(devices):
    """Of replicas with one logical device each; of several it is refused."""
    expected = training.built(deterministic(4))
    training.fitted(expected)
    resolver = kd.cluster_resolver.TPUClusterResolver("cpu")
    topology = kd.tpu.experimental.initialize_tpu_system(resolver)
    build = kd.tpu.experimental.DeviceAssignment.build
    assigned = build(topology, [1, 1, 1, 1], num_replicas=devices)
    strategy = kd.TPUStrategy(resolver, assigned, deterministic=True)
    assert strategy.num_replicas_in_sync == 8
    assert strategy.replica_mesh.mesh.size == devices
    model = training.built(strategy)
    training.fitted(model)
    assert training.bits_of(model) == training.bits_of(expected)
    assigned = build(topology, [1, 2, 1, 1], num_replicas=2)
    with pytest.raises(kd.errors.DeviceError, match="on one device each.*\n.*2 logi"):
        kd.TPUStrategy(resolver, assigned, deterministic=True)


def taught(strategy):
    """What a student ends with, whose loss has a teacher that is no part of it, with
    statistics of each replica.
    """
    x = np.linspace(-1, 1, 16 * 6, dtype="float32").reshape(16, 6) ** 3
    keras.utils.set_random_seed(0)
    with strategy.scope():
        norm = layers.BatchNormalization(synchronized=True)
        teacher = keras.Sequential([keras.Input((6,)), norm, layers.Dense(3)])
        rows = kd.ArrayDataset(x, batch_size=16)
        for batch in strategy.experimental_distribute_dataset(rows):
            strategy.run(lambda x: ops.sum(teacher(x, training=True)), (batch,))
        student = keras.Sequential([keras.Input((6,)), layers.Dense(3)])
        student.compile("sgd", lambda x, y: (teacher(x) - y) ** 2)
    history = student.fit(x, x, batch_size=16, epochs=2, verbose=0).history["loss"]
    return [*history, student.evaluate(x, x, batch_size=16, verbose=0)]


def test_variables_outside_of_a_model_are_constants_of_its_steps():
    expected = taught(kd.get_strategy())
    found = taught(deterministic(4))
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert taught(deterministic(1)) == found


class OwnLayer(layers.Layer):
    """One that nobody knows, whose numbers depend on how many rows it is given."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 8))

    def call(self, x, training=False):
        rows = ops.shape(x)[0]
        if training:
            x = x * keras.random.uniform(ops.shape(x), seed=self.seed)
        return ops.tanh(x @ self.kernel) * rows / 16

    def __init__(self):
        super().__init__()
        self.seed = keras.random.SeedGenerator(3)


class OwnStep(keras.Model):
    """A model with its own `call` and `train_step`, for which no row is special."""

    def __init__(self):
        super().__init__()
        self.own, self.head = OwnLayer(), layers.Dense(4)

    def call(self, x, training=False):
        return self.head(self.own(x, training=training))

    def train_step(self, state, data):
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        trained, others, slots, metrics = state

        def loss_of(trained):
            y_pred, new = self.stateless_call(trained, others, x, training=True)
            loss = keras.losses.sparse_categorical_crossentropy(
                y, y_pred, from_logits=True
            )
            return ops.sum(loss * weight) / ops.sum(weight), new

        (loss, new), grads = jax.value_and_grad(loss_of, has_aux=True)(trained)
        trained, slots = self.optimizer.stateless_apply(slots, grads, trained)
        return {"loss": loss}, (trained, new, slots, metrics)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("batch", [16, 11], ids=["even", "uneven"])
@pytest.mark.parametrize("name", ["mlp", "lstm", "embedding", "transformer", OwnStep])
def test_the_numbers_are_those_of_one_device(name, batch, monkeypatch):
    """Of all rows, whatever layer or step it is, masks of dropout included; but for
    batch normalization.
    """
    monkeypatch.setattr(drawn_runs, "Subclassed", OwnStep)
    name = "subclassed" if name is OwnStep else name
    drawn = drawn_runs.Drawn(0)
    drawn.model, drawn.policy, drawn.accumulation = name, "float32", None
    found = []
    for strategy in (deterministic(2), kd.get_strategy()):
        model = drawn.compiled_on(strategy)
        x, y, weight = drawn_runs.data_of(name, 37)
        options = {"batch_size": batch, "verbose": 0, "shuffle": False}
        history = model.fit(x, y, sample_weight=weight, epochs=2, **options).history
        del options["shuffle"]
        evaluated = model.evaluate(x, y, sample_weight=weight, **options)
        predicted = model.predict(x, **options)
        if not found:
            assert "one replica's rows after" in str(plan_of(model, strategy))
            assert "whole" not in str(plan_of(model, strategy))
        weights = [v.numpy() for v in model.trainable_variables]
        found.append([history["loss"], evaluated, predicted, *weights])
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-5)


def softmax_of_rows():
    reshaped = [layers.Flatten(), layers.Dense(1), layers.Reshape(())]
    return keras.Sequential([keras.Input((3, 8)), *reshaped, layers.Softmax()])


def activation_of_rows():
    reshaped = [layers.Flatten(), layers.Dense(1), layers.Reshape(())]
    act = layers.Activation("softmax")
    return keras.Sequential([keras.Input((3, 8)), *reshaped, act])


def attention_over_rows():
    x = keras.Input((3, 8))
    attend = layers.MultiHeadAttention(2, 4, attention_axes=(0,), dropout=0.1)
    return keras.Model(x, attend(x, x))


def constant_of_rows():
    x = keras.Input(batch_shape=(16, 3, 8))
    return keras.Model(x, x * np.linspace(0, 1, 16, dtype="float32")[:, None, None])


def initial_state_of_rows():
    x, state = keras.Input((3, 8)), np.ones((16, 2), "float32")
    return keras.Model(x, layers.LSTM(2)(x, initial_state=[state, state]))


def mask_of_rows():
    x, mask = keras.Input((3, 8)), np.tril(np.ones((16, 3, 3), bool))
    return keras.Model(x, layers.MultiHeadAttention(2, 4)(x, x, attention_mask=mask))


def products_of_rows():
    x = keras.Input(batch_shape=(8, 8))
    return keras.Model(x, layers.EinsumDense("ab,bc->ca", (8,))(x))


@pytest.mark.parametrize(
    "build",
    [
        softmax_of_rows,
        activation_of_rows,
        attention_over_rows,
        constant_of_rows,
        initial_state_of_rows,
        mask_of_rows,
        products_of_rows,
    ],
    ids=lambda build: build.__name__,
)
def test_built_in_layers_that_mix_rows_see_all_of_them(build):
    shape = (8, 8) if build is products_of_rows else (16, 3, 8)
    x = np.random.default_rng(0).normal(size=shape).astype("float32")
    found = []
    for strategy in (deterministic(2), kd.get_strategy()):
        keras.utils.set_random_seed(0)
        with strategy.scope():
            model = build()
            model.compile("sgd", "mse")
        predicted = model.predict(x, batch_size=16, verbose=0)
        y = np.zeros_like(predicted)
        loss = model.evaluate(x, y, batch_size=len(y), verbose=0)
        found.append((predicted, loss))
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("equation", ["abc,cd->abd", "...x,xy->...y", "ab,bc->ac"])
def test_products_of_each_row_are_made_row_by_row(equation):
    shape, rank = {"abc,cd->abd": ((None, 4), 3)}.get(equation, (4, 2))
    strategy = deterministic(2)
    with strategy.scope():
        inside = [keras.Input((2, 3) if rank == 3 else (3,))]
        model = keras.Sequential([*inside, layers.EinsumDense(equation, shape)])
        model.compile("sgd", "mse")
    x = np.ones((16, *model.input_shape[1:]), "float32")
    model.fit(x, np.zeros_like(model.predict(x, verbose=0)), verbose=0)
    assert "whole" not in str(plan_of(model, strategy))


def test_the_plan_says_what_each_device_computes():
    strategy = deterministic(2)
    model = training.built(strategy)
    said = (
        "The training step computes the gradients of one replica's rows after the "
        "other's, and has the same bits on any number of devices"
    )
    unless = ", unless an operation mixes rows, which the first batch shows"
    assert str(plan_of(model, strategy)) == f"{said}{unless}."
    training.fitted(model)
    assert str(plan_of(model, strategy)) == f"{said}."


class Sorted(layers.Layer):
    def call(self, x):
        return ops.sort(x, axis=0)


@pytest.mark.parametrize("devices", [1, 4])
def test_what_mixes_many_rows_is_computed_whole(devices):
    strategy, x = deterministic(devices), np.random.default_rng(0).normal(size=(16, 8))
    found = []
    for where in (strategy, kd.get_strategy()):
        keras.utils.set_random_seed(0)
        with where.scope():
            inside = [layers.Dense(8192), Sorted(name="sorted"), layers.Dense(1)]
            model = keras.Sequential([keras.Input((8,)), *inside])
            model.compile(keras.optimizers.SGD(1e-3), "mse")
        for rows in (16, 13):
            model.fit(x[:rows], x[:rows, :1], batch_size=rows, verbose=0)
        if not found:
            assert str(plan_of(model, strategy)) == (
                "The training step is computed whole on each device, and has the same "
                "bits on any number of devices, because the operation `sort` in "
                "`sorted` mixes rows. Faster: operations on each row alone."
            )
        found.append(model.predict(x, verbose=0))
    np.testing.assert_allclose(*found, rtol=2e-4, atol=2e-5)


def test_replicas_and_devices_are_shown():
    strategy = deterministic(2)
    assert strategy.num_replicas_in_sync == 8
    text = strategy.summary(batch_size=37).text()
    assert "8 replicas on 2 devices" in text
    lines = [line.split() for line in text.splitlines()]
    assert [line[0] for line in lines if "cpu:0" in line or "cpu:1" in line] == [
        "0-3",
        "4-7",
    ]
