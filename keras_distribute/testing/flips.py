"""A bit that flips in one device's copy of a variable, as in memory that fails."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from keras_distribute.devices.launches import launches
from keras_distribute.devices.mesh import ReplicaMesh, mesh_of_array
from keras_distribute.errors import ValueStructureError
from keras_distribute.variables import DistributedVariable, Standing, standing

FIX = 'Fault("flip", variable=model.weights[0], replica=1, element=0, bit=31)'


@dataclasses.dataclass(frozen=True)
class Flip:
    """Which bit flips.

    Args:
        variable: The variable, or its path.
        replica: Whose copy.
        element: The number of the element in that copy, as one row.
        bit: The number of the bit, 0 the lowest.
    """

    variable: Any
    replica: int
    element: int
    bit: int

    def done(self, model: Any) -> None:
        """Flips the bit, in the process that has the replica.

        Raises:
            ValueStructureError: For a variable, replica, element or bit that there is
                not, and for a variable that is not on the devices.
        """
        variable = self._variable(model)
        with launches.lock:
            found = standing([variable])
            if not found or found[0].array.sharding.num_devices < 2:
                raise _refused(
                    f"{variable.path!r} has no copies on several devices.",
                    "its value is elsewhere.",
                )
            found[0].replace(self._flipped(found[0]))

    def _variable(self, model: Any) -> Any:
        if isinstance(self.variable, DistributedVariable):
            return self.variable
        known = [] if model is None else _variables_of(model)
        own = [v for v in known if isinstance(v, DistributedVariable)]
        found = [v for v in own if v.path == self.variable]
        if not found:
            raise _refused(
                "A bit flips in a variable of a strategy.",
                f"variable={self.variable!r}, where there are "
                f"{', '.join(v.path for v in own) or 'none'}.",
            )
        return found[0]

    def _flipped(self, found: Standing) -> jax.Array:
        array, part = found.array, found.parts[0]
        mesh = ReplicaMesh(mesh_of_array(array))
        within("replica", self.replica, mesh.num_replicas)
        device = mesh.device_of(self.replica)
        shards = {shard.device: shard.data for shard in array.addressable_shards}
        if device not in shards:
            return array  # Another process has it.
        shape = array.sharding.shard_shape(array.shape)
        if found.is_packed and not array.sharding.is_fully_replicated:
            raise _refused(
                f"{part.variable.path!r} is divided over the replicas, in one buffer "
                "with others.",
                f"replica={self.replica}.",
            )
        size = part.size if found.is_packed else int(np.prod(shape))
        within("element", self.element, size)
        copy = np.array(shards[device])
        width = copy.dtype.itemsize
        within("bit", self.bit, 1 if copy.dtype == bool else 8 * width)
        row = copy.reshape(-1).view(np.uint8)
        place = (part.start + self.element) * width + self.bit // 8
        row[place] ^= np.uint8(1 << self.bit % 8)
        shards[device] = jax.device_put(copy, device)
        return jax.make_array_from_single_device_arrays(
            array.shape, array.sharding, list(shards.values())
        )


def within(name: str, value: int, count: int) -> None:
    """Raises `ValueStructureError` for a number that is not below `count`."""
    if value >= count:
        raise _refused(f"{name} is below {count} here.", f"{name}={value}.")


def _variables_of(model: Any) -> list[Any]:
    optimizer = getattr(model, "optimizer", None)
    slots = [] if optimizer is None else optimizer.variables
    return [*model.variables, *slots, *model.metrics_variables]


def _refused(what: str, received: str) -> ValueStructureError:
    return ValueStructureError(what, received=received, fix=FIX)
