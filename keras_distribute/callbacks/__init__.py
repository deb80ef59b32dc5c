"""Callbacks for `fit`."""

from keras_distribute.callbacks.backup import BackupAndRestore as BackupAndRestore

__all__ = ["BackupAndRestore"]
