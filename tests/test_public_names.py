"""Pins the public names, where they say they come from, and that their docstrings'
examples are true.
"""

import doctest
import importlib
import inspect
import pkgutil
import re

import keras
import numpy as np
import pytest

import keras_distribute as kd

NAMES = [
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
OBJECTS = [
    getattr(kd, name) for name in NAMES if not inspect.ismodule(getattr(kd, name))
]


def test_the_public_names_are_these():
    assert sorted(kd.__all__) == NAMES
    assert kd.callbacks.__all__ == [
        "BackupAndRestore",
        "RaiseOnNaN",
        "RayReport",
        "ReplicaConsistency",
        "StepReplay",
        "StepReport",
        "StepTimeReport",
    ]
    assert kd.cluster_resolver.__all__ == [
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
    assert kd.testing.__all__ == [
        "Fault",
        "MultiProcessRunner",
        "NamedStrategy",
        "ParameterServerCluster",
        "ProcessResult",
        "RecordedUpdates",
        "combinations",
        "combine",
        "cpu_devices",
        "run_in_processes",
    ]
    assert kd.experimental.__all__ == [
        "CentralStorageStrategy",
        "CollectiveCommunication",
        "CollectiveHints",
        "CommunicationImplementation",
        "CommunicationOptions",
        "DatasetCreator",
        "MultiWorkerMirroredStrategy",
        "Optional",
        "ParameterServerStrategy",
        "PreemptionCheckpointHandler",
        "TPUStrategy",
        "TerminationConfig",
        "ValueContext",
        "coordinator",
        "partitioners",
    ]
    assert kd.experimental.partitioners.__all__ == [
        "FixedShardsPartitioner",
        "MaxSizePartitioner",
        "MinSizePartitioner",
        "Partitioner",
    ]
    assert kd.coordinator.__all__ == [
        "ClusterCoordinator",
        "PerWorkerValue",
        "PerWorkerValues",
        "RemoteValue",
        "experimental_get_current_worker_index",
    ]
    assert kd.experimental.coordinator.__all__ == [
        "ClusterCoordinator",
        "PerWorkerValues",
        "RemoteValue",
    ]
    assert kd.tpu.__all__ == ["experimental"]
    assert kd.tpu.experimental.__all__ == [
        "DeviceAssignment",
        "DeviceOrderMode",
        "Topology",
        "initialize_tpu_system",
        "shutdown_tpu_system",
    ]
    assert kd.nn.__all__ == ["compute_average_loss", "scale_regularization_loss"]


@pytest.mark.parametrize("thing", OBJECTS, ids=lambda thing: thing.__name__)
def test_public_objects_come_from_the_package_itself(thing):
    assert thing.__module__ == "keras_distribute"


@pytest.mark.parametrize("thing", OBJECTS, ids=lambda thing: thing.__name__)
def test_public_objects_and_their_methods_have_docstrings(thing):
    assert thing.__doc__
    if inspect.isclass(thing):
        for name, member in vars(thing).items():
            if not name.startswith("_") and (
                inspect.isfunction(member) or isinstance(member, property)
            ):
                assert inspect.getdoc(getattr(thing, name)), f"{thing.__name__}.{name}"


def _modules():
    packages = pkgutil.walk_packages(kd.__path__, "keras_distribute.")
    return [info.name for info in packages]


def _source_file(thing):
    try:
        return inspect.getsourcefile(thing)
    except TypeError:  # Built in.
        return None


class _Checker(doctest.OutputChecker):
    """Leaves out what JAX's plugin for GPUs says where there is none."""

    def check_output(self, want, got, optionflags):
        noise = re.compile(r"absl::InitializeLog|cudart_stub")
        lines = got.splitlines(keepends=True)
        got = "".join(line for line in lines if not noise.search(line))
        return super().check_output(want, got, optionflags)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", _modules())
def test_docstring_examples(name):
    module = importlib.import_module(name)
    finder = doctest.DocTestFinder(exclude_empty=True)
    flags = doctest.NORMALIZE_WHITESPACE
    runner = doctest.DocTestRunner(_Checker(), optionflags=flags)
    defined = [
        thing
        for thing in vars(module).values()
        if inspect.isclass(thing) or inspect.isfunction(thing)
    ]
    own = [thing for thing in defined if _source_file(thing) == module.__file__]
    for thing in own:
        for test in finder.find(thing, globs={"np": np, "keras": keras, "kd": kd}):
            runner.run(test)
    assert runner.summarize(verbose=False).failed == 0
