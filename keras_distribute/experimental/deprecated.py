"""Classes that TensorFlow keeps in `tf.distribute.experimental` under older names."""

from __future__ import annotations

from typing import Any

from keras_distribute.cluster.resolvers.base import ClusterResolver
from keras_distribute.strategies import multi_worker, tpu
from keras_distribute.strategies.deprecated import warn_once
from keras_distribute.tpu.assignment import DeviceAssignment
from keras_distribute.types import CommunicationImplementation, CommunicationOptions

CollectiveCommunication = CommunicationImplementation


class CollectiveHints:
    """Deprecated: `kd.experimental.CommunicationOptions`, which this returns.

    Source: `tf.distribute.experimental.CollectiveHints`.

    Args:
        bytes_per_pack: As of `CommunicationOptions`.
        timeout_seconds: Likewise.

    Example:
        >>> kd.experimental.CollectiveHints(bytes_per_pack=1024).bytes_per_pack
        1024
    """

    def __new__(  # type: ignore[misc]
        cls, bytes_per_pack: int = 0, timeout_seconds: float | None = None
    ) -> CommunicationOptions:
        warn_once(
            "CollectiveHints",
            "use distribute.experimental.CommunicationOptions instead",
        )
        return CommunicationOptions(
            bytes_per_pack=bytes_per_pack, timeout_seconds=timeout_seconds
        )


class _IsTheOther(type):
    """Libraries ask whether a strategy is an instance of the older class."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.__bases__)


class MultiWorkerMirroredStrategy(
    multi_worker.MultiWorkerMirroredStrategy, metaclass=_IsTheOther
):
    """Deprecated: `kd.MultiWorkerMirroredStrategy`, of which this is one.

    Source: `tf.distribute.experimental.MultiWorkerMirroredStrategy`.

    Args:
        communication: A `CommunicationImplementation`.
        cluster_resolver: As of `kd.MultiWorkerMirroredStrategy`.
    """

    def __init__(
        self,
        communication: CommunicationImplementation = CommunicationImplementation.AUTO,
        cluster_resolver: ClusterResolver | None = None,
    ) -> None:
        warn_once(
            "experimental.MultiWorkerMirroredStrategy",
            "use distribute.MultiWorkerMirroredStrategy instead",
        )
        options = CommunicationOptions(implementation=communication)
        super().__init__(cluster_resolver, options)


class TPUStrategy(tpu.TPUStrategy, metaclass=_IsTheOther):
    """Deprecated: `kd.TPUStrategy`, of which this is one.

    Source: `tf.distribute.experimental.TPUStrategy`.

    Args:
        tpu_cluster_resolver: As of `kd.TPUStrategy`.
        device_assignment: Its `experimental_device_assignment`.
    """

    def __init__(
        self,
        tpu_cluster_resolver: ClusterResolver | None = None,
        device_assignment: DeviceAssignment | None = None,
    ) -> None:
        warn_once(
            "experimental.TPUStrategy",
            "please use the non-experimental symbol `tf.distribute.TPUStrategy` "
            "instead.",
        )
        super().__init__(tpu_cluster_resolver, device_assignment)
