"""The names of `tf.compat.v1.distribute.experimental`: the objects of
`kd.experimental`, but for `ParameterServerStrategy`.
"""

from __future__ import annotations

from keras_distribute.cluster.resolvers.base import ClusterResolver
from keras_distribute.cluster.resolvers.tf_config import TFConfigClusterResolver
from keras_distribute.experimental import (
    CentralStorageStrategy as CentralStorageStrategy,
)
from keras_distribute.experimental import (
    CollectiveCommunication as CollectiveCommunication,
)
from keras_distribute.experimental import CollectiveHints as CollectiveHints
from keras_distribute.experimental import (
    CommunicationImplementation as CommunicationImplementation,
)
from keras_distribute.experimental import CommunicationOptions as CommunicationOptions
from keras_distribute.experimental import (
    MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy,
)
from keras_distribute.experimental import TPUStrategy as TPUStrategy
from keras_distribute.strategies import parameter_server


class ParameterServerStrategy(parameter_server.ParameterServerStrategy):
    """`kd.ParameterServerStrategy` on the cluster of `TF_CONFIG`.

    Source: `tf.compat.v1.distribute.experimental.ParameterServerStrategy`. Differs from
    TF: one program is the coordinator, as in TensorFlow 2; workers and servers run
    `kd.Server`.

    Args:
        cluster_resolver: Says where the tasks are; `None`: the environment variable
            `TF_CONFIG`.

    Raises:
        ClusterError: For a cluster without workers or servers, as where there is no
            `TF_CONFIG`.
    """

    def __init__(self, cluster_resolver: ClusterResolver | None = None) -> None:
        super().__init__(cluster_resolver or TFConfigClusterResolver())


__all__ = [
    "CentralStorageStrategy",
    "CollectiveCommunication",
    "CollectiveHints",
    "CommunicationImplementation",
    "CommunicationOptions",
    "MultiWorkerMirroredStrategy",
    "ParameterServerStrategy",
    "TPUStrategy",
]
