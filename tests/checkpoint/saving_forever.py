"""Saves one step after the other until it is killed: `python saving_forever.py FOLDER
[STEPS]`. Used by test_killed.
"""

import os
import sys

import numpy as np

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import keras_distribute as kd

kd.config.set_cpu_devices(2)
import keras

from keras_distribute.checkpoint import Checkpoint, CheckpointManager

folder, steps = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else None
with kd.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
    weights = [keras.Variable(np.zeros(200_000)) for _ in range(4)]
progress = {"step": 0}
named = {f"w{i}": weight for i, weight in enumerate(weights)}
manager = CheckpointManager(
    Checkpoint(**named, progress=progress), folder, max_to_keep=2
)
manager.restore_or_initialize()
print("started from", progress["step"], flush=True)
while steps is None or progress["step"] < steps:
    progress["step"] += 1
    for i, weight in enumerate(weights):
        weight.assign(np.full(200_000, progress["step"] * 10 + i))
    manager.save(progress["step"])
    print(progress["step"], flush=True)
# Without wait or close: the save that is being written is completed.
