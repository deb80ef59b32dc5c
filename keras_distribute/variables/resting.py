"""Mirrored variables that are not on the replicas between two programs."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import NamedSharding

from keras_distribute.devices.names import name_of
from keras_distribute.devices.placement import Placement
from keras_distribute.variables.components import strong
from keras_distribute.variables.mirrored import MirroredVariable


class RestingVariable(MirroredVariable):
    """A mirrored variable of `kd.experimental.CentralStorageStrategy`: between two
    programs in host memory or on one device, inside of them on every replica.
    """

    @property
    def _placement(self) -> Placement:
        return self._strategy.placement

    @property
    def sharding(self) -> Any:
        """Where the array is between two programs."""
        return self._placement.at_rest(self.replica_mesh.replicated)

    @property
    def value_sharding(self) -> NamedSharding:
        return self._placement.in_programs(self.replica_mesh.replicated)

    @property
    def carried_sharding(self) -> NamedSharding:
        return self.value_sharding

    @property
    def carried(self) -> Any:
        stored = self.stored
        if stored is None or self._placement.parameter_device is None:
            return stored
        return self.replica_mesh.brought(stored)

    @property
    def in_step(self) -> Any:
        return self.stored

    def rested(self, value: Any) -> Any:
        return self._as_stored(value)

    @property
    def resting_place(self) -> str:
        """In words."""
        device = self._placement.parameter_device
        return "in host memory" if device is None else f"on {name_of(device)}"

    def _as_stored(self, value: Any) -> Any:
        value, sharding = strong(value), self.sharding
        if not (isinstance(value, jax.Array) and value.sharding == sharding):
            value = jax.device_put(value, sharding)
        return value

    def _read_now(self) -> Any:
        stored = self.stored
        return None if stored is None else self.replica_mesh.brought(stored)
