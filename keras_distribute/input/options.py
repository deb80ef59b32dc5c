"""The public options and descriptions of input. Knows nothing of JAX or Keras."""

from __future__ import annotations

import dataclasses
import enum
import numbers
from typing import Any

from keras_distribute import checks
from keras_distribute.errors import ValueStructureError


class AutoShardPolicy(enum.Enum):
    """How several processes share one dataset. Source:
    `tf.data.experimental.AutoShardPolicy`.

    `AUTO`: by files where a `tf.data` pipeline reads files and has enough of them, else
    by data. `FILE`: each process reads its part of the files. `DATA`: every process
    runs the whole pipeline and keeps its rows of each batch; arrays and torch
    `DataLoader`s are read by index, so that only those rows are loaded. `HINT`: a
    `tf.data` pipeline contains `shard(tf.data.experimental.SHARD_HINT,
    tf.data.experimental.SHARD_HINT)`. `OFF`: the data of each process is its own
    already.
    """

    OFF = -1
    AUTO = 0
    FILE = 1
    DATA = 2
    HINT = 3


class InputReplicationMode(enum.Enum):
    """How often a function that makes datasets is called. Source:
    `tf.distribute.InputReplicationMode`.
    """

    PER_WORKER = "PER_WORKER"
    PER_REPLICA = "PER_REPLICA"


def _check_number(name: str, value: Any) -> None:
    """Raises for what is no number; TensorFlow does not check which make sense."""
    checks.instance(name, value, numbers.Real, f"{name} is a number.", f"{name}=1")


@dataclasses.dataclass(frozen=True)
class InputContext:
    """What a function that makes datasets is told about its place. Source:
    `tf.distribute.InputContext`.

    Args:
        num_input_pipelines: How many pipelines feed the replicas together: one for each
            process.
        input_pipeline_id: Which of them this is, from 0.
        num_replicas_in_sync: How many replicas they feed, all together.

    Example:
        >>> import keras_distribute as kd
        >>> kd.InputContext(2, 0, 8).get_per_replica_batch_size(64)
        8
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            _check_number(name, value)

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """The rows of one replica.

        Raises:
            ValueStructureError: For a global batch size that the number of replicas
                does not divide.
            StructureTypeError: For one that is no number.
        """
        _check_number("global_batch_size", global_batch_size)
        replicas = self.num_replicas_in_sync
        if global_batch_size % replicas:
            below = global_batch_size // replicas * replicas
            known = [str(size) for size in (below, below + replicas) if size]
            raise ValueStructureError(
                f"Global batch size {global_batch_size} does not divide over "
                f"{replicas} replicas.",
                received=f"{self}.",
                fix=f"use {' or '.join(known)}, or let the strategy split the batch: "
                "strategy.experimental_distribute_dataset(dataset), or "
                "model.fit(dataset).",
            )
        return global_batch_size // replicas

    def __str__(self) -> str:
        place = f"{self.input_pipeline_id}, total: {self.num_input_pipelines}"
        return f"InputContext(input pipeline id {place})"


@dataclasses.dataclass(frozen=True, kw_only=True)
class InputOptions:
    """Options of distributed datasets. Source: `tf.distribute.InputOptions`.

    Differs from TF: `auto_shard_policy` is new, since only `tf.data` can carry the
    policy itself; the size of the buffer is chosen by default, not one.

    Args:
        experimental_fetch_to_device: Whether elements are put on the devices; `False`
            leaves NumPy arrays, which go there when a program takes them.
        experimental_replication_mode: How often `distribute_datasets_from_function`
            calls its function.
        experimental_place_dataset_on_device: Must be `False`: pipelines run on the
            host.
        experimental_per_replica_buffer_size: How many steps are made ready ahead of the
            one that is asked for; 0 reads each batch when it is asked for, in the
            caller's thread. By default what `config.set_prefetch_steps` says, or 2; but
            0 for arrays in memory that go to CPUs, where a thread takes more time than
            it saves.
        auto_shard_policy: How processes share the data; by default the policy in the
            options of a `tf.data` pipeline, and `AUTO` for everything else.

    Raises:
        ValueStructureError: For a negative buffer, and for datasets on devices.
        StructureTypeError: For a flag, number, mode or policy that is none.
    """

    experimental_fetch_to_device: bool | None = None
    experimental_replication_mode: InputReplicationMode = (
        InputReplicationMode.PER_WORKER
    )
    experimental_place_dataset_on_device: bool = False
    experimental_per_replica_buffer_size: int | None = None
    auto_shard_policy: AutoShardPolicy | None = None

    def __post_init__(self) -> None:
        size = self.experimental_per_replica_buffer_size
        fetch = self.experimental_fetch_to_device
        if size is not None:
            checks.count(
                "experimental_per_replica_buffer_size",
                size,
                what="The buffer is a number of steps.",
                fix="2, or 0 to read each batch when it is asked for.",
                error=ValueStructureError,
            )
        if fetch is not None:
            checks.flag("experimental_fetch_to_device", fetch)
        name = "experimental_place_dataset_on_device"
        checks.flag(name, self.experimental_place_dataset_on_device)
        if self.experimental_place_dataset_on_device:
            raise ValueStructureError(
                "Pipelines run on the host, and only their batches are put on devices.",
                received="experimental_place_dataset_on_device=True.",
                fix="leave it False.",
            )
        checks.instance(
            "experimental_replication_mode",
            self.experimental_replication_mode,
            InputReplicationMode,
            "The replication mode is one of InputReplicationMode.",
            "kd.InputReplicationMode.PER_WORKER or kd.InputReplicationMode.PER_REPLICA",
        )
        checks.instance(
            "auto_shard_policy",
            self.auto_shard_policy,
            AutoShardPolicy | None,
            "The policy is one of AutoShardPolicy.",
            "kd.AutoShardPolicy.DATA, or None.",
        )


@dataclasses.dataclass(frozen=True)
class ElementSpec:
    """The form of one component of a replica's element.

    Args:
        shape: Its dimensions; `None` for one that varies.
        dtype: The name of its dtype, as it comes out of the pipeline.
    """

    shape: tuple[int | None, ...]
    dtype: str
