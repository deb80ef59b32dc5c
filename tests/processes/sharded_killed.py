"""Trains with divided weights and a backup; kills one of its processes in the middle of
a step, or of a save, once in the folder's life.
"""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

ROWS, BATCH, EPOCHS, AT = 44, 10, 2, 4  # Steps of 10, 10, 10, 10 and 4 rows.


def built():
    import keras

    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((16,)),
            keras.layers.Dense(256, "tanh"),
            keras.layers.Dense(256, "tanh"),
            keras.layers.Dense(3),
        ]
    )
    model.compile(keras.optimizers.Adam(1e-2), "mse")
    return model


def fit(model, *callbacks):
    import numpy as np

    x = np.random.RandomState(0).randn(ROWS, 16).astype("float32")
    options = {"batch_size": BATCH, "epochs": EPOCHS, "verbose": 0}
    model.fit(x, x[:, :3], callbacks=list(callbacks), **options)
    return [np.asarray(w).ravel().tolist() for w in model.get_weights()]


def main(folder, moment, victim):
    sys.modules["tensorflow"] = None  # Keras would import it to seed it.
    import keras

    import keras_distribute as kd
    from keras_distribute.checkpoint import manifest, values

    process, mark = kd.process_index, folder / "fault"
    wanted = not mark.exists()

    def kill(where):
        if wanted and process() == victim:
            mark.write_text(where)
            os.kill(os.getpid(), signal.SIGKILL)

    options = kd.experimental.CommunicationOptions(timeout_seconds=5.0)
    strategy = kd.MultiWorkerMirroredStrategy(
        communication_options=options, shard_variables=True, min_shard_bytes=1024
    )
    with strategy.scope():
        model = built()

    begun = []  # Of this start alone: what a callback has comes back with the backup.

    class InAStep(keras.callbacks.Callback):
        """Kills while the step runs, which this thread waits for."""

        running = False

        def on_train_batch_begin(self, batch, logs=None):
            begun.append(batch)
            self.running = True
            if moment == "step" and len(begun) > AT:
                threading.Thread(target=self.soon, daemon=True).start()

        def soon(self):
            time.sleep(0.002)
            if self.running:
                kill("step")

        def on_train_batch_end(self, batch, logs=None):
            int(self.model.optimizer.iterations)  # When the step is over.
            self.running = False

    written, read = [], []
    to_bytes, on_host = manifest.to_bytes, values.on_host

    def killed_while_files_are_written(*args):
        written.append(0)
        if moment == "save" and len(written) > AT:
            kill("save")  # The chief alone comes here.
        return to_bytes(*args)

    def killed_while_parts_are_gathered(array):
        read.append(array.shape)
        if moment == "save" and read.count((256, 256)) > 3 * AT + 1 and process():
            kill("save")  # After the kernel, before its slots.
        return on_host(array)

    manifest.to_bytes = killed_while_files_are_written
    values.on_host = killed_while_parts_are_gathered
    backup = kd.callbacks.BackupAndRestore(
        folder / "backup", save_freq=1, delete_checkpoint=False
    )
    weights = fit(model, backup, InAStep())
    parts = [
        w.value.size // w.value.addressable_shards[0].data.size for w in model.weights
    ]
    found = {
        "weights": weights,
        "parts": parts,
        "replicas": strategy.num_replicas_in_sync,
    }
    (folder / f"steps-{process()}").write_text(str(len(begun)))
    (folder / f"{process()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
