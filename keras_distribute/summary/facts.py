"""The numbers of a summary: devices, variables, bytes on each device. Knows nothing of
how they are shown.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import keras

from keras_distribute import checks, context
from keras_distribute.context import AnyStrategy
from keras_distribute.errors import StructureTypeError
from keras_distribute.mesh import ReplicaMesh
from keras_distribute.variables import DistributedVariable, SyncOnReadVariable

GROUPS = ("weights", "state", "optimizer", "metrics")


@dataclasses.dataclass(frozen=True)
class DeviceFacts:
    """One device of a strategy.

    Args:
        name: Its kind and number, such as `"gpu:0"`.
        model: What JAX calls it, such as `"NVIDIA H100"`.
        replica: The replica that runs on it.
        process: The process that it belongs to.
        bytes_in_use: Of its memory, by everything; `None` where JAX does not know, as
            on CPUs and in other processes.
        bytes_limit: How much JAX may use; `None` likewise.
    """

    name: str
    model: str
    replica: int
    process: int
    bytes_in_use: int | None = None
    bytes_limit: int | None = None


@dataclasses.dataclass(frozen=True)
class VariableFacts:
    """One variable.

    Args:
        path: Its path in Keras.
        group: `"weights"` (trained), `"state"` (other state of layers), `"optimizer"`
            or `"metrics"`.
        kind: `"mirrored"`, `"divided"`, `"sync-on-read (sum)"` and so on; `"Keras's
            own"` under the default strategy; `"not of this strategy"`.
        shape: Its shape.
        dtype: Its dtype.
        num_bytes: The bytes of its value.
        bytes_on: The bytes that stand on each device of the strategy, in their order.
    """

    path: str
    group: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    bytes_on: tuple[int, ...]


FOREIGN = "not of this strategy"
PLAIN = "Keras's own"


def of_devices(mesh: ReplicaMesh) -> tuple[DeviceFacts, ...]:
    """The devices of all replicas, in replica order."""
    by_replica = mesh.mesh.devices.reshape(mesh.num_replicas, -1)
    return tuple(
        DeviceFacts(
            f"{device.platform}:{device.id}",
            device.device_kind,
            replica,
            device.process_index,
            *_memory(device, device in mesh.local_devices),
        )
        for replica, devices in enumerate(by_replica)
        for device in devices
    )


def _memory(device: jax.Device, is_local: bool) -> tuple[int | None, int | None]:
    stats = (device.memory_stats() if is_local else None) or {}
    return stats.get("bytes_in_use"), stats.get("bytes_limit")


def of_variables(
    strategy: AnyStrategy, objects: Sequence[Any]
) -> tuple[VariableFacts, ...]:
    """The variables of models, layers, optimizers and metrics, each once, by group.

    Raises:
        StructureTypeError: For anything that has no variables.
        ContextError: Where a running `fit` has the values.
    """
    found: dict[int, tuple[str, keras.Variable]] = {}
    for thing in objects:
        for group, variable in _variables_of(thing):
            found.setdefault(id(variable), (group, variable))
    facts = [
        _of_variable(strategy, group, variable) for group, variable in found.values()
    ]
    return tuple(sorted(facts, key=lambda fact: GROUPS.index(fact.group)))


def unbuilt(objects: Sequence[Any]) -> list[str]:
    """The names of models and optimizers that will make variables when they are used
    first.
    """
    things = [*objects, *(_optimizer_of(thing) for thing in objects)]
    return [thing.name for thing in things if getattr(thing, "built", True) is False]


def training_steps(objects: Sequence[Any]) -> tuple[str, ...]:
    """Of each compiled model that is built, how a step of its `fit` is made."""
    models = (each for each in objects if getattr(each, "built", False))
    # Of our trainer, which `keras.Model` has as its base.
    methods = (getattr(model, "_describe_training_step", None) for model in models)
    described = (method() for method in methods if method is not None)
    return tuple(text for text in described if text is not None)


def _optimizer_of(thing: Any) -> Any:
    return getattr(thing, "optimizer", None) if isinstance(thing, keras.Model) else None


def _variables_of(thing: Any) -> Iterator[tuple[str, keras.Variable]]:
    """The variables of one object, with their groups; those of a model are the four
    groups that its steps carry.
    """
    if isinstance(thing, keras.Variable):
        yield ("weights" if thing.trainable else "state"), thing
    elif isinstance(thing, keras.optimizers.Optimizer):
        yield from (("optimizer", variable) for variable in thing.variables)
    elif isinstance(thing, keras.metrics.Metric):
        yield from (("metrics", variable) for variable in thing.variables)
    elif isinstance(thing, keras.layers.Layer):
        yield from (("weights", variable) for variable in thing.trainable_variables)
        yield from (("state", variable) for variable in thing.non_trainable_variables)
        if _optimizer_of(thing) is not None:
            yield from _variables_of(_optimizer_of(thing))
        if isinstance(thing, keras.Model):
            yield from (("metrics", variable) for variable in thing.metrics_variables)
    else:
        raise StructureTypeError(
            "A summary is of things that have variables.",
            received=f"{checks.shown(thing)}, a {type(thing).__name__}.",
            fix="strategy.summary(model), or its layers, optimizers, metrics and "
            "variables.",
        )


def _of_variable(
    strategy: AnyStrategy, group: str, variable: keras.Variable
) -> VariableFacts:
    array = (
        variable.stored if isinstance(variable, DistributedVariable) else variable.value
    )
    if array is None:  # Its creation waits for the end of a stateless scope.
        array = variable.value
    shape = tuple(variable.shape)
    return VariableFacts(
        path=variable.path,
        group=group,
        kind=_kind(strategy, variable, array),
        shape=shape,
        dtype=str(array.dtype),
        num_bytes=math.prod(shape) * array.dtype.itemsize,
        bytes_on=_bytes_on(array, strategy.replica_mesh),
    )


def _bytes_on(array: jax.Array, mesh: ReplicaMesh) -> tuple[int, ...]:
    each = math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
    return tuple(
        each if device in array.sharding.device_set else 0 for device in mesh.devices
    )


def _kind(strategy: AnyStrategy, variable: keras.Variable, array: jax.Array) -> str:
    if not isinstance(variable, DistributedVariable):
        return PLAIN if strategy is context.default_strategy() else FOREIGN
    if variable.distribute_strategy is not strategy:
        return FOREIGN
    if isinstance(variable, SyncOnReadVariable):
        return f"sync-on-read ({variable.aggregation})"
    return "mirrored" if array.sharding.is_fully_replicated else "divided"
