"""The names that TensorFlow keeps under `tf.tpu.experimental`."""

from keras_distribute.tpu.assignment import DeviceAssignment as DeviceAssignment
from keras_distribute.tpu.assignment import DeviceOrderMode as DeviceOrderMode
from keras_distribute.tpu.system import initialize_tpu_system as initialize_tpu_system
from keras_distribute.tpu.system import shutdown_tpu_system as shutdown_tpu_system
from keras_distribute.tpu.topology import Topology as Topology
from keras_distribute.types import publish

__all__ = [
    "DeviceAssignment",
    "DeviceOrderMode",
    "Topology",
    "initialize_tpu_system",
    "shutdown_tpu_system",
]

publish(__name__, *(globals()[name] for name in __all__))
