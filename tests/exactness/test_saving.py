"""Files: what a strategy saves is an ordinary Keras file, and training goes on from it
as if nothing had happened.

One run without interruption, on one device, is the reference for all: half of it is
trained somewhere, saved, loaded somewhere else, and the other half is trained there.
Somewhere is 0 (plain Keras), 1, 2, 4 or 8 replicas.
"""

from __future__ import annotations

import contextlib
import zipfile
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

from tests.checkpoint.support import scope

from . import harness
from .harness import table

pytestmark = pytest.mark.timeout(120)

X, Y = table(44)
PLACES = (0, 1, 2, 4, 8)


def build() -> keras.Model:
    """A model with the kinds of state that Keras saves: moving statistics, momentum,
    accumulated gradients.

    Without `Dropout`: plain Keras 3.15 does not save seeds. Without `use_ema`: it
    cannot fit such a model a second time, the average and its weight then share a
    buffer that is donated twice.
    """
    normalization = layers.BatchNormalization(
        momentum=0.8, synchronized=True, name="normalization"
    )
    hidden = layers.Dense(6, use_bias=False, name="hidden")
    model = keras.Sequential(
        [keras.Input((6,)), hidden, normalization, layers.Dense(3, name="head")]
    )
    optimizer = keras.optimizers.Adam(0.02, epsilon=1e-2, gradient_accumulation_steps=2)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=loss, metrics=["accuracy"])
    return model


def train(model: keras.Model) -> dict[str, Any]:
    """One epoch of three steps, the last with 12 rows."""
    return model.fit(X, Y, batch_size=16, shuffle=False, verbose=0).history


def everything(model: keras.Model) -> list[tuple[str, np.ndarray]]:
    """Weights and optimizer state."""
    return harness.snapshot([*model.variables, *model.optimizer.variables])


@pytest.fixture(scope="module")
def halfway(tmp_path_factory: Any) -> dict[int, Path]:
    """For each place the folder with what a model saved there after one epoch."""
    folders = {}
    for place in PLACES:
        folders[place] = tmp_path_factory.mktemp(f"from_{place}")
        keras.utils.set_random_seed(harness.SEED)
        with scope(place):
            model = build()
        train(model)
        model.save(folders[place] / "model.keras")
        model.save_weights(folders[place] / "model.weights.h5")
    return folders


@pytest.fixture(scope="module")
def uninterrupted() -> tuple[dict[str, Any], list[tuple[str, np.ndarray]], np.ndarray]:
    """The second epoch's history, state and predictions of one device, unstopped."""
    keras.utils.set_random_seed(harness.SEED)
    model = build()
    train(model)
    history = train(model)
    return history, everything(model), model.predict(X, verbose=0)


def assert_continues(model: keras.Model, uninterrupted: Any) -> None:
    """The second epoch on the model equals the one that was never interrupted."""
    history, state, predictions = uninterrupted
    harness.assert_close_tree(train(model), history, "history")
    harness.assert_devices_agree(model)
    for (_, actual), (path, expected) in zip(everything(model), state, strict=True):
        harness.assert_close_tree(actual, expected, path)
    harness.assert_close_tree(model.predict(X, verbose=0), predictions, "predictions")


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("source", "target"), [(4, 0), (0, 4), (8, 2), (1, 8), (2, 1), (4, 4)]
)
def test_load_model_in_scope_continues(
    source: int, target: int, halfway: Any, uninterrupted: Any
) -> None:
    """`.keras` files carry optimizer state, moving statistics and accumulated gradients
    from any place to any other.
    """
    with scope(target):
        model = keras.models.load_model(halfway[source] / "model.keras")
    assert_continues(model, uninterrupted)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("source", "target", "inside"),
    [(4, 8, True), (8, 0, False), (0, 2, False), (2, 4, False)],
)
def test_load_weights_continues(
    source: int, target: int, inside: bool, halfway: Any, uninterrupted: Any
) -> None:
    """`.weights.h5` files do, too, loaded in the scope or outside it, and over a model
    that had trained before.
    """
    with scope(target):
        model = build()
    train(model)
    with scope(target) if inside else contextlib.nullcontext():
        model.load_weights(halfway[source] / "model.weights.h5")
    assert_continues(model, uninterrupted)


def test_load_into_a_fresh_model(halfway: Any, uninterrupted: Any) -> None:
    """Weights load into a model that has not trained, whose optimizer has yet to make
    its variables.
    """
    with scope(4):
        model = build()
        model.optimizer.build(model.trainable_variables)
    model.load_weights(halfway[8] / "model.weights.h5")
    assert_continues(model, uninterrupted)


def test_model_loaded_outside_any_scope_is_plain_keras(
    halfway: Any, uninterrupted: Any
) -> None:
    """A file from 8 replicas loads onto one device."""
    model = keras.models.load_model(halfway[8] / "model.keras")
    devices = {
        device for variable in model.variables for device in variable.value.devices()
    }
    assert len(devices) == 1
    assert_continues(model, uninterrupted)


def test_files_do_not_know_the_number_of_replicas(halfway: Any) -> None:
    """The same members, paths, shapes and types from every place, and no class of ours
    in the configuration.
    """
    import h5py

    listings = {}
    for place, folder in halfway.items():
        with zipfile.ZipFile(folder / "model.keras") as archive:
            names = sorted(archive.namelist())
            assert b"keras_distribute" not in archive.read("config.json")
        shapes: list[Any] = []
        with h5py.File(folder / "model.weights.h5") as file:
            file.visititems(
                lambda name, item, shapes=shapes: shapes.append(
                    (name, getattr(item, "shape", None))
                )
            )
        listings[place] = (names, shapes)
    for place in PLACES:
        assert listings[place] == listings[0], f"{place} replicas"


def test_state_in_memory_moves_between_places() -> None:
    """`get_weights`, `set_weights`, `clone_model`, `get_state_tree`: of no replica."""
    keras.utils.set_random_seed(harness.SEED)
    with scope(4):
        model = build()
    train(model)
    weights = model.get_weights()
    assert [value.shape for value in weights] == [
        tuple(variable.shape) for variable in model.weights
    ]
    plain = build()
    plain.set_weights(weights)
    harness.assert_close_tree(
        plain.predict(X, verbose=0), model.predict(X, verbose=0), "predictions"
    )
    with scope(8):
        other = build()
    other.set_weights(weights)
    harness.assert_close_tree(
        other.predict(X, verbose=0), model.predict(X, verbose=0), "predictions"
    )
    tree = model.get_state_tree(value_format="numpy_array")
    assert set(tree) >= {
        "trainable_variables",
        "non_trainable_variables",
        "optimizer_variables",
    }


def test_checkpoint_callback_saves_what_the_epoch_ended_with(tmp_path: Any) -> None:
    """`ModelCheckpoint(save_best_only=True)` on validation, as on one device."""

    def run(model: keras.Model) -> Any:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.keras"
        checkpoint = keras.callbacks.ModelCheckpoint(
            path, monitor="val_loss", save_best_only=True
        )
        options = {"batch_size": 16, "epochs": 3, "shuffle": False, "verbose": 0}
        history = model.fit(
            X, Y, validation_data=(X[:10], Y[:10]), callbacks=[checkpoint], **options
        ).history
        saved = keras.models.load_model(path)
        return {"history": history, "saved": saved.predict(X, verbose=0)}

    harness.equals_one_device(build, run)
