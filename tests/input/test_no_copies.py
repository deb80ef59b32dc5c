"""What a pipeline hands over is not copied on its way to the devices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from keras_distribute.input.kinds import source_of

ROWS = np.arange(24, dtype=np.float32).reshape(8, 3)


def first_of(dataset: Any) -> Any:
    reader = source_of(dataset).open()
    reader.start(0)
    return next(reader).data


def test_of_tensorflow() -> None:
    tf = pytest.importorskip("tensorflow")
    tensor = tf.constant(ROWS)
    # An element of this dataset is the tensor itself.
    (data,) = first_of(tf.data.Dataset.from_tensors((tensor,)).repeat())
    assert np.shares_memory(data, np.asarray(memoryview(tensor)))
    assert not data.flags.writeable
    np.testing.assert_array_equal(data, ROWS)


@pytest.mark.parametrize("value", [3, True, b"text", [[b"a", b"bc"]]])
def test_what_tensorflow_has_beside_numbers(value: Any) -> None:
    tf = pytest.importorskip("tensorflow")
    (data,) = first_of(tf.data.Dataset.from_tensors((tf.constant(value),)))
    expected = tf.constant(value).numpy()
    assert np.asarray(data).tolist() == np.asarray(expected).tolist()
    assert np.asarray(data).dtype == np.asarray(expected).dtype


def test_of_torch() -> None:
    torch = pytest.importorskip("torch")
    batch = torch.tensor(ROWS)
    loader = torch.utils.data.DataLoader([(batch,)], batch_size=None)
    (data,) = first_of(loader)
    assert np.shares_memory(data, batch.numpy())


def test_of_grain() -> None:
    grain = pytest.importorskip("grain")
    (data,) = first_of(grain.MapDataset.source([(ROWS,)]).to_iter_dataset())
    assert np.shares_memory(data, ROWS)
