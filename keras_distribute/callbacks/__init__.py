"""Callbacks for `fit`."""

from keras_distribute.callbacks.backup import BackupAndRestore as BackupAndRestore
from keras_distribute.callbacks.consistency import (
    ReplicaConsistency as ReplicaConsistency,
)
from keras_distribute.callbacks.non_finite import RaiseOnNaN as RaiseOnNaN
from keras_distribute.callbacks.ray_report import RayReport as RayReport
from keras_distribute.callbacks.step_replay import StepReplay as StepReplay
from keras_distribute.callbacks.step_times import StepTimeReport as StepTimeReport
from keras_distribute.consistency.replays import StepReport as StepReport
from keras_distribute.types import publish

__all__ = [
    "BackupAndRestore",
    "RaiseOnNaN",
    "RayReport",
    "ReplicaConsistency",
    "StepReplay",
    "StepReport",
    "StepTimeReport",
]

publish(__name__, *(globals()[name] for name in __all__))
