"""Callbacks for `fit`."""

from keras_distribute.callbacks.backup import BackupAndRestore as BackupAndRestore
from keras_distribute.callbacks.consistency import (
    ReplicaConsistency as ReplicaConsistency,
)
from keras_distribute.callbacks.non_finite import RaiseOnNaN as RaiseOnNaN
from keras_distribute.callbacks.ray_report import RayReport as RayReport
from keras_distribute.callbacks.step_times import StepTimeReport as StepTimeReport

__all__ = [
    "BackupAndRestore",
    "RaiseOnNaN",
    "RayReport",
    "ReplicaConsistency",
    "StepTimeReport",
]
