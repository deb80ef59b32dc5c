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
from keras_distribute.consistency.copies import is_in_own_memory
from keras_distribute.context import AnyStrategy
from keras_distribute.devices.mesh import ReplicaMesh
from keras_distribute.devices.names import name_of
from keras_distribute.errors import StructureTypeError
from keras_distribute.variables import (
    DistributedVariable,
    MirroredVariable,
    RestingVariable,
    SyncOnReadVariable,
)

# How each group of variables is called, in the order in which they are shown.
GROUPS = {
    "weights": "weights",
    "state": "layer state",
    "optimizer": "optimizer",
    "metrics": "metrics",
}
FOREIGN = "not of this strategy"
PLAIN = "Keras's own"


@dataclasses.dataclass(frozen=True)
class DeviceFacts:
    """One device of a strategy: its kind and number, such as `"gpu:0"`; what JAX calls
    it, such as `"NVIDIA H100"`; the replica that runs on it, or the first of several;
    its process; of its memory what everything uses, and what JAX may use, where JAX
    knows them; and how many replicas run on it.
    """

    name: str
    model: str
    replica: int
    process: int
    bytes_in_use: int | None = None
    bytes_limit: int | None = None
    num_replicas: int = 1

    @property
    def replicas(self) -> str:
        """The numbers of its replicas."""
        last = self.replica + self.num_replicas - 1
        return f"{self.replica}" if last == self.replica else f"{self.replica}-{last}"

    def rows_of(self, rows: Sequence[int]) -> int:
        """Its rows of a batch, given those of each replica."""
        return sum(rows[self.replica : self.replica + self.num_replicas])


@dataclasses.dataclass(frozen=True)
class VariableFacts:
    """One variable: its path, group (of `GROUPS`), kind, shape, dtype, the bytes of its
    value, those on each device, and whether it is large, and whole only since the
    number of replicas divides none of its dimensions.

    The kind is `"mirrored"`, `"divided"`, `"sync-on-read (sum)"` and so on, `PLAIN`
    under the default strategy, or `FOREIGN`.
    """

    path: str
    group: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    bytes_on: tuple[int, ...]
    is_indivisible: bool = False


def of_devices(mesh: ReplicaMesh) -> tuple[DeviceFacts, ...]:
    """The devices of all replicas, in replica order."""
    several = mesh.series.each if mesh.series else 1
    return tuple(
        DeviceFacts(
            name_of(device),
            device.device_kind,
            mesh.replica_at(place),
            device.process_index,
            *_memory(device, device in mesh.local_devices),
            several,
        )
        for place, device in enumerate(mesh.devices)
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
        for group, variables in groups_of(thing):
            for variable in variables:
                found.setdefault(id(variable), (group, variable))
    facts = [_of_variable(strategy, *entry) for entry in found.values()]
    return tuple(sorted(facts, key=lambda fact: list(GROUPS).index(fact.group)))


def unbuilt(objects: Sequence[Any]) -> list[str]:
    """The names of models and optimizers that do not have their variables yet."""
    things = [
        *objects,
        *(model.optimizer for model in objects if _has_optimizer(model)),
    ]
    return [thing.name for thing in things if getattr(thing, "built", True) is False]


def training_steps(objects: Sequence[Any]) -> tuple[str, ...]:
    """Of each compiled model that is built, how a step of its `fit` is made."""
    models = (each for each in objects if getattr(each, "built", False))
    # Of our trainer, which `keras.Model` has as its base.
    methods = (getattr(model, "_describe_training_step", None) for model in models)
    described = (method() for method in methods if method is not None)
    return tuple(text for text in described if text is not None)


def _has_optimizer(thing: Any) -> bool:
    return (
        isinstance(thing, keras.Model) and getattr(thing, "optimizer", None) is not None
    )


def groups_of(
    thing: Any, what: str = "A summary", method: str = "summary"
) -> Iterator[tuple[str, Sequence[keras.Variable]]]:
    """The variables of one object, by their groups.

    Args:
        what: Is of such things, as an error says.
        method: Of a strategy, which was given it.
    """
    if isinstance(thing, keras.Variable):
        yield "weights" if thing.trainable else "state", [thing]
    elif isinstance(thing, keras.optimizers.Optimizer):
        yield "optimizer", thing.variables
    elif isinstance(thing, keras.metrics.Metric):
        yield "metrics", thing.variables
    elif isinstance(thing, keras.layers.Layer):
        yield "weights", thing.trainable_variables
        yield "state", thing.non_trainable_variables
        if _has_optimizer(thing):
            yield "optimizer", thing.optimizer.variables
        if isinstance(thing, keras.Model):
            yield "metrics", thing.metrics_variables
    else:
        raise StructureTypeError(
            f"{what} is of things that have variables.",
            received=f"{checks.shown(thing)}, a {type(thing).__name__}.",
            fix=f"strategy.{method}(model), or its layers, optimizers, metrics and "
            "variables.",
        )


def _of_variable(
    strategy: AnyStrategy, group: str, variable: keras.Variable
) -> VariableFacts:
    own = isinstance(variable, DistributedVariable)
    array = variable.stored if own else variable.value
    if array is None:  # It will be created at the end of a stateless scope.
        array = variable.value
    shape, sharding = tuple(variable.shape), array.sharding
    size = array.dtype.itemsize
    # What is in another memory takes none of the device's own.
    there = sharding.device_set if is_in_own_memory(sharding) else ()
    on_device = math.prod(sharding.shard_shape(array.shape)) * size
    return VariableFacts(
        path=variable.path,
        group=group,
        kind=_kind(strategy, variable, array),
        shape=shape,
        dtype=str(array.dtype),
        num_bytes=math.prod(shape) * size,
        bytes_on=tuple(
            on_device if device in there else 0
            for device in strategy.replica_mesh.devices
        ),
        is_indivisible=isinstance(variable, MirroredVariable)
        and variable.is_indivisible,
    )


def _kind(strategy: AnyStrategy, variable: keras.Variable, array: jax.Array) -> str:
    if not isinstance(variable, DistributedVariable):
        return PLAIN if strategy is context.default_strategy() else FOREIGN
    if variable.distribute_strategy is not strategy:
        return FOREIGN
    if isinstance(variable, RestingVariable):
        return variable.resting_place
    if isinstance(variable, SyncOnReadVariable):
        return f"sync-on-read ({variable.aggregation})"
    return "mirrored" if array.sharding.is_fully_replicated else "divided"
