"""Names of TensorFlow's `tf.compat`."""

from keras_distribute.compat import v1 as v1

__all__ = ["v1"]
