"""keras_distribute: the programming model of `tf.distribute.Strategy`, for Keras 3 on
JAX.

import keras_distribute as kd
strategy = kd.MirroredStrategy()
with strategy.scope():
    model = ...; model.compile(...)
model.fit(dataset, epochs=2)
"""

import importlib
from typing import TYPE_CHECKING, Any

from keras_distribute._compat import versions as _versions

_versions.choose_backend()
_versions.check_versions()

from keras_distribute import errors as errors
from keras_distribute._compat import seams as _seams

with _seams.loaded():
    from keras_distribute import config as config

    config.size_pool_for_requested_devices()

    _seams.import_all()

    from keras_distribute.training import install

    install.install()

from keras_distribute.cluster.processes import barrier as barrier
from keras_distribute.cluster.processes import is_chief as is_chief
from keras_distribute.cluster.processes import print_on_chief as print_on_chief
from keras_distribute.cluster.processes import process_count as process_count
from keras_distribute.cluster.processes import process_index as process_index
from keras_distribute.cluster.processes import run_on_chief as run_on_chief
from keras_distribute.consistency import ConsistencyReport as ConsistencyReport
from keras_distribute.context import (
    experimental_set_strategy as experimental_set_strategy,
)
from keras_distribute.context import get_replica_context as get_replica_context
from keras_distribute.context import has_strategy as has_strategy
from keras_distribute.context import (
    in_cross_replica_context as in_cross_replica_context,
)
from keras_distribute.input.arrays import ArrayDataset as ArrayDataset
from keras_distribute.input.datasets import DistributedDataset as DistributedDataset
from keras_distribute.input.datasets import DistributedIterator as DistributedIterator
from keras_distribute.input.options import AutoShardPolicy as AutoShardPolicy
from keras_distribute.input.options import ElementSpec as ElementSpec
from keras_distribute.input.options import InputContext as InputContext
from keras_distribute.input.options import InputOptions as InputOptions
from keras_distribute.input.options import InputReplicationMode as InputReplicationMode
from keras_distribute.run.gradients import value_and_grad as value_and_grad
from keras_distribute.run.replica_context import ReplicaContext as ReplicaContext
from keras_distribute.strategies.base import Strategy as Strategy
from keras_distribute.strategies.base import get_loss_reduction as get_loss_reduction
from keras_distribute.strategies.base import get_strategy as get_strategy
from keras_distribute.strategies.extended import StrategyExtended as StrategyExtended
from keras_distribute.strategies.layout_plans import LayoutPlan as LayoutPlan
from keras_distribute.strategies.mirrored import MirroredStrategy as MirroredStrategy
from keras_distribute.strategies.multi_worker import (
    MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy,
)
from keras_distribute.strategies.one_device import (
    OneDeviceStrategy as OneDeviceStrategy,
)
from keras_distribute.strategies.ready_layouts import layout_plan as layout_plan
from keras_distribute.strategies.tpu import TPUStrategy as TPUStrategy
from keras_distribute.summary import StrategySummary as StrategySummary
from keras_distribute.types import ReduceOp as ReduceOp
from keras_distribute.types import RunOptions as RunOptions
from keras_distribute.types import VariableAggregation as VariableAggregation
from keras_distribute.types import VariableSynchronization as VariableSynchronization
from keras_distribute.types import publish
from keras_distribute.values.cross_device_ops import CrossDeviceOps as CrossDeviceOps
from keras_distribute.values.cross_device_ops import (
    HierarchicalCopyAllReduce as HierarchicalCopyAllReduce,
)
from keras_distribute.values.cross_device_ops import NcclAllReduce as NcclAllReduce
from keras_distribute.values.cross_device_ops import (
    ReductionToOneDevice as ReductionToOneDevice,
)
from keras_distribute.values.per_replica import DistributedValues as DistributedValues
from keras_distribute.values.per_replica import Mirrored as Mirrored
from keras_distribute.values.per_replica import PerReplica as PerReplica
from keras_distribute.variables import MirroredVariable as MirroredVariable
from keras_distribute.variables import SyncOnReadVariable as SyncOnReadVariable

if TYPE_CHECKING:
    from keras_distribute import callbacks as callbacks
    from keras_distribute import cluster_resolver as cluster_resolver
    from keras_distribute import compat as compat
    from keras_distribute import coordinator as coordinator
    from keras_distribute import experimental as experimental
    from keras_distribute import nn as nn
    from keras_distribute import testing as testing
    from keras_distribute import tpu as tpu
    from keras_distribute.batch_size.api import BatchSizeResult as BatchSizeResult
    from keras_distribute.batch_size.api import find_batch_size as find_batch_size
    from keras_distribute.checkpoint import Checkpoint as Checkpoint
    from keras_distribute.checkpoint import CheckpointManager as CheckpointManager
    from keras_distribute.checkpoint import RestoreStatus as RestoreStatus
    from keras_distribute.dry_run.api import dry_run as dry_run
    from keras_distribute.dry_run.comparing import DryRunComparison as DryRunComparison
    from keras_distribute.dry_run.comparing import compare_dry_runs as compare_dry_runs
    from keras_distribute.dry_run.report import DryRunReport as DryRunReport
    from keras_distribute.launch.notebook import notebook_launcher as notebook_launcher
    from keras_distribute.servers.server import Server as Server
    from keras_distribute.strategies.parameter_server import (
        ParameterServerStrategy as ParameterServerStrategy,
    )

__version__ = "0.1.0"

__all__ = [
    "ArrayDataset",
    "AutoShardPolicy",
    "BatchSizeResult",
    "Checkpoint",
    "CheckpointManager",
    "ConsistencyReport",
    "CrossDeviceOps",
    "DistributedDataset",
    "DistributedIterator",
    "DistributedValues",
    "DryRunComparison",
    "DryRunReport",
    "ElementSpec",
    "HierarchicalCopyAllReduce",
    "InputContext",
    "InputOptions",
    "InputReplicationMode",
    "LayoutPlan",
    "Mirrored",
    "MirroredStrategy",
    "MirroredVariable",
    "MultiWorkerMirroredStrategy",
    "NcclAllReduce",
    "OneDeviceStrategy",
    "ParameterServerStrategy",
    "PerReplica",
    "ReduceOp",
    "ReductionToOneDevice",
    "ReplicaContext",
    "RestoreStatus",
    "RunOptions",
    "Server",
    "Strategy",
    "StrategyExtended",
    "StrategySummary",
    "SyncOnReadVariable",
    "TPUStrategy",
    "VariableAggregation",
    "VariableSynchronization",
    "barrier",
    "callbacks",
    "cluster_resolver",
    "compare_dry_runs",
    "compat",
    "config",
    "coordinator",
    "dry_run",
    "errors",
    "experimental",
    "experimental_set_strategy",
    "find_batch_size",
    "get_loss_reduction",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
    "is_chief",
    "layout_plan",
    "nn",
    "notebook_launcher",
    "print_on_chief",
    "process_count",
    "process_index",
    "run_on_chief",
    "testing",
    "tpu",
    "value_and_grad",
]


# What few programs use is imported when it is first used, since imports take time:
# public modules, and the files that define public names.
_MODULES = {
    *("callbacks", "cluster_resolver", "compat", "coordinator", "experimental"),
    *("nn", "testing", "tpu"),
}
_FILES = {
    "batch_size.api": ("BatchSizeResult", "find_batch_size"),
    "checkpoint": ("Checkpoint", "CheckpointManager", "RestoreStatus"),
    "dry_run.api": ("dry_run",),
    "dry_run.comparing": ("DryRunComparison", "compare_dry_runs"),
    "dry_run.report": ("DryRunReport",),
    "launch.notebook": ("notebook_launcher",),
    "servers.server": ("Server",),
    "strategies.parameter_server": ("ParameterServerStrategy",),
}
# The room is imported now, and its name given free: importing a file of it later gives
# the name to the room no more, and it stays that of the function.
importlib.import_module(f"{__name__}.dry_run")
del globals()["dry_run"]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    for file, names in _FILES.items():
        if name in names:
            defined = importlib.import_module(f"{__name__}.{file}")
            found = {each: getattr(defined, each) for each in names}
            publish(__name__, *found.values())
            globals().update(found)
            return found[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


publish(__name__, *(globals()[name] for name in __all__ if name in globals()))
