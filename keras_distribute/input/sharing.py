"""How a dataset is sharded: over the processes by files or rows, over the replicas of
each by rows.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from keras_distribute import checks
from keras_distribute._compat import tensorflow as compat_tf
from keras_distribute.devices.mesh import ReplicaMesh
from keras_distribute.errors import InputError
from keras_distribute.input.datasets import DistributedDataset
from keras_distribute.input.kinds import source_of
from keras_distribute.input.lockstep import agreed
from keras_distribute.input.options import (
    AutoShardPolicy,
    InputContext,
    InputOptions,
    InputReplicationMode,
)
from keras_distribute.input.shares import CutSource, Layout, RoundLayout, SplitLayout
from keras_distribute.input.source import Source
from keras_distribute.input.splitting import worker_sizes
from keras_distribute.input.tensorflow_data import TensorFlowSource


def distribute(
    dataset: Any, mesh: ReplicaMesh, context: InputContext, options: InputOptions | None
) -> DistributedDataset:
    """`Strategy.experimental_distribute_dataset` on the replicas of one process.

    Args:
        dataset: An `ArrayDataset`, or one of any kind that `fit` takes, with global
            batches.
        mesh: The replicas of all processes.
        context: Which of the processes this is.
        options: How to read and shard it.
    """
    options = check_options(options)
    if options.experimental_replication_mode is InputReplicationMode.PER_REPLICA:
        raise InputError(
            "One dataset has one pipeline in each process.",
            received="InputReplicationMode.PER_REPLICA.",
            fix="strategy.distribute_datasets_from_function(dataset_fn, options)",
        )
    distributed = distribute_source(_source_of(dataset), mesh, context, options)
    if context.num_input_pipelines > 1 and context.input_pipeline_id == 0:
        sys.stderr.write(f"keras_distribute: {distributed!r}\n")
    return distributed


def distribute_source(
    source: Source, mesh: ReplicaMesh, context: InputContext, options: InputOptions
) -> DistributedDataset:
    """`distribute` of what reads a dataset."""
    layout, how = _shard(source, context, options)
    layout = agreed(layout, mesh.num_processes)
    return DistributedDataset(layout, mesh, options, how)


def _shard(
    source: Source, context: InputContext, options: InputOptions
) -> tuple[Layout, str]:
    """What each batch of `source` is to this process's replicas, and in words."""
    replicas, workers = context.num_replicas_in_sync, context.num_input_pipelines
    worker, policy = context.input_pipeline_id, _policy(source, options)
    own = replicas // workers
    if workers == 1:
        if policy is AutoShardPolicy.HINT and isinstance(source, TensorFlowSource):
            source = _by_files(source, policy, workers, worker, replicas) or source
        how = f"each batch split over {replicas} replica(s)"
        return SplitLayout(source, replicas, (0, replicas)), how
    place = f"process {worker} of {workers}"
    if policy is AutoShardPolicy.OFF:
        cut = _cut(source, workers, own, worker)
        return RoundLayout([cut], own), f"{place} reads all of its own data (OFF)"
    if policy is not AutoShardPolicy.DATA:
        sharded = _by_files(source, policy, workers, worker, replicas)
        if sharded is not None:
            cut = _cut(sharded, workers, own, worker)
            return RoundLayout([cut], own), f"{place} reads its files ({policy.name})"
    by_rows = options.auto_shard_policy is AutoShardPolicy.DATA
    if source.kind == "a generator" and not by_rows:
        raise InputError(
            "Several processes cannot share a generator: nothing says that theirs are "
            "the same.",
            received=f"{policy.name} for a generator on {workers} processes.",
            fix="InputOptions(auto_shard_policy=kd.AutoShardPolicy.DATA) where each "
            "process's generator yields the same global batches, "
            "kd.AutoShardPolicy.OFF where each yields data of its own.",
        )
    rows = (worker * own, (worker + 1) * own)
    how = f"{place} keeps its rows of each batch (DATA)"
    return SplitLayout(source, replicas, rows), how


def distribute_from_function(
    dataset_fn: Callable[[InputContext], Any],
    mesh: ReplicaMesh,
    context: InputContext,
    options: InputOptions | None,
) -> DistributedDataset:
    """`Strategy.distribute_datasets_from_function` on the replicas of one process."""
    options = check_options(options)
    check_dataset_fn(dataset_fn)
    replicas, workers = context.num_replicas_in_sync, context.num_input_pipelines
    own = replicas // workers
    if options.experimental_replication_mode is InputReplicationMode.PER_REPLICA:
        first = context.input_pipeline_id * own
        contexts = [InputContext(replicas, first + i, replicas) for i in range(own)]
    else:
        contexts = [context]
    layout = RoundLayout([_source_of(dataset_fn(each)) for each in contexts], own)
    layout = agreed(layout, mesh.num_processes)
    how = f"each of its batches is one replica's, {own} to a step"
    return DistributedDataset(layout, mesh, options, how)


def _source_of(dataset: Any) -> Source:
    if isinstance(dataset, DistributedDataset):
        raise InputError(
            "This dataset is distributed already.",
            received=f"{dataset!r}.",
            fix="iterate over it.",
        )
    return source_of(dataset)


def check_options(options: InputOptions | None) -> InputOptions:
    """The options, with the defaults for `None`."""
    what = "The options of a dataset are InputOptions."
    checks.instance("options", options, InputOptions | None, what, "kd.InputOptions()")
    return options or InputOptions()


def check_dataset_fn(dataset_fn: Any) -> None:
    """Raises `StructureTypeError` for what is no function."""
    checks.function(
        "dataset_fn",
        dataset_fn,
        "Datasets are made by a function of an InputContext.",
        "strategy.distribute_datasets_from_function(lambda context: "
        "dataset.batch(per_replica_batch_size))",
    )


def _policy(source: Source, options: InputOptions) -> AutoShardPolicy:
    if options.auto_shard_policy is not None:
        return options.auto_shard_policy
    if isinstance(source, TensorFlowSource):
        return AutoShardPolicy(compat_tf.policy_of(source.dataset))
    return AutoShardPolicy.AUTO


def _by_files(
    source: Source, policy: AutoShardPolicy, workers: int, worker: int, replicas: int
) -> TensorFlowSource | None:
    """The part of a pipeline that one worker reads; `None` where `AUTO` finds no files
    and shards by rows.
    """
    auto = policy is AutoShardPolicy.AUTO
    if not isinstance(source, TensorFlowSource):
        if auto:
            return None
        raise InputError(
            f"{policy.name} is for tf.data pipelines.",
            received=f"{source.kind}.",
            fix="kd.AutoShardPolicy.DATA, which shares every kind by rows.",
        )
    tried = AutoShardPolicy.FILE if auto else policy
    try:
        dataset = compat_tf.auto_sharded(
            source.dataset, tried.value, workers, worker, replicas
        )
    except LookupError as error:
        if auto:
            return None
        raise InputError(
            f"{policy.name} cannot share this pipeline between {workers} processes: "
            f"{error}",
            received=f"AutoShardPolicy.{policy.name}.",
            fix="kd.AutoShardPolicy.DATA, or at least as many files as processes.",
        ) from error
    return TensorFlowSource(dataset, source.batch_size)


def _cut(source: Source, workers: int, replicas: int, worker: int) -> Source:
    """The batches of a worker's own data, cut to its replicas' turns."""
    if isinstance(source, TensorFlowSource) and source.batch_size is not None:
        sizes = worker_sizes(source.batch_size, workers, replicas, worker)
        return TensorFlowSource(source.dataset.rebatch(sizes), None)
    return CutSource(source, workers, replicas, worker)
