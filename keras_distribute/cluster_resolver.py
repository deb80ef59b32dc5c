"""What TensorFlow has in `tf.distribute.cluster_resolver`, and more resolvers."""

from keras_distribute.cluster.resolvers.automatic import automatic_resolver
from keras_distribute.cluster.resolvers.base import (
    ClusterResolver,
    SimpleClusterResolver,
    UnionResolver,
)
from keras_distribute.cluster.resolvers.cluster_spec import ClusterSpec
from keras_distribute.cluster.resolvers.google_cloud import (
    GCEClusterResolver,
    TPUClusterResolver,
)
from keras_distribute.cluster.resolvers.kubernetes import (
    KubernetesClusterResolver,
    KubernetesExecutableLocation,
)
from keras_distribute.cluster.resolvers.launched import KerasClusterResolver
from keras_distribute.cluster.resolvers.mpi import (
    MPICHClusterResolver,
    OpenMPIClusterResolver,
)
from keras_distribute.cluster.resolvers.ray_train import RayTrainClusterResolver
from keras_distribute.cluster.resolvers.running import JaxClusterResolver
from keras_distribute.cluster.resolvers.slurm import SlurmClusterResolver
from keras_distribute.cluster.resolvers.tf_config import (
    SageMakerClusterResolver,
    TFConfigClusterResolver,
)
from keras_distribute.cluster.resolvers.topology import Topology
from keras_distribute.servers.on_ray import RayClusterResolver
from keras_distribute.types import publish

__all__ = [
    "ClusterResolver",
    "ClusterSpec",
    "GCEClusterResolver",
    "JaxClusterResolver",
    "KerasClusterResolver",
    "KubernetesClusterResolver",
    "KubernetesExecutableLocation",
    "MPICHClusterResolver",
    "OpenMPIClusterResolver",
    "RayClusterResolver",
    "RayTrainClusterResolver",
    "SageMakerClusterResolver",
    "SimpleClusterResolver",
    "SlurmClusterResolver",
    "TFConfigClusterResolver",
    "TPUClusterResolver",
    "Topology",
    "UnionResolver",
    "automatic_resolver",
]

publish(__name__, *(globals()[name] for name in __all__))
