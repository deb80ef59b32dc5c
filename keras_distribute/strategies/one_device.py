"""`OneDeviceStrategy`: everything on one named device, with the code paths of many."""

from __future__ import annotations

import jax

from keras_distribute.devices.mesh import ReplicaMesh
from keras_distribute.devices.names import parse_device
from keras_distribute.strategies.base import Strategy


class OneDeviceStrategy(Strategy):
    """Puts variables and computation on one device.

    Code written for several replicas runs through the same compiled path, which makes
    it a place to test that code. Source: `tf.distribute.OneDeviceStrategy`.

    Args:
        device: `"GPU:0"`, `"/cpu:1"`, or a `jax.Device`.

    Raises:
        DeviceError: For a device that does not exist.

    Example:
        >>> import keras_distribute as kd
        >>> kd.OneDeviceStrategy("cpu:1").num_replicas_in_sync
        1
    """

    def __init__(self, device: str | jax.Device) -> None:
        super().__init__(ReplicaMesh.of([parse_device(device)]))
