"""`CentralStorageStrategy`: replicas on the devices of this host, variables in its
memory or on one device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax

from keras_distribute.devices.names import name_of, parse_device
from keras_distribute.strategies.mirrored import MirroredStrategy

_HOST_MEMORY = "pinned_host"


class CentralStorageStrategy(MirroredStrategy):
    """Trains one model on several devices of one host, with its variables elsewhere
    between the steps: in the host's memory, or on one device.

    A step copies the variables to the replicas, computes what it computes under
    `kd.MirroredStrategy`, and its results go back. The numbers are those of one device.
    Between two steps weights and optimizer state take no memory of the devices, so
    several models can take turns on them; a step needs what it needs elsewhere and
    more, and pays for the copies, of which `steps_per_execution` makes fewer.
    `kd.dry_run` says how much is in host memory. What each replica has of its own
    (metrics, moving statistics, gradient accumulators) stays on the replicas.

    Source: `tf.distribute.experimental.CentralStorageStrategy`. Differs from TF:
    variables of a step are on every replica while it runs, and a value that is read is
    on the replicas' devices.

    Args:
        compute_devices: Names or `jax.Device`s, one for each replica; by default all
            accelerators of this host, else all its CPU devices.
        parameter_device: The device that variables are on between the steps; by default
            the host's memory, as JAX's memory kind `"pinned_host"`, or the first CPU
            device where the devices have none.

    Raises:
        DeviceError: For devices that do not exist, are named twice, or are of different
            kinds.

    Example:
        >>> import keras, numpy as np, keras_distribute as kd
        >>> strategy = kd.experimental.CentralStorageStrategy(["cpu:0", "cpu:1"])
        >>> with strategy.scope():
        ...     model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        ...     model.compile("sgd", "mse")
        >>> history = model.fit(np.ones((4, 2)), np.ones(4), verbose=0)
        >>> {v.stored.sharding.memory_kind for v in model.trainable_variables}
        {'pinned_host'}
    """

    def __init__(
        self,
        compute_devices: Sequence[str | jax.Device] | None = None,
        parameter_device: str | jax.Device | None = None,
    ) -> None:
        super().__init__(compute_devices)
        memory, device = None, None
        if parameter_device is not None:
            device = parse_device(parameter_device)
        elif _has_host_memory(self.replica_mesh.devices):
            memory = _HOST_MEMORY
        else:
            device = jax.local_devices(backend="cpu")[0]
        self._placement = dataclasses.replace(
            self.placement, memory_kind=memory, parameter_device=device
        )

    def __repr__(self) -> str:
        devices = ", ".join(self.extended.worker_devices)
        place = self.placement.parameter_device
        where = "host memory" if place is None else name_of(place)
        return f"CentralStorageStrategy([{devices}], variables in {where})"


def _has_host_memory(devices: Sequence[jax.Device]) -> bool:
    kinds = [{m.kind for m in device.addressable_memories()} for device in devices]
    return all(_HOST_MEMORY in each for each in kinds)
