"""`RayReport`: tells Ray Train how a `fit` goes."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import keras
import numpy as np

from keras_distribute import checks
from keras_distribute.cluster import processes
from keras_distribute.errors import ContextError

MODEL = "model.keras"
"""The name of the model's file in a checkpoint of Ray's."""


class RayReport(keras.callbacks.Callback):
    """Reports the logs of each epoch to Ray Train, and with them the model.

    For a `fit` in the workers of Ray Train, in all of them. The logs are the same in
    each, those of all replicas; Ray shows them, keeps them in its `Result`, and hands
    them to Ray Tune.

    Differs from `ray.train.tensorflow.keras.ReportCheckpointCallback`, which needs
    TensorFlow: this one saves a model of any strategy, once, by the chief.

    Args:
        save_model: Whether each report has a checkpoint, with the model in the file
            `model.keras`. Which checkpoints Ray keeps is said in its
            `CheckpointConfig`.

    Raises:
        BackendError: From `fit`, without Ray.
        ContextError: From `fit`, outside of a worker of Ray Train.

    Example:
        In the function that `JaxTrainer` runs::

            model.fit(x, y, callbacks=[kd.callbacks.RayReport()])

        Afterwards, anywhere::

            result = trainer.fit()
            print(result.metrics["loss"])
            with result.checkpoint.as_directory() as folder:
                model = keras.models.load_model(f"{folder}/model.keras")
    """

    def __init__(self, save_model: bool = True) -> None:
        super().__init__()
        checks.flag("save_model", save_model)
        self.save_model = save_model

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Looks for Ray."""
        try:
            _ray_train().get_context().get_world_rank()
        except RuntimeError as error:
            raise ContextError(
                "RayReport reports to Ray Train.",
                received=f"a fit that is in no worker of it: {error}",
                fix="leave the callback out; or run the function that calls fit by "
                "ray.train.v2.jax.JaxTrainer(train_func, ...).fit().",
            ) from error

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Reports; all workers take part."""
        train = _ray_train()
        # A metric may be a vector: one number for each class.
        report = {name: np.asarray(v).tolist() for name, v in (logs or {}).items()}
        report["epoch"] = epoch + 1
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            if self.save_model:
                assert self.model is not None
                self.model.save(os.path.join(folder, MODEL))  # All take part in it.
                if processes.process_index() == 0:
                    checkpoint = train.Checkpoint.from_directory(folder)
            train.report(report, checkpoint=checkpoint)


def _ray_train() -> Any:
    """Ray's module, which only these programs need."""
    return checks.imported(
        "ray.train",
        "RayReport reports to Ray Train.",
        "leave the callback out; or pip install 'keras-distribute[ray]'.",
    )
