"""The names of `tf.compat.v1.distribute`: the objects that `kd` has under them."""

from keras_distribute import cluster_resolver as cluster_resolver
from keras_distribute.compat.v1.distribute import experimental as experimental
from keras_distribute.context import (
    experimental_set_strategy as experimental_set_strategy,
)
from keras_distribute.context import get_replica_context as get_replica_context
from keras_distribute.context import has_strategy as has_strategy
from keras_distribute.context import (
    in_cross_replica_context as in_cross_replica_context,
)
from keras_distribute.input.options import InputContext as InputContext
from keras_distribute.input.options import InputReplicationMode as InputReplicationMode
from keras_distribute.run.replica_context import ReplicaContext as ReplicaContext
from keras_distribute.servers.server import Server as Server
from keras_distribute.strategies.base import Strategy as Strategy
from keras_distribute.strategies.base import get_loss_reduction as get_loss_reduction
from keras_distribute.strategies.base import get_strategy as get_strategy
from keras_distribute.strategies.extended import StrategyExtended as StrategyExtended
from keras_distribute.strategies.mirrored import MirroredStrategy as MirroredStrategy
from keras_distribute.strategies.one_device import (
    OneDeviceStrategy as OneDeviceStrategy,
)
from keras_distribute.types import ReduceOp as ReduceOp
from keras_distribute.types import RunOptions as RunOptions
from keras_distribute.values.cross_device_ops import CrossDeviceOps as CrossDeviceOps
from keras_distribute.values.cross_device_ops import (
    HierarchicalCopyAllReduce as HierarchicalCopyAllReduce,
)
from keras_distribute.values.cross_device_ops import NcclAllReduce as NcclAllReduce
from keras_distribute.values.cross_device_ops import (
    ReductionToOneDevice as ReductionToOneDevice,
)

__all__ = [
    "CrossDeviceOps",
    "HierarchicalCopyAllReduce",
    "InputContext",
    "InputReplicationMode",
    "MirroredStrategy",
    "NcclAllReduce",
    "OneDeviceStrategy",
    "ReduceOp",
    "ReductionToOneDevice",
    "ReplicaContext",
    "RunOptions",
    "Server",
    "Strategy",
    "StrategyExtended",
    "cluster_resolver",
    "experimental",
    "experimental_set_strategy",
    "get_loss_reduction",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
]
