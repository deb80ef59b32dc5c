"""Two processes come to one result, whichever of them has the least memory."""

import numpy as np
import pytest

import keras_distribute as kd
from tests.support import without_tensorflow

from .models import X, Y, bits, trained

pytestmark = pytest.mark.timeout(300)


def searches() -> dict:
    """In each process: what it finds, and whether the model is as it was."""
    without_tensorflow()
    from keras_distribute.batch_size import trials

    strategy = kd.MultiWorkerMirroredStrategy()
    model = trained(strategy)
    before, found, last = bits(model), {}, kd.process_index() == 1
    # One of them may take less of its devices.
    limit = 2**16 if last else 2**20
    found["limits"] = kd.find_batch_size(model, X, Y, memory_limit=limit)
    found["kept"] = [bits(model) == before]
    # One of them really runs out of memory.
    set_aside, tried = trials._set_aside, []

    def hungry(size, devices):
        tried.append(size)
        short = last and size and len(tried) > 2  # The first batch has room.
        return set_aside(2**50 if short else size, devices)

    trials._set_aside = hungry
    try:
        found["ran out"] = kd.find_batch_size(
            model, X, Y, max_batch_size=64, steps_per_trial=1
        )
    finally:
        trials._set_aside = set_aside
    found["kept"].append(bits(model) == before)
    model.fit(X, Y, batch_size=16, verbose=0)
    weights = (np.ones(len(X)),) if last else ()
    found["errors"] = []
    for given, most in ((weights, 8), ((), 8 + last)):
        try:
            kd.find_batch_size(model, X, Y, *given, max_batch_size=most)
        except kd.errors.InputError as error:
            found["errors"].append(str(error))
    return found


def test_two_processes_agree():
    first, second = kd.testing.run_in_processes(searches, 2, cpu_devices=2, timeout=250)
    assert first["limits"] == second["limits"]
    assert first["kept"] == second["kept"] == [True, True]
    alone = kd.find_batch_size(
        trained(kd.MirroredStrategy([f"cpu:{i}" for i in range(4)])),
        X,
        Y,
        memory_limit=2**16,
    )
    assert abs(first["limits"].largest - alone.largest) <= alone.largest // 8
    assert first["ran out"] == second["ran out"]
    assert first["ran out"].too_large is not None
    for found in (first, second):
        weights, most = found["errors"]
        assert weights.startswith("The processes read a dataset of their own, but ")
        assert "Fix: read the same data in every process" in weights
        assert most.startswith("The processes would try different batches.")
        assert "max_batch_size=9" in most
        assert "Fix: pass data of the same shapes and dtypes" in most
