"""Names of TensorFlow's `tf.compat.v1`."""

from keras_distribute.compat.v1 import distribute as distribute

__all__ = ["distribute"]
