"""The mesh of a strategy: which devices a replica has, or which replicas a device."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from keras_distribute import checks
from keras_distribute.devices.mesh import ReplicaMesh
from keras_distribute.errors import DeviceError

NUM_REPLICAS = 8
"""Of a deterministic strategy that is told no number."""


def mesh_of(
    devices: Sequence[jax.Device],
    deterministic: bool,
    num_replicas: int | None,
    num_logical_devices: int,
) -> ReplicaMesh:
    """The mesh of a strategy: a replica on each device, or on as many logical devices
    as it is told; or so many replicas, in series.

    Raises:
        DeviceError: Where the replicas cannot be divided over the devices.
        StructureTypeError: For arguments of other types.
    """
    groups = _in_groups(devices, num_logical_devices)
    return mesh_of_groups(groups, deterministic, num_replicas)


def mesh_of_groups(
    groups: Sequence[Sequence[jax.Device]],
    deterministic: bool,
    num_replicas: int | None,
) -> ReplicaMesh:
    """The same, where the logical devices of each replica are known."""
    checks.flag("deterministic", deterministic)
    if not deterministic:
        if num_replicas is not None:
            raise DeviceError(
                "Without deterministic=True, each device is a replica.",
                received=f"num_replicas={num_replicas!r}.",
                fix=f"deterministic=True, num_replicas={num_replicas!r}; or devices=, "
                "which names as many devices.",
            )
        return ReplicaMesh.of_groups(groups)
    if len(groups[0]) > 1:
        raise DeviceError(
            "The replicas of a deterministic strategy are on one device each.",
            received=f"{len(groups[0])} logical devices for each replica.",
            fix="deterministic=True, or several logical devices.",
        )
    devices = [device for group in groups for device in group]
    count = NUM_REPLICAS
    if num_replicas is not None:
        count = checks.count("num_replicas", num_replicas, 1, error=DeviceError)
    if count & (count - 1):
        raise DeviceError(
            "The replicas of a deterministic strategy are summed by a binary tree, so "
            "their number is a power of two.",
            received=f"num_replicas={count}.",
            fix=f"num_replicas={1 << count.bit_length()}, on every machine that is to "
            "get the same bits.",
        )
    if count % len(devices):
        fewer = min(count, 1 << (len(devices).bit_length() - 1))
        fix = f"{fewer} devices"
        if not len(devices) & (len(devices) - 1):
            fix += f", or num_replicas={len(devices)} on every machine that is to get "
            fix += "the same bits"
        raise DeviceError(
            "Each device of a deterministic strategy has equally many of the replicas.",
            received=f"{count} replicas on {len(devices)} devices.",
            fix=f"{fix}.",
        )
    return ReplicaMesh.in_series(devices, count)


def _in_groups(
    devices: Sequence[jax.Device], num_logical_devices: int
) -> list[list[jax.Device]]:
    """The logical devices of each replica: neighbours in `devices`."""
    each = checks.count(
        "num_logical_devices", num_logical_devices, 1, error=DeviceError
    )
    if len(devices) % each:
        most = min(each - 1, len(devices))
        fewer = max(n for n in range(1, most + 1) if len(devices) % n == 0)
        raise DeviceError(
            "Each replica has equally many logical devices.",
            received=f"num_logical_devices={each} for {len(devices)} device(s).",
            fix=f"num_logical_devices={fewer}, or other devices.",
        )
    return [list(devices[i : i + each]) for i in range(0, len(devices), each)]
