"""The largest batch that a training step has memory for, from real steps."""

from keras_distribute.batch_size.api import find_batch_size as find_batch_size
from keras_distribute.batch_size.result import BatchSizeResult as BatchSizeResult
