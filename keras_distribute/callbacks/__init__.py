"""Callbacks for `fit`."""

from keras_distribute.callbacks.backup import BackupAndRestore as BackupAndRestore
from keras_distribute.callbacks.step_times import StepTimeReport as StepTimeReport

__all__ = ["BackupAndRestore", "StepTimeReport"]
