"""What `scripts/versions` tries of an installed wheel: the package comes from there,
has all its files, and trains on four devices, in a loop and in two processes, with the
numbers of one device.
"""

from __future__ import annotations

import importlib.metadata
import os
import pathlib
import subprocess
import sys
import textwrap

import keras_distribute as kd

kd.config.set_cpu_devices(4)

import keras
import numpy as np
import pytest

RNG = np.random.default_rng(0)
X = RNG.normal(size=(70, 8)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


def model(dropout: float = 0.2) -> keras.Model:
    keras.utils.set_random_seed(1)
    made = keras.Sequential(
        [
            keras.Input((8,)),
            # A bias before a BatchNormalization has no gradient but rounding.
            keras.layers.Dense(16, use_bias=False),
            keras.layers.BatchNormalization(synchronized=True),
            keras.layers.Dropout(dropout),
            keras.layers.Dense(1),
        ]
    )
    made.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    return made


def assert_same(ours: keras.Model, theirs: keras.Model) -> None:
    pairs = zip(ours.get_weights(), theirs.get_weights(), strict=True)
    for a, b in pairs:
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_it_is_the_installed_package() -> None:
    place = pathlib.Path(kd.__file__)
    assert "site-packages" in place.parts
    assert importlib.metadata.version("keras-distribute") == kd.__version__
    assert (place.parent / "py.typed").exists()


@pytest.mark.parametrize("steps", [1, 4])
def test_fit_has_the_numbers_of_one_device(steps: int) -> None:
    strategy = kd.MirroredStrategy()
    assert strategy.num_replicas_in_sync == 4
    with strategy.scope():
        ours = model()
        ours.compile(ours.optimizer, "mse", steps_per_execution=steps)
    plain = model()
    for each in (ours, plain):
        each.fit(X, Y, batch_size=32, epochs=2, shuffle=False, verbose=0)
    assert_same(ours, plain)
    predictions = [each.predict(X, verbose=0) for each in (ours, plain)]
    np.testing.assert_allclose(*predictions, atol=1e-5)


def test_a_loop_has_the_numbers_of_one_device() -> None:
    strategy = kd.MirroredStrategy()
    with strategy.scope():
        ours = model(dropout=0)
    loss_of = keras.losses.MeanSquaredError()

    def step(x: object, y: object) -> object:
        variables = ours.trainable_variables
        loss, gradients = kd.value_and_grad(
            lambda x, y: loss_of(y, ours(x, training=True)), variables
        )(x, y)
        ours.optimizer.apply(gradients, variables)
        return loss

    data = kd.ArrayDataset((X, Y), batch_size=32)
    for batch in strategy.experimental_distribute_dataset(data):
        strategy.run(step, args=batch)
    plain = model(dropout=0)
    plain.fit(X, Y, batch_size=32, shuffle=False, verbose=0)
    assert_same(ours, plain)


def test_files(tmp_path: pathlib.Path) -> None:
    with kd.MirroredStrategy().scope():
        ours = model()
        ours.fit(X, Y, batch_size=32, verbose=0)
        ours.save(tmp_path / "model.keras")
        checkpoint = kd.Checkpoint(model=ours)
        path = checkpoint.save(str(tmp_path / "checkpoint"))
    assert_same(keras.models.load_model(tmp_path / "model.keras"), ours)
    with kd.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        other = model()
        kd.Checkpoint(model=other).restore(path)
    assert_same(other, ours)


def test_two_processes(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent(
            """
            import keras_distribute as kd

            strategy = kd.MultiWorkerMirroredStrategy()
            import keras
            import numpy as np

            with strategy.scope():
                model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
                model.compile("sgd", "mse")
            x = np.ones((70, 8), "float32")
            model.fit(x, x[:, :1], batch_size=32, verbose=0)
            kd.print_on_chief(kd.process_count(), strategy.num_replicas_in_sync)
            """
        )
    )
    command = [sys.executable, "-m", "keras_distribute.launch", "debug", str(script)]
    result = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=180,
        env=os.environ | {"PYTHONFAULTHANDLER": "1"},
    )
    # What the processes write, errors too, is in the launcher's standard output.
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
    assert "2 2" in result.stdout
