"""Device names to devices to a mesh, and the two shardings that everything else uses. Knows no variables, no Keras."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from keras_distribute._compat import jax_internals
from keras_distribute.errors import DeviceError

REPLICA_AXIS = "replica"
_NAME = re.compile(r"^(?:/job:\w+)?(?:/replica:\d+)?(?:/task:\d+)?/?(?:device:)?([a-z]+)(?::(\d+))?$")
_PLATFORMS = {"cuda": "gpu", "rocm": "gpu"}


@dataclasses.dataclass(frozen=True)
class ReplicaMesh:
    """The devices of a strategy, as a mesh with one axis, `replica`.

    Every place that puts a value on devices goes through it, so that a mesh over several processes needs no other code.
    """

    mesh: Mesh

    @staticmethod
    def of(devices: Sequence[jax.Device]) -> ReplicaMesh:
        """A mesh over `devices`, one replica each, in their order."""
        return ReplicaMesh(Mesh(np.asarray(devices, dtype=object), (REPLICA_AXIS,), axis_types=(AxisType.Auto,)))

    @functools.cached_property
    def num_replicas(self) -> int:
        return self.mesh.shape[REPLICA_AXIS]

    @functools.cached_property
    def devices(self) -> tuple[jax.Device, ...]:
        return tuple(self.mesh.devices.flat)

    @functools.cached_property
    def processes(self) -> tuple[int, ...]:
        """The processes that the devices belong to, in replica order."""
        return tuple(dict.fromkeys(device.process_index for device in self.devices))

    @functools.cached_property
    def num_processes(self) -> int:
        """How many processes share the replicas."""
        return len(self.processes)

    @functools.cached_property
    def process_index(self) -> int:
        """The place of this process among them; 0 where they are all this one's."""
        return self.processes.index(jax.process_index()) if self.num_processes > 1 else 0

    @functools.cached_property
    def local_devices(self) -> tuple[jax.Device, ...]:
        """The devices of this process, in replica order."""
        own = self.processes[self.process_index]
        return tuple(device for device in self.devices if device.process_index == own)

    @functools.cached_property
    def local_replicas(self) -> range:
        """The numbers of this process's replicas."""
        first = self.devices.index(self.local_devices[0])
        return range(first, first + len(self.local_devices))

    def put_replicated(self, value: Any) -> jax.Array:
        """`value`, which every process has, on every replica; without communication.

        Args:
            value: A host array, or a JAX array that this process can read.
        """
        if self.num_processes == 1:
            return jax.device_put(value, self.replicated)
        if isinstance(value, jax.Array) and not value.is_fully_addressable:
            return value if value.sharding == self.replicated else jax.device_put(value, self.replicated)
        host = value if isinstance(value, jax.Array) else np.asarray(value)
        shards = [jax.device_put(host, device) for device in self.local_devices]
        return jax.make_array_from_single_device_arrays(host.shape, self.replicated, shards)

    def put_split(self, rows: Any) -> jax.Array:
        """The rows of this process, the same number on each replica, as its part of the rows of all.

        Args:
            rows: An array whose axis 0 is the rows of this process's replicas.
        """
        if self.num_processes == 1 and isinstance(rows, jax.Array):
            return jax.device_put(rows, self.split)
        host = np.asarray(rows)
        host = host.astype(jax.dtypes.canonicalize_dtype(host.dtype.newbyteorder("=")), copy=False)
        each = host.shape[0] // len(self.local_devices)
        pieces = [host[i * each : (i + 1) * each] for i in range(len(self.local_devices))]
        shape = (each * self.num_replicas, *host.shape[1:])
        return jax_internals.array_of_pieces(shape, self.split, pieces, self.local_devices)

    @functools.cached_property
    def replicated(self) -> NamedSharding:
        """The whole array on every replica."""
        return NamedSharding(self.mesh, PartitionSpec())

    @functools.cached_property
    def split(self) -> NamedSharding:
        """Axis 0 split over the replicas."""
        return NamedSharding(self.mesh, PartitionSpec(REPLICA_AXIS))

    def divided(self, shape: Sequence[int]) -> NamedSharding:
        """The longest axis that the number of replicas divides split over them; without one, the whole on each."""
        lengths = [length if length and length % self.num_replicas == 0 else 0 for length in shape]
        longest = lengths.index(max(lengths)) if any(lengths) else None
        axes = [REPLICA_AXIS if axis == longest else None for axis in range(len(lengths))]
        return NamedSharding(self.mesh, PartitionSpec(*axes)) if longest is not None else self.replicated


def mesh_of_array(array: jax.Array) -> Mesh:
    """The mesh that an array of this package's making lives on."""
    assert isinstance(array.sharding, NamedSharding)
    assert isinstance(array.sharding.mesh, Mesh)
    return array.sharding.mesh


def parse_device(name: str | jax.Device) -> jax.Device:
    """The local device that a name of TensorFlow's or JAX's stands for.

    Args:
        name: `"GPU:0"`, `"/gpu:1"`, `"cpu:3"`, `"/job:worker/task:0/device:TPU:2"`, `"tpu"` (the first one), or a
            `jax.Device`.

    Raises:
        DeviceError: For a name that is no device name, or a device that does not exist; lists those that do.
    """
    if isinstance(name, jax.Device):
        return name
    match = _NAME.match(name.lower()) if isinstance(name, str) else None
    if match is None:
        raise DeviceError(
            "A device is named by its kind and its number.",
            received=f"{name!r}.",
            fix='"GPU:0", "/gpu:1", "cpu:3", "TPU:0", or a jax.Device.',
        )
    kind = _PLATFORMS.get(match.group(1), match.group(1))
    index = int(match.group(2) or 0)
    devices = _devices_of(kind)
    if index < len(devices):
        return devices[index]
    raise DeviceError(
        f"There is no device {kind}:{index}.",
        received=f"{name!r}, with the devices {_available()}.",
        fix=f"kd.config.set_cpu_devices({index + 1}) at the start of the program."
        if kind == "cpu"
        else "name one of the devices above.",
    )


def parse_devices(names: Sequence[str | jax.Device] | None) -> tuple[jax.Device, ...]:
    """Devices from their names; all local accelerators (else CPU devices) for `None`.

    Raises:
        DeviceError: For an empty list, an unknown name, a device named twice, or devices of different kinds.
    """
    if names is None:
        return tuple(jax.local_devices())
    if isinstance(names, str | jax.Device):
        names = [names]
    devices = tuple(parse_device(name) for name in names)
    if not devices:
        raise DeviceError("A strategy needs at least one device.", received="[].", fix='["GPU:0", "GPU:1"], or None.')
    twice = sorted({str(d) for d in devices if devices.count(d) > 1})
    if twice:
        raise DeviceError(
            f"Each device can be named once; {', '.join(twice)} is named more often.",
            received=f"{list(names)}.",
            fix="name each device once.",
        )
    kinds = sorted({d.platform for d in devices})
    if len(kinds) > 1:
        raise DeviceError(
            "The replicas of one strategy are devices of one kind.",
            received=f"{list(names)} ({' and '.join(kinds)}).",
            fix=f'only "{kinds[-1]}" devices.',
        )
    return devices


def _devices_of(kind: str) -> Sequence[jax.Device]:
    try:
        return jax.local_devices(backend=kind)
    except RuntimeError:  # JAX knows no such platform, or cannot start it.
        return ()


def _available() -> str:
    kinds = dict.fromkeys([jax.default_backend(), "cpu"])
    return ", ".join(f"{kind}:{i}" for kind in kinds for i in range(len(_devices_of(kind))))
