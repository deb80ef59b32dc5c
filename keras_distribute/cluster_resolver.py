"""The names that TensorFlow keeps under `tf.distribute.cluster_resolver`, and those of
this package beside them.
"""

from keras_distribute.cluster.choice import automatic_resolver as automatic_resolver
from keras_distribute.cluster.google_cloud import (
    GCEClusterResolver as GCEClusterResolver,
)
from keras_distribute.cluster.google_cloud import (
    TPUClusterResolver as TPUClusterResolver,
)
from keras_distribute.cluster.kubernetes import (
    KubernetesClusterResolver as KubernetesClusterResolver,
)
from keras_distribute.cluster.kubernetes import (
    KubernetesExecutableLocation as KubernetesExecutableLocation,
)
from keras_distribute.cluster.launched import (
    KerasClusterResolver as KerasClusterResolver,
)
from keras_distribute.cluster.launched import (
    OpenMPIClusterResolver as OpenMPIClusterResolver,
)
from keras_distribute.cluster.resolver import ClusterResolver as ClusterResolver
from keras_distribute.cluster.resolver import (
    SimpleClusterResolver as SimpleClusterResolver,
)
from keras_distribute.cluster.resolver import UnionResolver as UnionResolver
from keras_distribute.cluster.running import JaxClusterResolver as JaxClusterResolver
from keras_distribute.cluster.slurm import SlurmClusterResolver as SlurmClusterResolver
from keras_distribute.cluster.spec import ClusterSpec as ClusterSpec
from keras_distribute.cluster.tf_config import (
    SageMakerClusterResolver as SageMakerClusterResolver,
)
from keras_distribute.cluster.tf_config import (
    TFConfigClusterResolver as TFConfigClusterResolver,
)
from keras_distribute.cluster.topology import Topology as Topology

__all__ = [
    "ClusterResolver",
    "ClusterSpec",
    "GCEClusterResolver",
    "JaxClusterResolver",
    "KerasClusterResolver",
    "KubernetesClusterResolver",
    "KubernetesExecutableLocation",
    "OpenMPIClusterResolver",
    "SageMakerClusterResolver",
    "SimpleClusterResolver",
    "SlurmClusterResolver",
    "TFConfigClusterResolver",
    "TPUClusterResolver",
    "Topology",
    "UnionResolver",
    "automatic_resolver",
]
