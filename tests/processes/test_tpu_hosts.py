"""A TPU of two hosts, played by two processes of four CPU devices each."""

import keras
import numpy as np
import pytest

import keras_distribute as kd
from tests import logical


@pytest.mark.timeout(200)
def test_two_hosts_train_and_save_what_one_device_does(tmp_path):
    results = kd.testing.run_in_processes(
        logical.on_hosts, 2, str(tmp_path), cpu_devices=4, timeout=170
    )
    plain = logical.dense_classifier()
    history = plain.fit(
        logical.ROWS, logical.LABELS, batch_size=16, epochs=2, shuffle=False, verbose=0
    ).history
    assert len(results) == 2
    for host, result in enumerate(results):
        assert (
            result["strategy"] == "TPUStrategy(4 replica(s) x 2 logical device(s), cpu)"
        )
        np.testing.assert_allclose(result["loss"], history["loss"], rtol=1e-5)
        for name in ("weights", "restored"):
            for ours, theirs in zip(result[name], plain.get_weights(), strict=True):
                np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(
            result["predictions"],
            plain.predict(logical.ROWS, verbose=0),
            rtol=1e-4,
            atol=1e-5,
        )
        assert result["sums"] == [4.0 * replica for replica in (2 * host, 2 * host + 1)]
        assert (result["total"], result["placed"]) == (24.0, 4)
        where = "values that are not finite in x of replica 3 (process 1)."
        assert result["nan"] == f"Received: {where}"
    loaded = keras.models.load_model(tmp_path / "model.keras")
    for ours, theirs in zip(loaded.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
