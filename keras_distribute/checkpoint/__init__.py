"""Checkpoints: the state of models, optimizers, metrics and anything else, on disk and
back. Knows no training loop.
"""

from __future__ import annotations

from keras_distribute.checkpoint.checkpoint import Checkpoint as Checkpoint
from keras_distribute.checkpoint.manager import CheckpointManager as CheckpointManager
from keras_distribute.checkpoint.matching import RestoreStatus as RestoreStatus

__all__ = ["Checkpoint", "CheckpointManager", "RestoreStatus"]
