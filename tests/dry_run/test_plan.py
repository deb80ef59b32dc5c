"""The program of a dry run is the one that `fit` runs."""

import jax
import numpy as np
import pytest

import keras_distribute as kd
from keras_distribute.devices.mesh import ReplicaMesh
from keras_distribute.dry_run import examples, planning
from keras_distribute.training import batches
from keras_distribute.training.steps.compiled_step import CompiledStep
from tests import logical
from tests.dry_run import models

DEVICES = [f"cpu:{i}" for i in range(4)]


def ran(model, x, y, monkeypatch):
    """The text of a `fit`'s programs, traced from what they are called with."""
    texts = []

    original = CompiledStep._launch

    def noting(self, holder, program, data):
        texts.append(program.lowered.as_text())
        return original(self, holder, program, data)

    with monkeypatch.context() as patch:
        patch.setattr(CompiledStep, "_launch", noting)
        model.fit(
            x,
            y,
            batch_size=len(x) // model.steps_per_execution,
            epochs=1,
            shuffle=False,
            verbose=0,
        )
    return texts


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "rows", "divided"),
    [
        ("mlp", 8, False),
        ("mlp", 8, True),
        ("mlp", 10, False),
        ("cnn", 8, False),
        ("deep", 8, False),
        ("deep", 8, True),
        ("accumulating", 8, False),
        ("several_steps", 8, False),
    ],
)
def test_the_program_is_that_of_fit(name, rows, divided, monkeypatch):
    strategy = kd.MirroredStrategy(DEVICES, shard_optimizer_state=divided)
    with strategy.scope():
        model = getattr(models, name)()
    shape = models.SHAPES.get(name, (16,))
    count = rows * model.steps_per_execution
    x, y = np.zeros((count, *shape), "float32"), np.zeros(count, "int32")
    (expected,) = set(ran(model, x, y, monkeypatch))

    # Of a model that is made elsewhere, on one device.
    home = kd.MirroredStrategy(["cpu:7"], shard_optimizer_state=divided)
    with home.scope():
        again = getattr(models, name)()
    example = examples.batch_of(again, (x[:rows], y[:rows]))
    planning.build(again, home, example)
    plan = planning.training_step(
        again, home, ReplicaMesh.of(jax.devices("cpu")[:4]), example
    )
    assert plan.num_steps == model.steps_per_execution
    assert plan.traced.lower().as_text() == expected
    assert home.num_replicas_in_sync == 1  # As before.


@pytest.mark.sampled(2)
@pytest.mark.parametrize("num_logical", [2, 4])
def test_the_program_of_logical_devices_is_that_of_fit(num_logical, monkeypatch):
    with logical.tpu_strategy(num_logical, layout_map=logical.HIDDEN).scope():
        model = models.mlp()
    x, y = np.zeros((8, 16), "float32"), np.zeros(8, "int32")
    (expected,) = set(ran(model, x, y, monkeypatch))
    home = logical.tpu_strategy(num_logical, layout_map=logical.HIDDEN)
    with home.scope():
        again = models.mlp()
    example = examples.batch_of(again, (x, y))
    planning.build(again, home, example)
    plan = planning.training_step(again, home, home.replica_mesh, example)
    assert plan.traced.lower().as_text() == expected


@pytest.mark.sampled(3)
@pytest.mark.parametrize("rows", [8, 10, 3])
def test_a_batch_gets_the_form_that_it_is_placed_in(rows):
    mesh = ReplicaMesh.of(jax.devices("cpu")[:4])
    batch = {
        "x": np.zeros((rows, 3)),
        "weight": np.float32(2),
        "y": np.zeros((rows,), "int64"),
    }
    real = batches.place(batch, mesh)
    forms = planning.placed_form(
        jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), batch), mesh
    )
    assert (forms.rows, forms.spread) == (real.rows, real.spread)
    for form, array in zip(
        jax.tree.leaves(forms.data), jax.tree.leaves(real.data), strict=True
    ):
        assert (form.shape, form.dtype, form.sharding) == (
            array.shape,
            array.dtype,
            array.sharding,
        )


def test_a_model_can_train_before_and_after():
    strategy = kd.MirroredStrategy(DEVICES)
    with strategy.scope():
        model = models.mlp()
    x, y = (
        np.random.default_rng(0).normal(size=(16, 16)).astype("float32"),
        np.zeros(16, "int32"),
    )
    model.fit(x, y, batch_size=8, verbose=0)
    before = model.get_weights()
    report = kd.dry_run(model, 8, topology="cpu:8")
    assert report.num_devices == 8
    for a, b in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    model.fit(x, y, batch_size=8, verbose=0)
    assert len(model.trainable_variables[0].value.sharding.device_set) == 4


def test_code_that_is_traced_sees_the_devices_that_it_is_for():
    seen = []

    class Asking(models.keras.layers.Layer):
        def call(self, x):
            seen.append(len(jax.devices()))
            return x

    def build():
        model = models.keras.Sequential(
            [models.keras.Input((4,)), Asking(), models.layers.Dense(1)]
        )
        model.compile("sgd", "mse")
        return model

    kd.dry_run(build, 8, topology="cpu:2")
    assert seen[-1] == 2
    assert len(jax.devices()) == 8
