"""The names that TensorFlow keeps under `tf.distribute.experimental`."""

from keras_distribute.types import CommunicationOptions as CommunicationOptions
from keras_distribute.types import ValueContext as ValueContext

__all__ = ["CommunicationOptions", "ValueContext"]
