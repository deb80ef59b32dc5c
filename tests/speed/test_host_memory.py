"""Rows gathered into memory that XLA for CPUs takes as it is."""

from __future__ import annotations

from typing import Any

import jax
import keras
import ml_dtypes
import numpy as np
import pytest

from keras_distribute.devices import host_memory
from tests.support import dense_model, mirrored


@pytest.mark.parametrize("dtype", ["float32", "uint8", "complex64", "bfloat16", ">f4"])
@pytest.mark.parametrize("shape", [(7,), (500, 5), (300, 40, 30), (200, 0)])
def test_the_rows_of_indices(dtype: str, shape: Any) -> None:
    own: Any = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    array = np.random.default_rng(0).integers(0, 200, shape).astype(own)
    for given in (array, array[::2], array.T.copy().T):
        indices = np.random.default_rng(1).integers(0, len(given), 450)
        rows = host_memory.gathered(given, indices)
        assert rows.dtype == array.dtype
        np.testing.assert_array_equal(rows, given[indices])


def test_objects() -> None:
    words = np.array(["a", "bc", "d"] * 20_000, object)
    rows = host_memory.gathered(words, np.arange(50_000) + 1)
    np.testing.assert_array_equal(rows, words[1:50_001])


def test_xla_takes_them_as_they_are() -> None:
    rows = host_memory.gathered(np.zeros((256, 784), np.float32), np.arange(256))
    array = mirrored(4).replica_mesh.put_split(rows)
    own = {part.data.unsafe_buffer_pointer() for part in array.addressable_shards}
    begin = rows.__array_interface__["data"][0]
    assert own == {begin + i * rows.nbytes // 4 for i in range(4)}


def test_arrays_that_change_after_fit_has_read_them() -> None:
    """What a step reads is nobody else's: also while it runs."""
    x = np.random.default_rng(0).normal(size=(512, 400)).astype("float32")
    y = x[:, :1].copy()
    results = []
    for changes in (False, True):
        keras.utils.set_random_seed(0)
        model = dense_model(mirrored(4), 400)
        given = x.copy()

        def change(epoch: int, logs: Any, given: Any = given) -> None:
            given[:] = np.nan

        callbacks = [keras.callbacks.LambdaCallback(on_epoch_end=change)]
        model.fit(
            given, y, 256, verbose=0, callbacks=callbacks if changes else [], epochs=1
        )
        results.append(jax.device_get(model.trainable_variables[0].value))
    np.testing.assert_array_equal(*results)
