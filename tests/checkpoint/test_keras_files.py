"""Keras's own files, from any number of replicas to a process that knows nothing of
replicas, and back.

What `load_model` and `load_weights` do within one process, and that training goes on
from files, is in `tests/exactness/test_saving.py`.
"""

from __future__ import annotations

import os
import pathlib
import pickle
import subprocess
import sys
from typing import Any

import keras
import numpy as np
import pytest

from tests.support import without_what_is_not_named

from . import plain_keras
from .interrupting import Cut, PowerCut
from .plain_keras import BEST, FILES
from .support import SEED, assert_close, assert_same_bits, bits, scope

pytestmark = [pytest.mark.timeout(240), pytest.mark.sampled(5)]
PLACES = (1, 2, 4, 8) if os.environ.get("EVERY_CASE") else (2, 8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> pathlib.Path:
    return tmp_path_factory.mktemp("files")


@pytest.fixture(scope="module")
def saved(folder: pathlib.Path) -> dict[str, Any]:
    """What the models of each place were when their files were written, and those of a
    process without us.
    """
    seen = {}
    for place in PLACES:
        keras.utils.set_random_seed(SEED)
        with scope(place):
            model = plain_keras.build()
        seen[str(place)] = plain_keras.train_and_save(model, folder / str(place))
    command = [sys.executable, plain_keras.__file__, str(folder), *map(str, PLACES)]
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("XLA_FLAGS", "NPROC")
    }
    environment |= without_what_is_not_named(pathlib.Path(command[1]).read_text())
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=200
    )
    assert done.returncode == 0, done.stderr
    return seen | {"plain": pickle.loads((folder / "plain.pickle").read_bytes())}


def assert_equal(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    """The same variables bit for bit, and the same predictions to rounding."""
    for ours, theirs in zip(actual["variables"], expected["variables"], strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_allclose(
        actual["predictions"], expected["predictions"], rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("place", PLACES)
def test_loaded_by_plain_keras_in_another_process(
    place: int, name: str, folder: Any, saved: Any
) -> None:
    loaded = pickle.loads((folder / "loaded.pickle").read_bytes())[str(place)][name]
    # Of the first epoch: it is the one in the file that the strategy loads.
    if name == BEST:
        with scope(place):
            assert_equal(
                loaded,
                plain_keras.seen_of(plain_keras.load(folder / str(place) / name)),
            )
    else:
        assert_equal(loaded, saved[str(place)])


@pytest.mark.parametrize("name", [name for name in FILES if name != BEST])
@pytest.mark.parametrize(
    ("source", "target"), [("plain", 2), ("plain", 4), ("plain", 8), ("8", 2), ("2", 4)]
)
def test_loaded_under_a_strategy(
    source: str, target: int, name: str, folder: Any, saved: Any
) -> None:
    with scope(target):
        model = plain_keras.load(folder / source / name)
    assert_equal(plain_keras.seen_of(model), saved[source])


def plain_backup(place: int, folder: Any, cut: Cut | None = None) -> dict[str, Any]:
    """Three epochs with Keras's own `BackupAndRestore`; the variables in the end."""
    keras.utils.set_random_seed(SEED)
    x, y = plain_keras.rows()
    with scope(place):
        model = plain_keras.build()
        model.compile(keras.optimizers.Adam(0.02, epsilon=1e-2), model.loss)
    callbacks: list[Any] = (
        [] if folder is None else [keras.callbacks.BackupAndRestore(folder)]
    )
    callbacks += [] if cut is None else [cut]
    model.fit(
        x, y, batch_size=8, epochs=3, shuffle=False, verbose=0, callbacks=callbacks
    )
    return bits(model=model)


@pytest.mark.parametrize(("source", "target"), [(1, 1), (2, 2), (4, 0), (0, 2)])
def test_backup_and_restore_of_keras(
    source: int, target: int, tmp_path: Any, monkeypatch: Any
) -> None:
    """It goes on with the epoch that was interrupted; weights and optimizer state are
    those of a whole run.

    Not the seeds, which no file of Keras has: so without `Dropout`; nor statistics that
    depend on the replicas.
    """
    for name in ("Dropout", "BatchNormalization"):
        monkeypatch.setattr(
            plain_keras.layers, name, lambda *_, name: keras.layers.Identity(name=name)
        )
    with pytest.raises(PowerCut):
        plain_backup(source, tmp_path / "b", Cut("on_train_batch_end", 5))
    actual, expected = plain_backup(target, tmp_path / "b"), plain_backup(source, None)
    names = [name for name in expected if "/metrics/" not in name]
    compare = assert_same_bits if source == target else assert_close
    compare(
        {name: actual[name] for name in names}, {name: expected[name] for name in names}
    )


@pytest.mark.parametrize("place", [place for place in PLACES if place != 4])
def test_exported_to_a_saved_model(
    place: int, folder: Any, saved: Any, tmp_path: Any
) -> None:
    """TensorFlow serves what the strategy predicts, for any number of rows."""
    tf = pytest.importorskip("tensorflow")
    path = folder / str(place) / "model.keras"
    x = plain_keras.rows()[0]

    def served(model: Any, name: str) -> list[Any]:
        model.export(tmp_path / name, verbose=False)
        loaded = tf.saved_model.load(tmp_path / name)
        return [loaded.serve(x[:count]) for count in (22, 1)]

    with scope(place):
        model = plain_keras.load(path)
    try:
        results = served(model, "exported")
    except tf.errors.InvalidArgumentError:
        # TensorFlow is older than JAX, and reads no program of plain Keras's either.
        with pytest.raises(tf.errors.InvalidArgumentError):
            served(plain_keras.load(path), "plain")
        return
    for result in results:
        expected = saved[str(place)]["predictions"][: len(result)]
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)
