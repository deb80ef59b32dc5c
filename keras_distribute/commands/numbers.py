"""What a small training gives, under a strategy or on one device of plain Keras.

The batch sizes leave a tail; the model is saved by Keras, loaded under the same
strategy, and predicts once more. Also runs in other processes, which import it by name.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from typing import Any

import jax
import keras
import numpy as np

from keras_distribute.cluster import processes
from keras_distribute.strategies.base import Strategy
from keras_distribute.strategies.multi_worker import MultiWorkerMirroredStrategy

Numbers = dict[str, np.ndarray[Any, Any]]
_ROWS, _BATCH = 70, 32  # The last batch has 6 rows.


def of_training(strategy: Strategy | None) -> Numbers:
    """Losses, weights, an evaluation, predictions, and those of the loaded model."""
    # Devices that multiply in 16 bits would differ by that, whatever the strategy.
    with jax.default_matmul_precision("highest"):
        return _of_training(strategy)


def of_two_processes() -> tuple[Numbers, int]:
    """The same over all processes of a job, and on how many replicas."""
    strategy = MultiWorkerMirroredStrategy()
    return of_training(strategy), strategy.num_replicas_in_sync


def largest_difference(ours: Numbers, theirs: Numbers) -> float:
    """Of any number, relative to the largest of its kind (from 1 on)."""
    differences = [
        np.max(np.abs(mine - other)) / max(1.0, float(np.max(np.abs(other))))
        for mine, other in ((ours[name], theirs[name]) for name in theirs)
    ]
    return float(np.max(differences))  # Python's `max` may leave a NaN out.


def _of_training(strategy: Strategy | None) -> Numbers:
    x = np.random.default_rng(0).normal(size=(_ROWS, 8)).astype("float32")
    y = np.sin(x.sum(axis=1, keepdims=True))
    scope: Any = contextlib.nullcontext() if strategy is None else strategy.scope()
    with scope:
        model = _model()
    history = model.fit(
        x, y, batch_size=_BATCH, epochs=2, shuffle=False, verbose=0
    ).history
    evaluation = model.evaluate(x, y, batch_size=_BATCH, verbose=0)
    return {
        "losses": np.array([*history["loss"], *history["mae"]]),
        "weights": np.concatenate([w.ravel() for w in model.get_weights()]),
        "evaluation": np.array(evaluation),
        "predictions": model.predict(x, batch_size=_BATCH, verbose=0),
        "loaded": _loaded(model, scope, x),
    }


def _model() -> Any:
    # Seeds of their own: that of all would have Keras import TensorFlow.
    first, second = (keras.initializers.GlorotUniform(seed) for seed in (1, 2))
    dense: Any = keras.layers.Dense
    hidden = dense(16, "tanh", kernel_initializer=first)
    layers = [hidden, dense(1, kernel_initializer=second)]
    model = keras.Sequential([keras.Input((8,)), *layers])
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", metrics=["mae"])
    return model


def _loaded(model: Any, scope: Any, x: Any) -> Any:
    """The predictions of the model after a way through a file."""
    folder = processes.run_on_chief(tempfile.mkdtemp)
    path = os.path.join(folder, "model.keras")
    model.save(path)
    processes.barrier("saved")
    with scope:
        loaded: Any = keras.saving.load_model(path)
    predictions = loaded.predict(x, batch_size=_BATCH, verbose=0)
    processes.barrier("loaded")
    if processes.is_chief():
        os.remove(path)
        os.rmdir(folder)
    return predictions
