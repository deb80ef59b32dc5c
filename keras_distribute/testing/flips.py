"""A bit that flips, as in hardware that fails: where, and when it is asked for."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from keras_distribute.devices import bit_flips
from keras_distribute.devices.launches import launches
from keras_distribute.devices.mesh import ReplicaMesh, mesh_of_array
from keras_distribute.variables import DistributedVariable, Standing, standing


@dataclasses.dataclass(frozen=True)
class Flip:
    """Which bit flips, in the words of `Fault`."""

    what: str
    variable: Any
    replica: int
    element: int
    bit: int

    def done(self, model: Any) -> None:
        """Flips the bit, in the process that has the replica; in a gradient or a batch
        the one of the next step.

        Raises:
            ValueStructureError: For a variable, replica, element or bit that there is
                not, and for a variable that is not on the devices.
        """
        if self.what == "batch":
            self._ask(model, None)
            return
        variable = self._variable(model)
        if self.what == "gradient":
            self._ask(model, variable.path)
            return
        with launches.lock:
            found = standing([variable])
            if not found or found[0].array.sharding.num_devices < 2:
                raise bit_flips.refused(
                    f"{variable.path!r} has no copies on several devices.",
                    "its value is elsewhere.",
                )
            found[0].replace(self._flipped(found[0]))

    def _ask(self, model: Any, path: str | None) -> None:
        if model is None:
            raise bit_flips.refused(
                f"A bit of a {self.what} flips in `fit`.", "a loop of its own."
            )
        where = self.replica, self.element, self.bit
        bit_flips.ask(model, bit_flips.BitFlip(self.what, path, *where))

    def _variable(self, model: Any) -> Any:
        if isinstance(self.variable, DistributedVariable):
            return self.variable
        known = [] if model is None else _variables_of(model)
        own = [v for v in known if isinstance(v, DistributedVariable)]
        found = [v for v in own if v.path == self.variable]
        if not found:
            raise bit_flips.refused(
                "A bit flips in a variable of a strategy.",
                f"variable={self.variable!r}, where there are "
                f"{', '.join(v.path for v in own) or 'none'}.",
            )
        return found[0]

    def _flipped(self, found: Standing) -> jax.Array:
        array, part = found.array, found.parts[0]
        mesh = ReplicaMesh(mesh_of_array(array))
        bit_flips.within("replica", self.replica, mesh.num_replicas)
        if found.is_packed and not array.sharding.is_fully_replicated:
            raise bit_flips.refused(
                f"{part.variable.path!r} is divided over the replicas, in one buffer "
                "with others.",
                f"replica={self.replica}.",
            )
        start = 0
        if found.is_packed:
            bit_flips.within("element", self.element, part.size)
            start = part.start
        return bit_flips.in_copy(
            array, mesh, self.replica, start + self.element, self.bit
        )


def _variables_of(model: Any) -> list[Any]:
    optimizer = getattr(model, "optimizer", None)
    slots = [] if optimizer is None else optimizer.variables
    return [*model.variables, *slots, *model.metrics_variables]
