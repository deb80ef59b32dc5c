"""What TensorFlow has in `tf.distribute.cluster_resolver`, and more resolvers."""

from keras_distribute.cluster.choice import automatic_resolver
from keras_distribute.cluster.google_cloud import GCEClusterResolver, TPUClusterResolver
from keras_distribute.cluster.kubernetes import (
    KubernetesClusterResolver,
    KubernetesExecutableLocation,
)
from keras_distribute.cluster.launched import (
    KerasClusterResolver,
    OpenMPIClusterResolver,
)
from keras_distribute.cluster.resolver import (
    ClusterResolver,
    SimpleClusterResolver,
    UnionResolver,
)
from keras_distribute.cluster.running import JaxClusterResolver
from keras_distribute.cluster.slurm import SlurmClusterResolver
from keras_distribute.cluster.spec import ClusterSpec
from keras_distribute.cluster.tf_config import (
    SageMakerClusterResolver,
    TFConfigClusterResolver,
)
from keras_distribute.cluster.topology import Topology

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
