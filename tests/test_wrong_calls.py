"""Wrong kinds for every public parameter: only the package's errors, at once, and
nothing wrong is taken.

`TARGETS` says of each public function, class and method what its parameters take; a
test holds it against the signatures. Hypothesis draws the parameter and the value: a
few of each by default, always the same ones; many, other ones each time, with

    HYPOTHESIS_PROFILE=thorough python -m pytest tests/test_wrong_calls.py
"""

from __future__ import annotations

import enum
import functools
import inspect
import json
import math
import os
import pathlib
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import keras
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import keras_distribute as kd
from keras_distribute import errors

THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"
QUIET = (HealthCheck.too_slow, HealthCheck.function_scoped_fixture)
OFTEN = (
    settings(
        max_examples=400, deadline=None, print_blob=True, suppress_health_check=QUIET
    )
    if THOROUGH
    else settings(
        max_examples=25,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=QUIET,
    )
)
SECONDS = 5.0
cr, experimental, tpu = kd.cluster_resolver, kd.experimental, kd.tpu.experimental


# What is given.


@functools.cache
def strategy() -> kd.MirroredStrategy:
    return kd.MirroredStrategy(["cpu:0", "cpu:1"])


@functools.cache
def per_replica() -> kd.PerReplica:
    return strategy().run(lambda: np.ones(2, "float32"))


@functools.cache
def variable() -> keras.Variable:
    with strategy().scope():
        return keras.Variable(1.0)


POOL: dict[str, Any] = {
    "None": lambda: None,
    "text": lambda: "a",
    "no text": lambda: "",
    "full-width digits": lambda: "３１",
    "a number in a text": lambda: "5",
    "bytes": lambda: b"x",
    "nan": lambda: math.nan,
    "infinity": lambda: math.inf,
    "minus one": lambda: -1,
    "zero": lambda: 0,
    "a fraction": lambda: 2.5,
    "a huge number": lambda: 10**30,
    "a huge negative number": lambda: -(10**400),
    "complex": lambda: 1j,
    "True": lambda: True,
    "False": lambda: False,
    "NumPy's True": lambda: np.bool_(True),
    "NumPy's nan": lambda: np.float32(math.nan),
    "an empty list": list,
    "a list": lambda: [1, "a"],
    "a list of None": lambda: [None],
    "a ragged list": lambda: [[1], [2, 3]],
    "a tuple": lambda: (1, 2, 3),
    "a dict": lambda: {"a": 1},
    "an empty dict": dict,
    "a dict by number": lambda: {1: "a"},
    "a set": lambda: {1, 2},
    "an object": object,
    "a function": lambda: len,
    "a class": lambda: kd.MirroredStrategy,
    "a module": lambda: math,
    "an array": lambda: np.ones(2),
    "an array of objects": lambda: np.array([None, "a"], dtype=object),
    "an array of texts": lambda: np.array(["a"]),
    "an array of JAX": lambda: jnp.ones((2, 2)),
    "a PerReplica": per_replica,
    "a Mirrored": lambda: kd.Mirrored(np.float32(1)),
    "a variable": variable,
    "a strategy": strategy,
    "a member": lambda: kd.ReduceOp.SUM,
    "an error": lambda: ValueError("a"),
}
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=6)
    | st.binary(max_size=6)
)
DRAWN = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
        | st.dictionaries(st.integers(), inner, max_size=3)
        | st.tuples(inner, inner)
    ),
    max_leaves=6,
)
VALUES = st.sampled_from(list(POOL)).map(lambda name: POOL[name]()) | DRAWN


# What is taken: True for a value that may be right, and is not tried; False for one
# that must be refused; None for one that may be taken or refused, but only by our
# errors.


def anything(value: Any) -> None:
    return None


def any_number(value: Any) -> bool | None:
    """As in TensorFlow, which does not check whether it makes sense."""
    return None if isinstance(value, int | float | np.number | np.bool_) else False


def integer(least: int | None = 0, none: bool = False, most: int | None = None) -> Any:
    def right(value: Any) -> bool:
        if value is None:
            return none
        whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
        small = most is None or (whole and value <= most)
        return whole and (least is None or least <= value) and small

    return right


def number(least: float = 0.0, none: bool = False) -> Any:
    def right(value: Any) -> bool:
        if value is None:
            return none
        real = isinstance(value, int | float | np.floating | np.integer)
        real = real and not isinstance(value, bool) and abs(value) < 10**300
        return bool(real and value >= least)

    return right


def of(*kinds: type, none: bool = False) -> Any:
    def right(value: Any) -> bool:
        return isinstance(value, kinds) or (none and value is None)

    return right


def text(none: bool = False) -> Any:
    return of(str, none=none)


def is_path(value: Any) -> bool:
    return isinstance(value, str | pathlib.Path)


def path_or_none(value: Any) -> bool:
    return value is None or is_path(value)


flag = of(bool, np.bool_)
function = callable
optional_function = lambda value: value is None or callable(value)  # noqa: E731


def only(*known: Any) -> Any:
    return lambda value: any(type(value) is type(k) and value == k for k in known)


def either(*takes: Any) -> Any:
    return lambda value: any(take(value) is True for take in takes)


def numbers(value: Any) -> bool | None:
    """Arrays, numbers, and what may stand for them; no structures."""
    if type(value) in (str, bytes, set, type, type(len), type(math), object):
        return False
    return None


def resources(value: Any) -> bool | None:
    """`None`, or amounts by name."""
    return value is None or (None if isinstance(value, dict) else False)


reduction = either(of(kd.ReduceOp), only("SUM", "MEAN", "sum", "mean"))


def call_arguments(value: Any) -> bool | None:
    return None if isinstance(value, tuple | list) else False


def call_names(value: Any) -> bool | None:
    return None if value is None or isinstance(value, Mapping) else False


def dataset(value: Any) -> bool | None:
    return None if callable(getattr(value, "__iter__", None)) else False


def axis(value: Any) -> bool | None:
    return bool(integer(None)(value))


def axes(value: Any) -> bool | None:
    return None if value is None or isinstance(value, list | tuple) else axis(value)


def trackable(value: Any) -> bool:
    return isinstance(value, dict | keras.Variable)


def structure(value: Any) -> bool | None:
    return None


processes = integer(1, most=2**12)


def is_named(value: Any, kind: type = object) -> bool:
    """Whether it is a dict from names."""
    if not isinstance(value, Mapping):
        return False
    return all(isinstance(k, str) and isinstance(v, kind) for k, v in value.items())


class Target(NamedTuple):
    call: Any
    takes: dict[str, Any]


def made(cls: Any, required: Any = dict, /, **takes: Any) -> Target:
    """A class or function, called with the arguments that it requires."""
    return Target(lambda **given: cls(**{**required(), **given}), takes)


def method(make: Any, name: str, required: Any = dict, /, **takes: Any) -> Target:
    """A method of what `make` makes."""
    return Target(
        lambda **given: getattr(make(), name)(**{**required(), **given}), takes
    )


@functools.cache
def folder() -> str:
    return tempfile.mkdtemp()


@functools.cache
def checkpoint() -> kd.Checkpoint:
    return kd.Checkpoint(state={"a": 1})


@functools.cache
def manager() -> kd.CheckpointManager:
    return kd.CheckpointManager(checkpoint(), f"{folder()}/manager", asynchronous=False)


@functools.cache
def handler() -> Any:
    return experimental.PreemptionCheckpointHandler(
        None, checkpoint(), f"{folder()}/handler"
    )


@functools.cache
def topology() -> Any:
    places = [[[0, 0, 0, 0], [0, 1, 0, 0]]]
    return tpu.Topology(mesh_shape=[1, 2, 1, 1], device_coordinates=places)


@functools.cache
def assignment() -> Any:
    return tpu.DeviceAssignment.build(topology(), num_replicas=2)


@functools.cache
def tpu_strategy() -> kd.TPUStrategy:
    resolver = cr.TPUClusterResolver("cpu")
    found = tpu.initialize_tpu_system(resolver)
    build = tpu.DeviceAssignment.build
    shape = {"computation_shape": [1, 2, 1, 1], "num_replicas": 4}
    return kd.TPUStrategy(resolver, build(found, **shape))


@functools.cache
def model() -> keras.Model:
    with strategy().scope():
        made = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        made.compile("sgd", "mse")
    return made


@functools.cache
def report() -> Any:
    return kd.dry_run(model(), 8, "cpu:2")


@functools.cache
def distributed() -> kd.DistributedDataset:
    arrays = kd.ArrayDataset(np.arange(4), batch_size=2)
    return strategy().experimental_distribute_dataset(arrays)


SPEC = cr.ClusterSpec({"worker": ["a:1", "b:1"]})
PAIRS = {"reduce_op": "SUM", "value_destination_pairs": []}


def simple() -> Any:
    return cr.SimpleClusterResolver(SPEC, task_type="worker", task_id=0)


def union() -> Any:
    return cr.UnionResolver(simple())


class Base(cr.ClusterResolver):
    """The base, with what a subclass has to have."""

    def cluster_spec(self) -> Any:
        return SPEC


def tpu_resolver() -> Any:
    return cr.TPUClusterResolver("cpu")


def slurm() -> Any:
    return cr.SlurmClusterResolver(gpus_per_node=0)


def in_run(name: str, *args: Any) -> Any:
    """A call of the replica context, in a replica of the default strategy."""

    def call(**given: Any) -> Any:
        return getattr(kd.get_replica_context(), name)(*args, **given)

    return call


task = {"task_type": text(none=True), "task_id": integer(None, none=True)}
named_task = {**task, "rpc_layer": text(none=True)}
numbered_task = {  # As in `TF_CONFIG`, where numbers may be texts.
    **named_task,
    "task_id": lambda v: (isinstance(v, str) and v.isdecimal()) or integer(0, True)(v),
}
accelerators = {**task, "config_proto": anything}
a_file = is_path
communication = of(experimental.CommunicationOptions, none=True)
packing = {"num_packs": integer(), "bytes_per_pack": integer()}
input_options = of(kd.InputOptions, none=True)
coordinates = structure


def four(value: Any) -> bool | None:
    return (
        None if isinstance(value, list | tuple | np.ndarray) or value is None else False
    )


parameter_servers = {
    "cluster_resolver": of(cr.ClusterResolver, none=True),
    "variable_partitioner": optional_function,
    "max_staleness": integer(0, none=True),
    "lazy_rows": flag,
    "local_steps": integer(1),
    "local_slots": lambda v: v is False,  # As above.
    "communication_dtype": lambda v: v is None,
    "outer_optimizer": lambda v: v is None,  # There are no local steps.
}
reduced_pairs = {
    "reduce_op": reduction,
    "value_destination_pairs": lambda v: None if isinstance(v, list | tuple) else False,
    "options": communication,
}
synchronous = {
    "shard_optimizer_state": flag,
    "communication_dtype": lambda v: v is None,
    "deterministic": flag,
    "num_replicas": lambda v: v is None,
    "shard_variables": flag,
    "min_shard_bytes": integer(1),
    "layout_map": lambda v: v is None or (None if isinstance(v, dict) else False),
}
A_TASK = {"job_name": "ps", "task_index": 0, "start": False}

TARGETS: dict[str, Target] = {
    "ArrayDataset": made(
        kd.ArrayDataset,
        lambda: {"arrays": np.arange(4), "batch_size": 2},
        arrays=numbers,
        batch_size=integer(1),
        shuffle=flag,
        seed=integer(0, none=True),
        drop_remainder=flag,
    ),
    "Checkpoint": Target(
        lambda root=None, objects=None: (
            kd.Checkpoint(root) if objects is None else kd.Checkpoint(value=objects)
        ),
        {
            "root": lambda v: v is None or trackable(v),
            "objects": lambda v: v is None or trackable(v),
        },
    ),
    "Checkpoint.read": method(
        checkpoint,
        "read",
        lambda: {"save_path": None},
        save_path=path_or_none,
        partial=flag,
    ),
    "Checkpoint.restore": method(
        checkpoint,
        "restore",
        lambda: {"save_path": None},
        save_path=path_or_none,
        partial=flag,
    ),
    "Checkpoint.save": method(checkpoint, "save", file_prefix=a_file),
    "Checkpoint.write": method(checkpoint, "write", file_prefix=a_file),
    "CheckpointManager": made(
        kd.CheckpointManager,
        lambda: {"checkpoint": checkpoint(), "directory": f"{folder()}/made"},
        checkpoint=of(kd.Checkpoint),
        directory=a_file,
        max_to_keep=integer(1, none=True),
        keep_best=lambda v: v is None,
        save_interval_steps=integer(1, none=True),
        asynchronous=flag,
    ),
    "CheckpointManager.delete": method(manager, "delete", step=integer()),
    "CheckpointManager.restore": method(
        manager, "restore", step=integer(0, none=True), partial=flag, fallback=flag
    ),
    "CheckpointManager.save": method(
        manager,
        "save",
        # Also of an array that holds a whole number.
        step=lambda v: (
            None if getattr(v, "shape", 0) == () else integer(0, none=True)(v)
        ),
        metrics=lambda v: v is None or None if isinstance(v, dict | None) else False,
        force=flag,
    ),
    "CrossDeviceOps.batch_reduce": method(
        kd.NcclAllReduce, "batch_reduce", lambda: PAIRS, **reduced_pairs
    ),
    "CrossDeviceOps.broadcast": method(
        kd.NcclAllReduce,
        "broadcast",
        lambda: {"tensor": 1.0, "destinations": variable()},
        tensor=numbers,
        destinations=numbers,
    ),
    "CrossDeviceOps.reduce": method(
        kd.NcclAllReduce,
        "reduce",
        lambda: {"reduce_op": "SUM", "per_replica_value": per_replica()},
        reduce_op=reduction,
        per_replica_value=lambda v: (
            None if hasattr(v, "value") else of(kd.PerReplica)(v)
        ),
        destinations=anything,
        options=communication,
    ),
    "DistributedDataset.reduce": method(
        distributed,
        "reduce",
        lambda: {"initial_state": 0, "reduce_func": lambda state, element: state},
        initial_state=anything,
        reduce_func=function,
    ),
    "DistributedIterator.set_state": method(
        lambda: iter(distributed()), "set_state", state=lambda v: False
    ),
    "DryRunReport.count": method(report, "count", kind=text()),
    "DryRunReport.plot": method(report, "plot", path=a_file),
    "DryRunReport.save": method(report, "save", path=a_file),
    "HierarchicalCopyAllReduce": made(kd.HierarchicalCopyAllReduce, **packing),
    "NcclAllReduce": made(kd.NcclAllReduce, **packing),
    "ReductionToOneDevice": made(
        kd.ReductionToOneDevice,
        reduce_to_device=anything,
        accumulation_fn=optional_function,
    ),
    "InputContext": made(
        kd.InputContext,
        num_input_pipelines=any_number,
        input_pipeline_id=any_number,
        num_replicas_in_sync=any_number,
    ),
    "InputContext.get_per_replica_batch_size": method(
        kd.InputContext, "get_per_replica_batch_size", global_batch_size=any_number
    ),
    "InputOptions": made(
        kd.InputOptions,
        experimental_fetch_to_device=of(bool, np.bool_, none=True),
        experimental_replication_mode=of(kd.InputReplicationMode),
        experimental_place_dataset_on_device=flag,
        experimental_per_replica_buffer_size=integer(0, none=True),
        auto_shard_policy=of(kd.AutoShardPolicy, none=True),
    ),
    "MirroredStrategy": made(
        kd.MirroredStrategy,
        lambda: {"devices": ["cpu:0"]},
        devices=lambda v: v is None,
        cross_device_ops=of(kd.CrossDeviceOps, none=True),
        num_logical_devices=lambda v: integer(1)(v) and int(v) == 1,
        **synchronous,
    ),
    "MultiWorkerMirroredStrategy": made(
        kd.MultiWorkerMirroredStrategy,
        cluster_resolver=of(cr.ClusterResolver, none=True),
        communication_options=communication,
        num_logical_devices=lambda v: integer(1)(v) and 8 % int(v) == 0,
        **synchronous,
    ),
    "OneDeviceStrategy": made(kd.OneDeviceStrategy, device=lambda v: False),
    "ParameterServerStrategy": made(kd.ParameterServerStrategy, **parameter_servers),
    "experimental.ParameterServerStrategy": made(
        experimental.ParameterServerStrategy, **parameter_servers
    ),
    "Server": made(
        kd.Server,
        lambda: {"server_or_cluster_def": {"ps": ["a:1"]}, **A_TASK},
        server_or_cluster_def=lambda v: False,
        job_name=lambda v: False,
        task_index=lambda v: False,
        protocol=lambda v: True,
        config=lambda v: True,
        start=flag,
    ),
    "Server.create_local_server": made(
        kd.Server.create_local_server, config=lambda v: True, start=flag
    ),
    "testing.ParameterServerCluster": made(
        kd.testing.ParameterServerCluster,
        num_workers=integer(1),
        num_ps=integer(1),
        encrypted=flag,
        devices_per_worker=integer(1),
    ),
    "testing.RecordedUpdates": made(
        kd.testing.RecordedUpdates, strategy=lambda v: False
    ),
    "experimental.CentralStorageStrategy": made(
        experimental.CentralStorageStrategy,
        lambda: {"compute_devices": ["cpu:0"]},
        compute_devices=lambda v: v is None,
        parameter_device=lambda v: v is None,
    ),
    "experimental.DatasetCreator": made(
        experimental.DatasetCreator,
        lambda: {"dataset_fn": lambda context: kd.ArrayDataset(np.arange(4), 2)},
        dataset_fn=function,
        input_options=input_options,
    ),
    "experimental.CollectiveHints": made(
        experimental.CollectiveHints,
        bytes_per_pack=integer(0),
        timeout_seconds=number(1e-300, none=True),
    ),
    "experimental.MultiWorkerMirroredStrategy": made(
        experimental.MultiWorkerMirroredStrategy,
        communication=of(experimental.CommunicationImplementation),
        cluster_resolver=of(cr.ClusterResolver, none=True),
    ),
    "experimental.TPUStrategy": made(
        experimental.TPUStrategy,
        lambda: {"tpu_cluster_resolver": cr.TPUClusterResolver("cpu")},
        tpu_cluster_resolver=of(cr.ClusterResolver, none=True),
        device_assignment=of(tpu.DeviceAssignment, none=True),
    ),
    "RunOptions": made(
        kd.RunOptions,
        experimental_enable_dynamic_batch_size=flag,
        experimental_bucketizing_dynamic_shape=flag,
        experimental_xla_options=of(dict, none=True),
    ),
    "Strategy": made(
        kd.Strategy,
        lambda: {"mesh": None},
        mesh=lambda v: False,
        cross_device_ops=lambda v: False,
        shard_optimizer_state=lambda v: False,
        communication_dtype=lambda v: False,
        shard_variables=lambda v: False,
        min_shard_bytes=lambda v: False,
        layout_map=lambda v: False,
    ),
    "Strategy.distribute_datasets_from_function": method(
        strategy,
        "distribute_datasets_from_function",
        lambda: {
            "dataset_fn": lambda context: kd.ArrayDataset(np.arange(4), batch_size=2)
        },
        dataset_fn=function,
        options=input_options,
    ),
    "Strategy.experimental_distribute_dataset": method(
        strategy,
        "experimental_distribute_dataset",
        lambda: {"dataset": kd.ArrayDataset(np.arange(4), batch_size=2)},
        dataset=dataset,
        options=input_options,
    ),
    "Strategy.experimental_distribute_values_from_function": method(
        strategy, "experimental_distribute_values_from_function", value_fn=function
    ),
    "Strategy.experimental_local_results": method(
        strategy, "experimental_local_results", value=anything
    ),
    "Strategy.gather": method(
        strategy,
        "gather",
        lambda: {"value": per_replica(), "axis": 0},
        value=numbers,
        axis=axis,
    ),
    "Strategy.group": method(
        strategy, "group", lambda: {"value": 1}, value=anything, name=anything
    ),
    "Strategy.reduce": method(
        strategy,
        "reduce",
        lambda: {"reduce_op": "SUM", "value": per_replica(), "axis": None},
        reduce_op=reduction,
        value=numbers,
        axis=axes,
    ),
    "Strategy.run": method(
        strategy,
        "run",
        lambda: {"fn": lambda *args, **kwargs: None},
        fn=function,
        args=call_arguments,
        kwargs=call_names,
        options=of(kd.RunOptions, none=True),
    ),
    "Strategy.check_consistency": Target(
        lambda objects=None, **given: strategy().check_consistency(
            variable() if objects is None else objects, **given
        ),
        {
            "objects": lambda v: v is None or isinstance(v, keras.Variable),
            "action": lambda v: False,
            "step": integer(0, none=True),
        },
    ),
    "Strategy.summary": Target(
        lambda objects=None, batch_size=None: strategy().summary(
            *(() if objects is None else (objects,)), batch_size=batch_size
        ),
        {
            "objects": lambda v: v is None or isinstance(v, keras.Variable),
            "batch_size": integer(1, none=True),
        },
    ),
    "StrategyExtended.batch_reduce_to": method(
        lambda: strategy().extended, "batch_reduce_to", lambda: PAIRS, **reduced_pairs
    ),
    "StrategyExtended.reduce_to": method(
        lambda: strategy().extended,
        "reduce_to",
        lambda: {"reduce_op": "SUM", "value": per_replica(), "destinations": None},
        reduce_op=reduction,
        value=numbers,
        destinations=anything,
        options=communication,
    ),
    "StrategyExtended.update": method(
        lambda: strategy().extended,
        "update",
        lambda: {"var": variable(), "fn": lambda *args, **kwargs: None},
        var=of(keras.Variable),
        fn=function,
        args=call_arguments,
        kwargs=call_names,
        group=flag,
    ),
    "StrategyExtended.value_container": method(
        lambda: strategy().extended, "value_container", value=anything
    ),
    "StrategyExtended.variable_created_in_scope": method(
        lambda: strategy().extended, "variable_created_in_scope", v=of(keras.Variable)
    ),
    "StrategySummary.plot": method(lambda: strategy().summary(), "plot", path=a_file),
    "StrategySummary.tables": method(
        lambda: strategy().summary(variable()),
        "tables",
        max_variables=integer(0, none=True),
    ),
    "StrategySummary.text": method(
        lambda: strategy().summary(variable()),
        "text",
        max_variables=integer(0, none=True),
    ),
    "TPUStrategy": made(
        kd.TPUStrategy,
        lambda: {"tpu": "cpu"},
        tpu_cluster_resolver=of(cr.ClusterResolver, none=True),
        experimental_device_assignment=of(tpu.DeviceAssignment, none=True),
        experimental_spmd_xla_partitioning=flag,
        tpu=text(none=True),
        layout_map=lambda v: v is None or (None if isinstance(v, dict) else False),
        shard_optimizer_state=flag,
        shard_variables=flag,
        min_shard_bytes=integer(1),
        deterministic=flag,
        num_replicas=lambda v: v is None,
    ),
    "TPUStrategy.experimental_assign_to_logical_device": method(
        tpu_strategy,
        "experimental_assign_to_logical_device",
        lambda: {"tensor": np.ones((2, 2)), "logical_device_id": 0},
        tensor=numbers,
        logical_device_id=integer(0, most=1),
    ),
    "TPUStrategy.experimental_replicate_to_logical_devices": method(
        tpu_strategy, "experimental_replicate_to_logical_devices", tensor=numbers
    ),
    "TPUStrategy.experimental_split_to_logical_devices": method(
        tpu_strategy,
        "experimental_split_to_logical_devices",
        lambda: {"tensor": np.ones((2, 2)), "partition_dimensions": [1, 2]},
        tensor=numbers,
        partition_dimensions=structure,
    ),
    "barrier": made(kd.barrier, name=text()),
    "compare_dry_runs": made(
        kd.compare_dry_runs,
        lambda: {"build_model": model, "batch": 8, "topology": "cpu:2"},
        build_model=lambda v: None if callable(v) else False,
        batch=lambda v: True if integer(1)(v) else numbers(v),
        topology=lambda v: False,
        largest_batch=flag,
        memory_limit=integer(1, none=True),
        num_logical_devices=lambda v: integer(1)(v) and int(v) == 1,
        layout_map=lambda v: v is None or (None if isinstance(v, dict) else False),
        verbose=either(integer(), flag),
    ),
    "layout_plan": made(
        kd.layout_plan,
        lambda: {"model_or_builder": model()},
        model_or_builder=either(callable, of(keras.Model)),
        num_logical_devices=integer(1),
    ),
    "dry_run": made(
        kd.dry_run,
        lambda: {"model_or_builder": model(), "batch": 8, "topology": "cpu:2"},
        model_or_builder=either(callable, of(keras.Model)),
        batch=lambda v: True if integer(1)(v) else numbers(v),
        topology=lambda v: False,
        largest_batch=flag,
        memory_limit=integer(1, none=True),
        shard_optimizer_state=flag,
        shard_variables=flag,
        verbose=either(integer(), flag),
    ),
    "experimental_set_strategy": made(
        kd.experimental_set_strategy, strategy=of(kd.Strategy, none=True)
    ),
    "find_batch_size": made(
        kd.find_batch_size,
        lambda: {
            "model": model(),
            "x": np.ones((4, 2)),
            "y": np.ones(4),
            "max_batch_size": 2,
        },
        model=of(keras.Model),
        x=lambda v: True,  # As those of `fit`.
        y=lambda v: True,
        sample_weight=lambda v: True,
        starting_batch_size=integer(1, none=True, most=2**31 - 1),
        max_batch_size=integer(1, none=True, most=2**31 - 1),
        global_batch_size=integer(1, none=True, most=2**31 - 1),
        memory_limit=integer(1, none=True),
        margin=number(),
        steps_per_trial=integer(1),
    ),
    "notebook_launcher": made(
        kd.notebook_launcher,
        lambda: {"function": len},
        function=function,
        args=of(list, tuple),
        num_processes=processes,
        cpu_devices=integer(1, none=True, most=2**12),
        timeout=number(1e-300, none=True),
    ),
    "print_on_chief": Target(
        lambda values=None, options=None: kd.print_on_chief(values, end=options),
        {"values": lambda v: True, "options": lambda v: True},
    ),
    "run_on_chief": Target(
        kd.run_on_chief,
        {"function": function, "args": lambda v: True, "kwargs": lambda v: True},
    ),
    "value_and_grad": made(
        kd.value_and_grad,
        lambda: {"fn": len, "variables": [keras.Variable(1.0)]},
        fn=function,
        variables=lambda v: False,
        has_aux=flag,
    ),
    "callbacks.BackupAndRestore": made(
        kd.callbacks.BackupAndRestore,
        lambda: {"backup_dir": f"{folder()}/backup"},
        backup_dir=a_file,
        save_freq=either(integer(1), only("epoch", False)),
        save_seconds=number(1e-300, none=True),
        delete_checkpoint=flag,
        max_to_keep=integer(1),
        save_before_preemption=flag,
        termination_config=of(experimental.TerminationConfig, none=True),
        data_position=flag,
        objects=of(dict, none=True),
    ),
    "callbacks.RayReport": made(kd.callbacks.RayReport, save_model=flag),
    "callbacks.ReplicaConsistency": made(
        kd.callbacks.ReplicaConsistency, every=integer(1), action=lambda v: False
    ),
    "callbacks.StepReplay": made(
        kd.callbacks.StepReplay,
        every=integer(1),
        action=lambda v: False,
        folder=path_or_none,
    ),
    "callbacks.StepTimeReport": made(
        kd.callbacks.StepTimeReport,
        num_steps=integer(1),
        skip=integer(1),
        trace_dir=path_or_none,
        verbose=either(integer(), flag),
    ),
    "callbacks.StepTimeReport.plot": method(
        kd.callbacks.StepTimeReport, "plot", path=a_file
    ),
    "cluster_resolver.ClusterResolver.master": method(Base, "master", **named_task),
    "cluster_resolver.ClusterResolver.num_accelerators": method(
        Base, "num_accelerators", **accelerators
    ),
    "cluster_resolver.ClusterSpec": made(
        cr.ClusterSpec, cluster=lambda v: None if isinstance(v, dict) else False
    ),
    **{
        f"cluster_resolver.ClusterSpec.{name}": method(
            lambda: SPEC, name, job_name=only("worker")
        )
        for name in ("job_tasks", "num_tasks", "task_indices")
    },
    "cluster_resolver.ClusterSpec.task_address": method(
        lambda: SPEC,
        "task_address",
        lambda: {"job_name": "worker", "task_index": 0},
        job_name=only("worker"),
        task_index=integer(0, most=1),
    ),
    "cluster_resolver.GCEClusterResolver": made(
        cr.GCEClusterResolver,
        lambda: {
            "project": "p",
            "zone": "z",
            "instance_group": "g",
            "port": 1,
            "service": 1,
        },
        project=text(),
        zone=text(),
        instance_group=text(),
        port=integer(1, most=65535),
        task_type=text(),
        task_id=integer(None, none=True),
        rpc_layer=text(none=True),
        credentials=anything,
        service=lambda v: True if v is None else None,  # It asks for Google's client.
    ),
    "cluster_resolver.KubernetesClusterResolver": made(
        cr.KubernetesClusterResolver,
        lambda: {"override_client": 1},
        job_to_label_mapping=lambda v: (
            v is None or (None if isinstance(v, dict) else False)
        ),
        tf_server_port=integer(1, most=65535),
        rpc_layer=text(none=True),
        override_client=anything,
        executable_location=of(cr.KubernetesExecutableLocation),
    ),
    "cluster_resolver.MPICHClusterResolver": made(
        cr.MPICHClusterResolver, coordinator=text(none=True), auto_set_gpu=flag
    ),
    "cluster_resolver.OpenMPIClusterResolver": made(
        cr.OpenMPIClusterResolver, coordinator=text(none=True), auto_set_gpu=flag
    ),
    "cluster_resolver.RayClusterResolver": made(
        cr.RayClusterResolver,
        num_workers=integer(1),
        num_ps=integer(1),
        resources_per_worker=resources,
        resources_per_ps=resources,
        max_restarts=integer(-1),
        timeout_seconds=number(1e-300),
    ),
    "cluster_resolver.SageMakerClusterResolver": made(
        cr.SageMakerClusterResolver,
        port=integer(1, most=65535),
        **numbered_task,
        environment=text(none=True),
    ),
    "cluster_resolver.SimpleClusterResolver": made(
        cr.SimpleClusterResolver,
        lambda: {"cluster_spec": SPEC},
        cluster_spec=of(cr.ClusterSpec),
        master=text(),
        **named_task,
        environment=text(none=True),
        num_accelerators=lambda v: None if v is None or isinstance(v, dict) else False,
    ),
    "cluster_resolver.SimpleClusterResolver.master": method(
        simple, "master", **named_task
    ),
    "cluster_resolver.SimpleClusterResolver.num_accelerators": method(
        simple, "num_accelerators", **accelerators
    ),
    "cluster_resolver.SlurmClusterResolver": made(
        cr.SlurmClusterResolver,
        lambda: {"gpus_per_node": 0},
        jobs=lambda v: v is None or (None if isinstance(v, dict) else False),
        port_base=integer(1, most=65535, none=True),
        gpus_per_node=integer(0, none=True),
        gpus_per_task=integer(0, none=True),
        tasks_per_node=lambda v: (
            None if isinstance(v, dict) else integer(1, none=True)(v)
        ),
        auto_set_gpu=flag,
        rpc_layer=text(none=True),
    ),
    "cluster_resolver.SlurmClusterResolver.num_accelerators": method(
        slurm, "num_accelerators", **accelerators
    ),
    "cluster_resolver.TFConfigClusterResolver": made(
        cr.TFConfigClusterResolver, **numbered_task, environment=text(none=True)
    ),
    "cluster_resolver.TPUClusterResolver": made(
        cr.TPUClusterResolver,
        lambda: {"tpu": "cpu"},
        tpu=lambda v: v is None or isinstance(v, str | list),
        zone=text(none=True),
        project=text(none=True),
        job_name=text(),
        coordinator_name=text(none=True),
        coordinator_address=text(none=True),
        credentials=anything,
        service=anything,
        discovery_url=text(none=True),
    ),
    "cluster_resolver.TPUClusterResolver.connect": made(
        cr.TPUClusterResolver.connect,
        lambda: {"tpu": "cpu"},
        tpu=lambda v: v is None or isinstance(v, str | list),
        zone=text(none=True),
        project=text(none=True),
    ),
    "cluster_resolver.TPUClusterResolver.master": method(
        tpu_resolver, "master", **named_task
    ),
    "cluster_resolver.TPUClusterResolver.num_accelerators": method(
        tpu_resolver, "num_accelerators", **accelerators
    ),
    "cluster_resolver.Topology": made(
        cr.Topology,
        lambda: {"process_id": 0, "num_processes": 2, "coordinator": "a:1"},
        process_id=integer(0, most=1),
        num_processes=integer(1),
        coordinator=lambda v: False,
    ),
    "cluster_resolver.UnionResolver": Target(
        lambda args=None, **given: cr.UnionResolver(
            simple() if args is None else args, **given
        ),
        {"args": lambda v: v is None, **named_task},
    ),
    "cluster_resolver.UnionResolver.master": method(union, "master", **named_task),
    "cluster_resolver.UnionResolver.num_accelerators": method(
        union, "num_accelerators", **accelerators
    ),
    "testing.Fault": made(
        kd.testing.Fault,
        lambda: {"action": "raise"},
        action=lambda v: False,
        process=integer(0, none=True),
        moment=lambda v: False,
        step=integer(),
        error=of(Exception, none=True),
        seconds=number(),
        variable=of(keras.Variable, str, none=True),
        replica=integer(),
        element=integer(),
        bit=integer(),
        what=lambda v: False,
    ),
    "testing.Fault.now": method(
        lambda: kd.testing.Fault("raise", step=10**9), "now", step=integer()
    ),
    "testing.MultiProcessRunner": made(
        kd.testing.MultiProcessRunner,
        lambda: {"function": len},
        function=function,
        num_processes=processes,
        args=of(list, tuple),
        kwargs=lambda v: v is None or is_named(v),
        cpu_devices=integer(1, none=True, most=2**12),
        timeout=number(1e-300),
        environment=lambda v: v is None or is_named(v, str),
        echo=flag,
        by_value=flag,
    ),
    "testing.NamedStrategy": made(
        kd.testing.NamedStrategy,
        lambda: {"name": "a", "create": kd.MirroredStrategy},
        name=text(),
        create=function,
        num_devices=integer(1),
        num_processes=integer(1),
    ),
    "testing.combine": made(
        kd.testing.combine, choices=lambda v: isinstance(v, list | tuple)
    ),
    "testing.cpu_devices": made(kd.testing.cpu_devices, num_devices=integer(1, most=8)),
    "testing.run_in_processes": Target(
        lambda function=len, num_processes=2, args=None, kwargs=None, **given: (
            kd.testing.run_in_processes(function, num_processes, **given)
        ),
        {
            "function": function,
            "num_processes": processes,
            "args": lambda v: True,
            "kwargs": lambda v: True,
            "cpu_devices": integer(1, none=True, most=2**12),
            "timeout": number(1e-300),
            "environment": lambda v: v is None or is_named(v, str),
        },
    ),
    "experimental.CommunicationOptions": made(
        experimental.CommunicationOptions,
        bytes_per_pack=integer(0),
        timeout_seconds=number(1e-300, none=True),
        implementation=of(experimental.CommunicationImplementation),
    ),
    "experimental.PreemptionCheckpointHandler": made(
        experimental.PreemptionCheckpointHandler,
        lambda: {
            "cluster_resolver": None,
            "checkpoint_or_checkpoint_manager": checkpoint(),
            "checkpoint_dir": f"{folder()}/handled",
        },
        cluster_resolver=lambda v: True,
        checkpoint_or_checkpoint_manager=of(kd.Checkpoint, kd.CheckpointManager),
        checkpoint_dir=is_path,
        termination_config=of(experimental.TerminationConfig, none=True),
    ),
    "experimental.PreemptionCheckpointHandler.run": Target(
        lambda distributed_train_function=None, args=None, kwargs=None: handler().run(
            distributed_train_function
        ),
        {
            "distributed_train_function": function,
            "args": lambda v: True,
            "kwargs": lambda v: True,
        },
    ),
    "experimental.PreemptionCheckpointHandler.save_checkpoint_if_preempted": Target(
        lambda **given: None,  # Handed on to the user's function, or to `save`.
        {"args": lambda v: True, "kwargs": lambda v: True},
    ),
    "experimental.CommunicationOptions.checked": made(
        experimental.CommunicationOptions.checked, options=communication
    ),
    "experimental.TerminationConfig": made(
        experimental.TerminationConfig,
        termination_watcher_fn=optional_function,
        exit_fn=optional_function,
        grace_period=number(0.0, none=True),
        save_fn=optional_function,
    ),
    "experimental.ValueContext": made(
        experimental.ValueContext,
        replica_id_in_sync_group=integer(0),
        num_replicas_in_sync=integer(1),
    ),
    "tpu.experimental.DeviceAssignment": made(
        tpu.DeviceAssignment,
        lambda: {"topology": topology(), "core_assignment": [[[0, 0, 0, 0]]]},
        topology=of(tpu.Topology),
        core_assignment=lambda v: False,
    ),
    "tpu.experimental.DeviceAssignment.build": made(
        tpu.DeviceAssignment.build,
        lambda: {"topology": topology()},
        topology=of(tpu.Topology),
        computation_shape=four,
        computation_stride=four,
        num_replicas=integer(1, most=2),
        device_order_mode=of(tpu.DeviceOrderMode),
    ),
    "tpu.experimental.DeviceAssignment.lookup_replicas": method(
        assignment,
        "lookup_replicas",
        lambda: {"task_id": 0, "logical_core": 0},
        task_id=integer(0, most=0),
        logical_core=integer(0, most=0),
    ),
    **{
        f"tpu.experimental.DeviceAssignment.{name}": method(
            assignment,
            name,
            lambda: {"replica": 0, "logical_core": 0},
            replica=integer(0, most=1),
            logical_core=integer(0, most=0),
            **({"job": text(none=True)} if "device" in name else {}),
        )
        for name in ("coordinates", "tpu_ordinal", "host_device", "tpu_device")
    },
    "tpu.experimental.Topology": made(
        tpu.Topology,
        lambda: {"mesh_shape": [1, 2, 1, 1], "device_coordinates": [[[0, 0, 0, 0]]]},
        serialized=lambda v: v is None or (None if isinstance(v, bytes) else False),
        mesh_shape=lambda v: False,
        device_coordinates=lambda v: False,
    ),
    **{
        f"tpu.experimental.Topology.{name}": method(
            topology,
            name,
            lambda: {"device_coordinates": [0, 0, 0, 0]},
            device_coordinates=lambda v: False,
            **({"job": text(none=True)} if "device_name" in name else {}),
        )
        for name in (
            "task_ordinal_at_coordinates",
            "tpu_device_ordinal_at_coordinates",
            "cpu_device_name_at_coordinates",
            "tpu_device_name_at_coordinates",
        )
    },
    "tpu.experimental.initialize_tpu_system": made(
        tpu.initialize_tpu_system, cluster_resolver=of(cr.ClusterResolver)
    ),
    "tpu.experimental.shutdown_tpu_system": made(
        tpu.shutdown_tpu_system, cluster_resolver=of(cr.ClusterResolver)
    ),
    "nn.compute_average_loss": made(
        kd.nn.compute_average_loss,
        lambda: {"per_example_loss": np.ones(2)},
        per_example_loss=lambda v: False if v is None else numbers(v),
        sample_weight=numbers,
        global_batch_size=lambda v: True if integer(0, none=True)(v) else numbers(v),
    ),
    "nn.scale_regularization_loss": made(
        kd.nn.scale_regularization_loss,
        regularization_loss=lambda v: False if v is None else numbers(v),
    ),
    "config.set_cpu_devices": made(
        kd.config.set_cpu_devices, num_devices=integer(8, most=8)
    ),
    "config.set_prefetch_steps": made(
        kd.config.set_prefetch_steps, num_steps=integer()
    ),
    "ReduceOp.from_variable_aggregation": made(
        kd.ReduceOp.from_variable_aggregation,
        aggregation=only(kd.VariableAggregation.SUM, kd.VariableAggregation.MEAN),
    ),
    "ReduceOp.parse": made(kd.ReduceOp.parse, value=reduction),
}


def rows(value: Any) -> bool | None:
    """Keras takes arrays of rows; what it says of structures of others is its own."""
    return (
        None
        if isinstance(value, np.ndarray | jnp.ndarray | dict | list | tuple)
        else False
    )


# What Keras hands on to this package.
KERAS: dict[str, Target] = {
    "Model.compile": Target(
        lambda steps_per_execution: compiled(steps_per_execution=steps_per_execution),
        {"steps_per_execution": either(integer(1), only("auto"))},
    ),
    "Model.fit": Target(
        lambda **given: model().fit(**{"x": X, "y": X[:, :1], "verbose": 0, **given}),
        {
            "x": rows,
            "y": lambda v: not isinstance(v, kd.DistributedValues),
            "sample_weight": lambda v: not isinstance(v, kd.DistributedValues),
            "validation_data": lambda v: not isinstance(v, kd.DistributedValues),
        },
    ),
    **{
        f"Model.{name}": Target(
            lambda x, name=name: getattr(model(), name)(x, verbose=0), {"x": rows}
        )
        for name in ("evaluate", "predict")
    },
}
X = np.ones((4, 2), "float32")


def compiled(**given: Any) -> None:
    with strategy().scope():
        made = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        made.compile("sgd", "mse", **given)


# What a user does not make, or what has no parameter of its own.
MADE_BY_THE_PACKAGE = {
    "callbacks.StepReport",
    "BatchSizeResult",
    "ConsistencyReport",
    "DistributedDataset",
    "DistributedIterator",
    "DryRunComparison",
    "DryRunReport",
    "ElementSpec",
    "LayoutPlan",
    "Mirrored",
    "PerReplica",
    "PerReplica.of",
    "ReplicaContext",
    "RestoreStatus",
    "StrategyExtended",
    "StrategySummary",
    "experimental.Optional",
    "testing.ProcessResult",
}
# Keras makes them, and says what their parameters are.
VARIABLES = {"MirroredVariable", "SyncOnReadVariable"}
# Of a job that runs; `tests/processes` has them.
OF_A_JOB = {
    f"testing.MultiProcessRunner.{name}"
    for name in ("freeze", "join", "kill", "log", "thaw")
}
# Of a cluster that runs; `tests/parameter_server` has them.
OF_A_CLUSTER = {
    *(f"testing.ParameterServerCluster.{n}" for n in ("kill", "output_of", "start")),
    *(
        f"{strategy}.{name}"
        for strategy in (
            "ParameterServerStrategy",
            "experimental.ParameterServerStrategy",
        )
        for name in (
            "close",
            "distribute_datasets_from_function",
            "experimental_distribute_dataset",
            "reconnect",
            "run",
        )
    ),
}
# Called in a program, where JAX says what its arrays cannot be; see the test below.
IN_A_PROGRAM = {
    f"ReplicaContext.{n}" for n in ("all_gather", "all_reduce", "merge_call")
}
# Called by the package, or by Keras.
FOR_LIBRARIES = {
    "callbacks.StepTimeReport.set_state",
    *(
        f"{cls}.{name}_implementation"
        for cls in ("CrossDeviceOps", "ReductionToOneDevice")
        for name in ("reduce", "batch_reduce", "broadcast")
    ),
}
BY_A_MODEL = {  # Which says that its own steps are meant.
    f"{cls}.wait_for_steps"
    for cls in (
        "Strategy",
        "ParameterServerStrategy",
        "experimental.ParameterServerStrategy",
    )
}
LEFT_OUT = (
    MADE_BY_THE_PACKAGE
    | VARIABLES
    | OF_A_JOB
    | OF_A_CLUSTER
    | IN_A_PROGRAM
    | FOR_LIBRARIES
    | BY_A_MODEL
)


def public_parameters() -> set[tuple[str, str]]:
    """Each parameter of each public function, class and method, by the name it has."""
    modules = {
        "": kd,
        "callbacks.": kd.callbacks,
        "cluster_resolver.": kd.cluster_resolver,
        "testing.": kd.testing,
        "experimental.": kd.experimental,
        "tpu.experimental.": kd.tpu.experimental,
        "nn.": kd.nn,
    }
    found: dict[str, Any] = {
        "config.set_cpu_devices": kd.config.set_cpu_devices,
        "config.set_prefetch_steps": kd.config.set_prefetch_steps,
    }
    for own in ("replicate_to", "split_to"):  # Of a base of three strategies.
        name = f"experimental_{own}_logical_devices"
        found[f"TPUStrategy.{name}"] = getattr(kd.TPUStrategy, name)
    for place, module in modules.items():
        for name in module.__all__:
            thing = getattr(module, name)
            if inspect.isclass(thing):
                if not issubclass(thing, enum.Enum | kd.DistributedValues):
                    found[place + name] = thing
                found |= {
                    f"{place}{name}.{own}": getattr(thing, own)
                    for own, member in vars(thing).items()
                    if not own.startswith(("_", "on_"))
                    and (inspect.isfunction(member) or isinstance(member, staticmethod))
                }
            elif callable(thing):
                found[place + name] = thing
    return {
        (name, parameter)
        for name, thing in found.items()
        for parameter in inspect.signature(thing).parameters
        if parameter != "self" and name not in LEFT_OUT
    }


def test_every_public_parameter_is_in_the_table():
    known = {(name, one) for name, target in TARGETS.items() for one in target.takes}
    assert known == public_parameters()
    for name in LEFT_OUT - {"PerReplica", "Mirrored"}:
        *places, last = name.split(".")
        owner = functools.reduce(getattr, places, kd)
        assert hasattr(owner, last) or "implementation" in last, name


CLUSTER = (
    "KERAS_DISTRIBUTION_",
    "OMPI_",
    "PMI_",
    "MPI_LOCAL",
    "SLURM_",
    "SM_",
    "TPU_",
    "MEGASCALE_",
)
STEP = {
    "SLURM_PROCID": "0",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_NODELIST": "n1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
    "CUDA_VISIBLE_DEVICES": "",
}
MPI = {
    "OMPI_COMM_WORLD_SIZE": "1",
    "OMPI_COMM_WORLD_RANK": "0",
    "PMI_SIZE": "1",
    "PMI_RANK": "0",
}


@pytest.fixture
def alone(monkeypatch):
    """No variables of clusters; nothing starts a process, or connects to anything."""

    def refused(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a process was started, or something connected to")

    for name in list(os.environ):
        if name.startswith(CLUSTER) or name == "TF_CONFIG":
            monkeypatch.delenv(name)
    monkeypatch.setattr(subprocess, "Popen", refused)
    monkeypatch.setattr(socket.socket, "connect", refused)
    return monkeypatch


def is_ours(error: BaseException, target: str) -> bool:
    """Whether an error is the package's; of what Keras takes, also an error of Keras's."""
    if isinstance(error, errors.DistributeError):
        text = str(error)
        assert "Fix:" in text or "kd." in text or "\n" not in text, text
        return True
    of_keras = target in KERAS or target in ("dry_run", "compare_dry_runs")
    # Of targets that are missing, from Keras 3.16 on.
    missing = str(error) == "'NoneType' object has no attribute 'shape'"
    return of_keras and (isinstance(error, ValueError | TypeError) or missing)


def check(name: str, parameter: str, value: Any) -> None:
    """One call with one argument that may be wrong."""
    target = (TARGETS | KERAS)[name]
    right = target.takes[parameter](value)
    if right is True:
        return
    seconds = tried(name, parameter, value, right)
    if seconds > SECONDS:  # What the call needs was made first.
        seconds = tried(name, parameter, value, right)
    assert seconds < SECONDS, f"{name}({parameter}=...) took {seconds:.1f} s"


def tried(name: str, parameter: str, value: Any, right: bool | None) -> float:
    """How long the call took."""
    begun = time.monotonic()
    try:
        (TARGETS | KERAS)[name].call(**{parameter: value})
    except BaseException as error:
        if not is_ours(error, name):
            raise AssertionError(
                f"{name}({parameter}=...) of a {type(value).__name__} raised {type(error).__name__}: {error}"
            ) from error
    else:
        assert right is None, f"{name} took {parameter} of a {type(value).__name__}"
    return time.monotonic() - begun


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", [*TARGETS, *KERAS])
def test_wrong_kinds(name, alone, capsys):
    for variable_name, text in (STEP | MPI).items():
        alone.setenv(variable_name, text)
    target = (TARGETS | KERAS)[name]

    @OFTEN
    @given(st.sampled_from(sorted(target.takes)), VALUES)
    def draw(parameter: str, value: Any) -> None:
        check(name, parameter, value)

    with np.errstate(all="ignore"):
        draw()
        for parameter in target.takes:  # Those that are wrong most often.
            for kind in (
                list(POOL) if THOROUGH else ("None", "text", "nan", "an object")
            ):
                check(name, parameter, POOL[kind]())
    assert not kd.has_strategy()


# Environments.

TEXTS = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12
) | st.sampled_from(
    ["", " ", "a", "-1", "0", "1", "2", "1.5", "nan", "²", "３", "9" * 5000]
)
NODES = st.text("n[]-,0123456789m", max_size=14) | st.sampled_from(
    ["n[1-99999999999]", "n[3-1]", "n[1", "n1,,n2", "n[a-b]", "n1", "n[1-2]"]
)
COUNTS = st.text("0123456789(x),", max_size=10) | st.sampled_from(
    ["1(x99999999999)", "9999999999", "2,1", "1", "0", "1(x2)"]
)
ADDRESSES = TEXTS | st.sampled_from(
    ["a:1,b:2", "a", "a:", ":1", "a:99999", "[::1]:2", "a:1"]
)
CONFIG = st.fixed_dictionaries(
    {},
    optional={
        "cluster": DRAWN
        | st.dictionaries(
            st.sampled_from(["chief", "worker", "ps", "evaluator", "other"]),
            st.lists(ADDRESSES, max_size=3)
            | st.dictionaries(TEXTS, ADDRESSES, max_size=2)
            | DRAWN,
            max_size=3,
        ),
        "task": DRAWN
        | st.fixed_dictionaries(
            {},
            optional={
                "type": st.sampled_from(["chief", "worker", "ps"]) | DRAWN,
                "index": st.integers() | TEXTS | DRAWN,
            },
        ),
        "rpc_layer": TEXTS | DRAWN,
        "session_master": TEXTS | DRAWN,
    },
)


def as_json(value: Any) -> str:
    return json.dumps(value, default=repr, skipkeys=True).replace("\\u0000", "")


def texts_of(**variables: Any) -> Any:
    return st.fixed_dictionaries({}, optional=variables)


ENVIRONMENTS = {
    "TF_CONFIG": texts_of(TF_CONFIG=CONFIG.map(as_json) | TEXTS),
    "Slurm": texts_of(
        SLURM_PROCID=TEXTS,
        SLURM_STEP_NUM_TASKS=TEXTS,
        SLURM_STEP_NODELIST=NODES | TEXTS,
        SLURM_STEP_TASKS_PER_NODE=COUNTS | TEXTS,
        SLURM_JOB_ID=TEXTS,
        SLURM_STEP_ID=TEXTS,
        SLURM_GPUS_ON_NODE=TEXTS,
        SLURM_DISTRIBUTION=st.sampled_from(["block", "cyclic:block", "plane"]) | TEXTS,
        SLURM_DIST_PLANESIZE=TEXTS,
    ),
    "SageMaker": texts_of(
        SM_HOSTS=st.lists(LEAVES, max_size=3).map(as_json) | TEXTS,
        SM_CURRENT_HOST=TEXTS,
    ),
    "KERAS_DISTRIBUTION": texts_of(
        KERAS_DISTRIBUTION_JOB_ADDRESSES=ADDRESSES,
        KERAS_DISTRIBUTION_NUM_PROCESSES=TEXTS,
        KERAS_DISTRIBUTION_PROCESS_ID=TEXTS,
    ),
    "Open MPI": texts_of(
        OMPI_COMM_WORLD_SIZE=TEXTS,
        OMPI_COMM_WORLD_RANK=TEXTS,
        OMPI_COMM_WORLD_LOCAL_SIZE=TEXTS,
        OMPI_MCA_orte_hnp_uri=TEXTS
        | st.sampled_from(
            ["1.0;tcp://a:1", "9" * 40 + ".0;tcp://a", "1.0;tcp6://[::1]"]
        ),
        PMIX_NAMESPACE=TEXTS,
    ),
    "MPICH": texts_of(
        PMI_SIZE=TEXTS, PMI_RANK=TEXTS, MPI_LOCALNRANKS=TEXTS, MPI_LOCALRANKID=TEXTS
    ),
    "TPU": texts_of(
        TPU_WORKER_HOSTNAMES=ADDRESSES,
        TPU_WORKER_ID=TEXTS,
        TPU_CONFIG=CONFIG.map(as_json) | TEXTS,
        MEGASCALE_NUM_SLICES=TEXTS,
        MEGASCALE_SLICE_ID=TEXTS,
        MEGASCALE_COORDINATOR_ADDRESS=ADDRESSES,
    ),
}
RESOLVERS = {
    "TF_CONFIG": cr.TFConfigClusterResolver,
    "Slurm": cr.SlurmClusterResolver,
    "SageMaker": cr.SageMakerClusterResolver,
    "KERAS_DISTRIBUTION": cr.KerasClusterResolver,
    "Open MPI": cr.OpenMPIClusterResolver,
    "MPICH": cr.MPICHClusterResolver,
    "TPU": cr.TPUClusterResolver,
}


def asked(make: Any) -> None:
    """Everything that a resolver says."""
    resolver = make()
    for say in (
        lambda: resolver.topology(),
        lambda: resolver.cluster_spec(),
        lambda: resolver.cluster_spec().as_dict(),
        lambda: (resolver.task_type, resolver.task_id, resolver.rpc_layer),
        lambda: resolver.master(),
    ):
        try:
            say()
        except errors.DistributeError as error:
            assert "Fix:" in str(error)


@pytest.mark.parametrize("kind", ENVIRONMENTS)
def test_malformed_environments(kind, alone):
    alone.setenv("CUDA_VISIBLE_DEVICES", "")
    # A machine of its own, which belongs to nobody's cloud.
    alone.setenv("TPU_SKIP_MDS_QUERY", "1")

    @OFTEN
    @given(ENVIRONMENTS[kind])
    def draw(variables: dict[str, str]) -> None:
        begun = time.monotonic()
        with pytest.MonkeyPatch.context() as patch:
            for name, text in variables.items():
                patch.setenv(name, text)
            for make in (RESOLVERS[kind], cr.automatic_resolver):
                try:
                    asked(make)
                except errors.DistributeError as error:
                    assert "Fix:" in str(error)
        assert time.monotonic() - begun < SECONDS

    draw()


WORKERS = {"worker": ["a:1", "b:1"]}


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"TF_CONFIG": "{"}, "TF_CONFIG is not JSON"),
        ({"TF_CONFIG": "[" * 100_000}, "TF_CONFIG is not JSON"),
        ({"TF_CONFIG": "[1]"}, "TF_CONFIG is a JSON dict"),
        ({"TF_CONFIG": {"cluster": 3}}, "'cluster' in the configuration is a dict"),
        ({"TF_CONFIG": {"cluster": WORKERS, "task": 3}}, "'task' in the conf"),
        *(
            (
                {
                    "TF_CONFIG": {
                        "cluster": WORKERS,
                        "task": {"type": "worker", "index": i},
                    }
                },
                t,
            )
            for i, t in [
                ("x", "is a number"),
                (1.5, "is an integer"),
                (True, "is an in"),
            ]
        ),
        (
            {
                "TF_CONFIG": {
                    "cluster": {"worker": ["a", "b"]},
                    "task": {"type": "worker", "index": 0},
                }
            },
            "a host and a port",
        ),
        (
            {"TF_CONFIG": {"cluster": {"worker": {"9999999999": "a:1"}}}},
            "tasks of the job",
        ),
        (
            {**STEP, "SLURM_PROCID": "x", "SLURM_STEP_NUM_TASKS": "2"},
            "SLURM_PROCID is a n",
        ),
        ({**STEP, "SLURM_STEP_NUM_TASKS": "²"}, "SLURM_STEP_NUM_TASKS is a number"),
        (
            {
                **STEP,
                "SLURM_STEP_NUM_TASKS": "2",
                "SLURM_STEP_NODELIST": "n[1-99999999]",
                "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
            },
            "no node list",
        ),
        (
            {**STEP, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"},
            "do not fit",
        ),
        (
            {
                **STEP,
                "SLURM_STEP_NUM_TASKS": "2",
                "SLURM_PROCID": "7",
                "SLURM_STEP_TASKS_PER_NODE": "2",
            },
            "0 to 1",
        ),
        ({"SM_HOSTS": "[1, 2]", "SM_CURRENT_HOST": "a"}, "JSON list of names"),
        ({"SM_HOSTS": "{}", "SM_CURRENT_HOST": "a"}, "SM_HOSTS is a JSON list"),
        (
            {
                "KERAS_DISTRIBUTION_JOB_ADDRESSES": "a:1,b:1",
                "KERAS_DISTRIBUTION_PROCESS_ID": "two",
            },
            "PROCESS_ID is a number",
        ),
        (
            {
                "KERAS_DISTRIBUTION_JOB_ADDRESSES": "a,b",
                "KERAS_DISTRIBUTION_PROCESS_ID": "0",
            },
            "a host and a port",
        ),
        (
            {"OMPI_COMM_WORLD_SIZE": "many", "OMPI_COMM_WORLD_RANK": "0"},
            "SIZE is a number",
        ),
    ],
)
def test_environments_that_are_refused(variables, text, alone):
    for name, value in variables.items():
        alone.setenv(name, value if isinstance(value, str) else json.dumps(value))
    with pytest.raises(
        errors.DistributeError, match=f"(?s){text}.*Received: .*Fix: "
    ) as seen:
        cr.automatic_resolver().topology()
    assert len(str(seen.value)) < 2000


def test_a_pool_of_threads_without_a_number(alone):
    for text in ("many", "²", "-3", "9" * 5000):
        alone.setenv("NPROC", text)
        kd.config.check_pool(1)


def test_in_a_program():
    """What the replica context itself takes; the values are JAX's to judge."""

    def call(name: str, *args: Any) -> Any:
        return getattr(kd.get_replica_context(), name)(*args)

    for name, args in {
        "all_reduce": ("MAX", 1.0),
        "all_gather": (np.ones(2), "a"),
        "merge_call": (3,),
    }.items():
        with pytest.raises(errors.DistributeError, match="Fix:"):
            strategy().run(call, (name, *args))
        with pytest.raises(errors.DistributeError, match="Fix:"):
            call(name, *args)


def test_the_text_says_what_came_and_what_to_write():
    options = experimental.CommunicationOptions
    for call, kind, text in [
        (lambda: kd.NcclAllReduce(num_packs="a"), TypeError, "num_packs='a'"),
        (lambda: kd.NcclAllReduce(num_packs=2.5), TypeError, "num_packs=2.5"),
        (lambda: kd.NcclAllReduce(num_packs=-1), ValueError, "num_packs=-1"),
        (lambda: options(bytes_per_pack="a"), TypeError, "bytes_per_pack='a'"),
        (lambda: options(bytes_per_pack=math.nan), TypeError, "bytes_per_pack=nan"),
        (lambda: options(timeout_seconds="5"), TypeError, "timeout_seconds='5'"),
        (lambda: options(timeout_seconds=math.inf), ValueError, "timeout_seconds=inf"),
        (lambda: kd.callbacks.StepTimeReport("a"), TypeError, "num_steps='a'"),
        (
            kd.callbacks.RayReport().on_train_begin,
            (ImportError, RuntimeError),  # Without Ray, and outside of its workers.
            "(No module named 'ray'|in no worker)",
        ),
        (
            lambda: kd.MirroredStrategy(["cpu:0"], shard_optimizer_state="no"),
            TypeError,
            "shard_optimizer_state='no'",
        ),
        (lambda: strategy().summary(3), TypeError, "3, a int"),
        (lambda: strategy().check_consistency(3), TypeError, "3, a int"),
        (lambda: strategy().check_consistency(), ValueError, "no objects"),
        (lambda: kd.testing.Fault("flip"), ValueError, "variable=None"),
        (lambda: kd.run_on_chief(None), TypeError, "function=None"),
        (lambda: kd.barrier(None), TypeError, "name=None"),
        (lambda: compiled(steps_per_execution="many"), TypeError, "='many'"),
        (lambda: compiled(steps_per_execution=-2), ValueError, "=-2"),
        (lambda: model().fit(None), ValueError, "x=None"),
        (lambda: model().fit(per_replica()), ValueError, "x=PerReplica"),
        (lambda: kd.barrier(b"x" * 10_000), TypeError, "x..."),
    ]:
        with pytest.raises(kind, match=rf"(?s)Received: .*{text}.*\n  Fix: ") as seen:
            call()
        assert isinstance(seen.value, errors.DistributeError)
        assert len(str(seen.value)) < 1000
    in_place = (["sgd", "mse", None, None, None, False, 0], {})
    with strategy().scope():
        made = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        with pytest.raises(errors.ValueStructureError, match="number of steps, or"):
            made.compile(*in_place[0])
    plain = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    plain.compile("sgd", "mse", steps_per_execution=2)
    plain.fit(X, X[:, :1], verbose=0)
