"""Functions scheduled on the workers of a `kd.ParameterServerStrategy`."""

from keras_distribute.coordinator.coordinator import (
    ClusterCoordinator,
    experimental_get_current_worker_index,
)
from keras_distribute.scheduling.values import PerWorkerValues, RemoteValue
from keras_distribute.types import publish

PerWorkerValue = PerWorkerValues

__all__ = [
    "ClusterCoordinator",
    "PerWorkerValue",
    "PerWorkerValues",
    "RemoteValue",
    "experimental_get_current_worker_index",
]

publish(__name__, *(globals()[name] for name in __all__))
