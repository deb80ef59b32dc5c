"""A script as users write them: trains with a backup, and has a fault if it is told so."""

import json
import os
import signal
import sys
import time
from pathlib import Path

sys.modules["tensorflow"] = None  # Keras would import it to seed it, which takes 3 s.
import keras
import numpy as np

import keras_distribute as kd

what, folder = sys.argv[1], Path(sys.argv[2])
options = kd.experimental.CommunicationOptions(
    timeout_seconds=6.0 if what in ("cut", "gone") else None
)
strategy = kd.MultiWorkerMirroredStrategy(communication_options=options)
first_time = os.environ["KERAS_DISTRIBUTE_RESTARTS"] == "0"


class Fault(keras.callbacks.Callback):
    """In the middle of the second epoch, in the first try."""

    def on_train_batch_end(self, batch, logs=None):
        if not first_time or int(self.model.optimizer.iterations) != 6:
            return
        # Goes on when somebody has cut the link between the processes.
        if what == "cut":
            (folder / f"at-the-cut-{kd.process_index()}").touch()
            while not (folder / "is-cut").exists():
                time.sleep(0.02)
        # The launcher of its host, and all with it.
        if what == "gone" and kd.process_index() == 1:
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(60)
        if what == "raise" and kd.process_index() == 1:
            raise KeyError("a bug of the user's")
        if what == "kill" and kd.is_chief():
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "terminate" and kd.process_index() == 1:
            os.kill(os.getppid(), signal.SIGTERM)


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
history = model.fit(
    x, x[:, :3], batch_size=10, epochs=4, verbose=0, callbacks=[backup, Fault()]
).history
result = {
    "history": history,
    "weights": [np.asarray(w).ravel().tolist() for w in model.get_weights()],
}
(folder / f"{kd.process_index()}.json").write_text(json.dumps(result))
