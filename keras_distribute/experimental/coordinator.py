"""What TensorFlow has in `tf.distribute.experimental.coordinator`: the names of
`kd.coordinator` before it was there.
"""

from keras_distribute.coordinator import (
    ClusterCoordinator,
    PerWorkerValues,
    RemoteValue,
)

__all__ = ["ClusterCoordinator", "PerWorkerValues", "RemoteValue"]
