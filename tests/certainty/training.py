"""The models and data of these tests."""

from __future__ import annotations

import os
from typing import Any

import keras
import numpy as np

import keras_distribute as kd
from tests.support import without_tensorflow

RNG = np.random.RandomState(0)
X = RNG.randn(44, 6).astype("float32")
Y = X[:, :1] * X[:, 1:2]
# For a test of whose assertions the last step is no part: a program less to compile.
WITHOUT_TAIL = len(X) if os.environ.get("EVERY_CASE") else 48


def built(strategy: Any, *, compiled: Any = None, policy: str | None = None) -> Any:
    """A model with weights, slots, moving statistics and seeds."""
    keras.utils.set_random_seed(3)
    with strategy.scope():
        options: dict[str, Any] = {"dtype": policy}
        model = keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(8, activation="tanh", **options),
                keras.layers.BatchNormalization(**options),
                keras.layers.Dropout(0.2, **options),
                keras.layers.Dense(1, **options),
            ]
        )
        given = {"optimizer": keras.optimizers.Adam(0.01)} | (compiled or {})
        model.compile(loss="mse", metrics=["mae"], **given)
    return model


def fitted(model: Any, *callbacks: Any, epochs: int = 1, num_rows: int = len(X)) -> Any:
    """After six steps an epoch, the last one of four rows, or of eight where there are
    48; the history.
    """
    x, y = (np.resize(each, (num_rows, each.shape[1])) for each in (X, Y))
    options: dict[str, Any] = {"shuffle": False, "verbose": 0}
    return model.fit(
        x, y, batch_size=8, epochs=epochs, callbacks=list(callbacks), **options
    )


def variables_of(model: Any) -> dict[str, list[Any]]:
    """By what they are."""
    metrics = model.metrics_variables
    return {
        "weights": model.trainable_variables,
        "slots": model.optimizer.variables,
        "statistics": model.non_trainable_variables,
        "metrics": metrics,
    }


def bits_of(model: Any) -> list[bytes]:
    """Of all variables, as this process reads them."""
    every = [v for group in variables_of(model).values() for v in group]
    return [np.asarray(v.value).tobytes() for v in every]


def on_processes() -> dict[str, Any]:
    """What one of several processes finds and repairs."""
    without_tensorflow()
    strategy = kd.MultiWorkerMirroredStrategy()
    expected, model = built(strategy), built(strategy)
    check = kd.callbacks.ReplicaConsistency
    fitted(expected, check(every=1), epochs=2)
    last = strategy.num_replicas_in_sync - 1
    kernel = model.trainable_variables[0]

    def flip(step: int, replica: int) -> Any:
        place = {"replica": replica, "element": 13, "bit": 27}
        return kd.testing.Fault("flip", variable=kernel, step=step, **place)

    results: dict[str, Any] = {"processes": kd.process_count(), "last": last}
    history = fitted(model, flip(6, last), check(1, "report"))
    results["reported"] = history.history["replica_differences"]
    found = strategy.check_consistency(model, action="report", step=6)
    results["found"] = [
        (d.path == kernel.path, d.replica, d.device, d.process, d.is_wrong)
        for d in found.differences
    ]
    try:
        results["repaired"] = strategy.check_consistency(
            model, action="repair"
        ).is_repaired
    except kd.errors.ReplicaConsistencyError as error:
        results["refused"] = str(error)
    model = built(strategy)
    kernel = model.trainable_variables[0]
    try:
        fitted(model, flip(3, last), check(1), epochs=2, num_rows=WITHOUT_TAIL)
    except kd.errors.ReplicaConsistencyError as error:
        results["error"] = str(error).replace(kernel.path, "kernel")
        results["shown"] = error.report.differences[0].elements
    if last > 1:
        model = built(strategy)
        kernel = model.trainable_variables[0]
        repair = check(1, "repair")
        history = fitted(model, flip(3, last), flip(8, 0), repair, epochs=2)
        results["repairs"] = history.history["replica_differences"]
        results["same bits"] = bits_of(model) == bits_of(expected)
    return results


def differences(call: Any) -> Any:
    """The report of the error that `call` raises."""
    try:
        call()
    except kd.errors.ReplicaConsistencyError as error:
        assert "Received:" in str(error) and "Fix:" in str(error)
        return error.report
    raise AssertionError("nothing was found")


def replayed_on_processes() -> dict[str, Any]:
    """What each process finds where the last device errs once."""
    without_tensorflow()
    strategy = kd.MultiWorkerMirroredStrategy()
    model = built(strategy)
    last = strategy.num_replicas_in_sync - 1
    fault = kd.testing.Fault(
        "flip",
        step=3,
        what="gradient",
        variable=model.layers[0].kernel,
        replica=last,
        bit=29,
    )
    replay = kd.callbacks.StepReplay(every=3, action="report")
    fitted(model, fault, replay, num_rows=WITHOUT_TAIL)
    device = strategy.replica_mesh.devices[-1]
    names = {f"{device.platform}:{device.id}": "last"}
    return {
        "steps": [report.step for report in replay.reports],
        "devices": [
            tuple(names.get(each, each) for each in report.devices)
            for report in replay.reports
        ],
    }
