"""Trains with interruptions, and compares with a run that had none: every variable and
the whole history, bit for bit.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from keras import layers

import keras_distribute as kd

from . import support
from .support import SEED, bits, data, optimizer_of, scope


class PowerCut(Exception):
    """What interrupts a run."""


class CompleteTooSoon(Exception):
    """A run that ended before it could be interrupted."""


class Cut(keras.callbacks.Callback):
    """Interrupts at the `count`th call of a method, of all that this run makes."""

    def __init__(self, method: str, count: int) -> None:
        super().__init__()
        self.left = count
        setattr(self, method, self.strike)

    def get_state(self) -> dict[str, Any]:
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        """It has none."""

    def strike(self, *_: Any, **__: Any) -> None:
        self.left -= 1
        if not self.left:
            raise PowerCut


class Log(keras.callbacks.Callback):
    """Notes every step and its loss, in a list that a checkpoint keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []
        self.draws = 0.0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.seen.append(epoch)
        self.draws += float(np.random.random())

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append((batch, logs["loss"]))
        self.draws += random.random()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.seen.append(sorted(logs.items()))


def build(optimizer: str = "adam", steps_per_execution: int = 1) -> keras.Model:
    """Moving statistics, a seed, metrics: all kinds of state, and quick to compile."""
    model = keras.Sequential(
        [
            keras.Input((6,)),
            layers.BatchNormalization(momentum=0.8),
            layers.Dropout(0.3),
            layers.Dense(3),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(
        optimizer=optimizer_of(optimizer),
        loss=loss,
        metrics=["accuracy"],
        steps_per_execution=steps_per_execution,
    )
    return model


def run(
    place: int,
    fit: Callable[..., Any],
    folder: Any,
    *,
    cut: Cut | None = None,
    callbacks: Sequence[Any] = (),
    backup: dict[str, Any] | None = None,
    make: Callable[[], Any] = build,
    seed: int = SEED,
) -> dict[str, Any]:
    """A run of the script, from its first line on; `None` in place of a folder saves
    nothing.

    Args:
        place: How many replicas; 0 is plain Keras.
        fit: Calls `model.fit` with `callbacks`.
        folder: For the backup.
        cut: What interrupts it.
        callbacks: Others.
        backup: Arguments of `BackupAndRestore`.
        make: Makes the model.
        seed: Of NumPy's and Python's random streams; those of a run that goes on come
            from the checkpoint.
    """
    keras.utils.set_random_seed(SEED)
    with scope(place):
        model = make()
    # Not TensorFlow's: a dataset keeps its seed, which a script has to set.
    random.seed(seed)
    np.random.seed(seed)
    log = Log()
    own = (
        []
        if folder is None
        else [
            kd.callbacks.BackupAndRestore(folder, **{"save_freq": 2} | (backup or {}))
        ]
    )
    history = fit(
        model, callbacks=[*own, log, *callbacks, *([] if cut is None else [cut])]
    )
    return {
        "bits": bits(model=model),
        "history": history.history,
        "epochs": history.epoch,
        "log": {"seen": log.seen, "draws": log.draws},
    }


def interrupted(
    place: int,
    fit: Callable[..., Any],
    folder: Any,
    cuts: Sequence[Cut],
    **options: Any,
) -> dict[str, Any]:
    """As `run`, but each of `cuts` interrupts one run, before one is completed."""

    def seed(number: int) -> int:
        # Without a checkpoint, the script begins anew as it did the first time.
        saved = folder is None or (
            folder.is_dir() and any(path.name.isdigit() for path in folder.iterdir())
        )
        return 1000 + number if saved else SEED

    for number, cut in enumerate(cuts):
        try:
            run(place, fit, folder, cut=cut, seed=seed(number), **options)
        except PowerCut:
            continue
        raise CompleteTooSoon
    return run(
        place, fit, folder, seed=seed(999), cut=Cut("on_train_end", 1000), **options
    )


def assert_same(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    """Variables, history, and what a callback saw of each step: bit for bit."""
    assert actual["history"] == expected["history"]
    assert actual["epochs"] == expected["epochs"]
    assert actual["log"]["seen"] == expected["log"]["seen"]
    assert actual["log"]["draws"] == expected["log"]["draws"]
    support.assert_same_bits(actual["bits"], expected["bits"])


def fit_arrays(model: Any, callbacks: Any, **options: Any) -> Any:
    """Three epochs of six shuffled batches, the last of 4 rows, with validation."""
    x, y = data(44)
    settings = {
        "batch_size": 8,
        "epochs": 3,
        "verbose": 0,
        "validation_data": (x[:16], y[:16]),
    } | options
    return model.fit(x, y, callbacks=callbacks, **settings)
