"""Trains with a backup; sends one of its processes a signal at a moment of the
training, once in the folder's life.
"""

import json
import os
import signal
import sys
import threading
from pathlib import Path

folder, moment, victim, name = (
    Path(sys.argv[1]),
    sys.argv[2],
    int(sys.argv[3]),
    sys.argv[4],
)
PROCESS = int(os.environ["KERAS_DISTRIBUTION_PROCESS_ID"])


def now(here):
    """The fault, where this is its moment and its process."""
    mark = folder / "fault"
    if here == moment and victim == PROCESS and not mark.exists():
        mark.write_text(here)
        os.kill(os.getpid(), getattr(signal, f"SIG{name}"))


now("start")

sys.modules["tensorflow"] = None  # Keras would import it to seed it, which takes 3 s.
import keras_distribute as kd  # isort: skip
import keras
import numpy as np

options = kd.experimental.CommunicationOptions(timeout_seconds=5.0)
strategy = kd.MultiWorkerMirroredStrategy(communication_options=options)


class Moments(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        if int(self.model.optimizer.iterations) == 0:
            now("compile")

    def on_train_batch_end(self, batch, logs=None):
        if int(self.model.optimizer.iterations) == 7:
            now("epoch")

    def on_epoch_end(self, epoch, logs=None):
        if epoch == 1:
            threading.Timer(0.02, now, ["save"]).start()  # The backup saves next.

    def on_test_batch_end(self, batch, logs=None):
        now("evaluate")

    def on_train_end(self, logs=None):
        now("end")


with strategy.scope():
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((5,)),
            keras.layers.Dense(4),
            keras.layers.Dropout(0.3),
            keras.layers.Dense(3),
        ]
    )
    model.compile("adam", "mse")
x = np.random.RandomState(0).randn(44, 5).astype("float32")
backup = kd.callbacks.BackupAndRestore(
    folder / "backup", save_freq=1, delete_checkpoint=False
)
model.fit(
    x,
    x[:, :3],
    batch_size=10,
    epochs=3,
    verbose=0,
    validation_data=(x[:9], x[:9, :3]),
    callbacks=[backup, Moments()],
)
weights = [np.asarray(w).ravel().tolist() for w in model.get_weights()]
(folder / f"{PROCESS}.json").write_text(json.dumps({"weights": weights}))
