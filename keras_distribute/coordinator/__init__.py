"""Functions scheduled on the workers of a `kd.ParameterServerStrategy`."""

from keras_distribute.coordinator.coordinator import ClusterCoordinator
from keras_distribute.scheduling.values import PerWorkerValues, RemoteValue

__all__ = ["ClusterCoordinator", "PerWorkerValues", "RemoteValue"]
