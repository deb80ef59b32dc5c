"""The mesh of the replicas' devices, and the shardings that everything else uses. Knows
no variables, no Keras.

A replica is a device, or several logical devices (`strategies/tpu.py`): then the mesh
has axes beside `replica`. A sharding that does not name them has the same on each
logical device of a replica, so code that knows of replicas alone holds for both. Or a
device has several replicas, which it runs one after the other (`in_series.py`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from keras_distribute._compat import jax_internals
from keras_distribute.devices.axes import LOGICAL_AXIS as LOGICAL_AXIS
from keras_distribute.devices.axes import REPLICA_AXIS as REPLICA_AXIS
from keras_distribute.devices.compiler_options import DISABLED_PASSES
from keras_distribute.devices.launches import launches
from keras_distribute.devices.series import Series
from keras_distribute.errors import DeviceError

_SERIES = "series_of_"  # How the name of that axis begins.


@dataclasses.dataclass(frozen=True)
class ReplicaMesh:
    """The devices of a strategy, as a mesh with the axis `replica`, and axes for the
    logical devices of each.

    Every place that puts a value on devices goes through it, so that a mesh over
    several processes needs no other code.
    """

    mesh: Mesh

    @staticmethod
    def of(devices: Sequence[jax.Device]) -> ReplicaMesh:
        """A mesh over `devices`, one replica each, in their order."""
        return ReplicaMesh.of_groups([[device] for device in devices])

    @staticmethod
    def in_series(devices: Sequence[jax.Device], num_replicas: int) -> ReplicaMesh:
        """A mesh over `devices`, each with as many of the replicas, which it runs one
        after the other.

        An axis of length 1 has the number of replicas in its name, so that each array
        on the mesh says it.
        """
        _check_processes([[device] for device in devices])
        names = (REPLICA_AXIS, f"{_SERIES}{num_replicas}")
        grid = np.asarray(devices, dtype=object).reshape(-1, 1)
        return ReplicaMesh(Mesh(grid, names, axis_types=(AxisType.Auto,) * 2))

    @staticmethod
    def of_groups(groups: Sequence[Sequence[jax.Device]]) -> ReplicaMesh:
        """A mesh over groups of logical devices, one replica each, in their order.

        The logical devices have one axis for each prime factor of their number, since
        an axis is divided as a whole: four of them can then stand for a row of four, or
        for two by two.

        Raises:
            DeviceError: Where a replica is spread over processes, or the replicas of a
                process are not in a row.
        """
        _check_processes(groups)
        names, factors = _logical_axes(len(groups[0]))
        devices = np.asarray(groups, dtype=object).reshape(len(groups), *factors)
        axes = (REPLICA_AXIS, *names)
        return ReplicaMesh(Mesh(devices, axes, axis_types=(AxisType.Auto,) * len(axes)))

    @staticmethod
    def without_devices(num_logical: int) -> ReplicaMesh:
        """The axes of a replica of so many logical devices, and no devices: for
        layouts, before there is a strategy.
        """
        names, factors = _logical_axes(num_logical)
        axes: Any = AbstractMesh((1, *factors), (REPLICA_AXIS, *names))
        return ReplicaMesh(axes)

    @functools.cached_property
    def num_replicas(self) -> int:
        return self.series.num_replicas if self.series else self._num_groups

    @functools.cached_property
    def series(self) -> Series | None:
        """The replicas of each device, where there may be several; else `None`."""
        for name in self.mesh.axis_names:
            if name.startswith(_SERIES):
                count = int(name.removeprefix(_SERIES))
                return Series(count, self._num_groups, self.platform)
        return None

    @functools.cached_property
    def platform(self) -> str:
        """`"cpu"`, `"gpu"` or `"tpu"`; the mesh has devices."""
        return self.mesh.devices.flat[0].platform

    @property
    def compiler_options(self) -> dict[str, Any] | None:
        """How programs on this mesh are compiled, where not as XLA likes.

        XLA for CPUs (JAX 0.10) ends the process where it widens the sum of bfloat16
        over replicas of several logical devices. It can sum them as they are.
        """
        if self.series is not None:
            return self.series.compiler_options
        if self.logical_axes and self.platform == "cpu":
            return {DISABLED_PASSES: "all-reduce-promotion"}
        return None

    @property
    def _num_groups(self) -> int:
        """Of one device, or the logical devices of a replica."""
        return self.mesh.shape[REPLICA_AXIS]

    @property
    def _num_in_group(self) -> int:
        """How many replicas a device has."""
        return self.series.each if self.series else 1

    @functools.cached_property
    def num_logical(self) -> int:
        """How many logical devices each replica has."""
        return self.mesh.size // self._num_groups

    @functools.cached_property
    def logical_axes(self) -> tuple[str, ...]:
        """The axes of the logical devices; together they number them. None where a
        replica is one device.
        """
        others = (name for name in self.mesh.axis_names if name != REPLICA_AXIS)
        return tuple(name for name in others if not name.startswith(_SERIES))

    @functools.cached_property
    def devices(self) -> tuple[jax.Device, ...]:
        """All devices, replica by replica."""
        return tuple(self.mesh.devices.flat)

    @property
    def first_devices(self) -> tuple[jax.Device, ...]:
        """The first logical device of each replica; no device twice."""
        return self.devices[:: self.num_logical]

    def device_of(self, replica: int) -> jax.Device:
        """The first logical device of a replica."""
        return self.devices[replica // self._num_in_group * self.num_logical]

    def replica_at(self, place: int) -> int:
        """The first replica of the device at a place in `devices`."""
        return place // self.num_logical * self._num_in_group

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
        return (
            self.processes.index(jax.process_index()) if self.num_processes > 1 else 0
        )

    @functools.cached_property
    def local_devices(self) -> tuple[jax.Device, ...]:
        """The devices of this process, replica by replica."""
        own = self.processes[self.process_index]
        return tuple(device for device in self.devices if device.process_index == own)

    @functools.cached_property
    def local_replicas(self) -> range:
        """The numbers of this process's replicas."""
        first = self.devices.index(self.local_devices[0]) // self.num_logical
        end = first + len(self.local_devices) // self.num_logical
        return range(first * self._num_in_group, end * self._num_in_group)

    def put(self, value: Any, sharding: NamedSharding) -> jax.Array:
        """`value`, which every process has, divided as `sharding` says; without
        communication.

        Args:
            value: A host array, or a JAX array that this process can read.
        """
        if sharding == self.replicated:
            return self.put_replicated(value)
        if self.num_processes == 1 or (
            isinstance(value, jax.Array) and not value.is_fully_addressable
        ):
            return jax.device_put(value, sharding)
        host = np.asarray(value)
        return jax.make_array_from_callback(
            host.shape, sharding, lambda index: host[index]
        )

    def put_replicated(self, value: Any) -> jax.Array:
        """`value`, which every process has, on every replica; without communication.

        Args:
            value: A host array, or a JAX array that this process can read.
        """
        if isinstance(value, np.ndarray):
            pieces = [value] * len(self.local_devices)
            return self._of_host(value.shape, self.replicated, pieces)
        if self.num_processes == 1:
            return jax.device_put(value, self.replicated)
        if isinstance(value, jax.Array) and not value.is_fully_addressable:
            if value.sharding == self.replicated:
                return value
            return jax.device_put(value, self.replicated)
        host = value if isinstance(value, jax.Array) else np.asarray(value)
        shards = [jax.device_put(host, device) for device in self.local_devices]
        return jax.make_array_from_single_device_arrays(
            host.shape, self.replicated, shards
        )

    def within_reach(self, array: jax.Array) -> jax.Array:
        """The array as a program over all replicas takes it: on every replica, if it is
        on other devices for good.
        """
        elsewhere = array.committed and array.sharding.device_set != set(self.devices)
        return self.put_replicated(array) if elsewhere else array

    def brought(self, array: jax.Array) -> jax.Array:
        """A copy on every replica of an array that rests elsewhere; others as is."""
        sharding = array.sharding
        if not isinstance(sharding, NamedSharding):
            # `device_put` alone would share the memory of a device that both are on.
            return jax.device_put(jnp.copy(array), self.replicated)
        plain = in_own_memory(sharding)
        return array if sharding == plain else jax.device_put(array, plain)

    def put_split(self, rows: Any) -> jax.Array:
        """The rows of this process, the same number on each replica, as its part of the
        rows of all.

        Args:
            rows: An array whose axis 0 is the rows of this process's replicas.
        """
        if self.num_processes == 1 and isinstance(rows, jax.Array):
            return jax.device_put(rows, self.split)
        host = np.asarray(rows)
        count = len(self.local_devices) // self.num_logical
        each = host.shape[0] // count
        return self._rows_of_host(
            [host[i * each : (i + 1) * each] for i in range(count)]
        )

    def joined(self, parts: Sequence[Any]) -> jax.Array:
        """The parts of this process's replicas, of one shape, as its part of those of
        all, joined along axis 0.
        """
        on_host = all(isinstance(part, np.ndarray) for part in parts)
        together = self._num_in_group
        if together > 1:
            concatenate = np.concatenate if on_host else jnp.concatenate
            parts = [
                concatenate(parts[i : i + together])
                for i in range(0, len(parts), together)
            ]
        if on_host:
            return self._rows_of_host(parts)
        devices, each = self.local_devices, self.num_logical
        shards = [
            jax.device_put(part, d)
            for i, part in enumerate(parts)
            for d in devices[i * each : (i + 1) * each]
        ]
        shape = (parts[0].shape[0] * self._num_groups, *parts[0].shape[1:])
        return jax.make_array_from_single_device_arrays(shape, self.split, shards)

    def _rows_of_host(self, parts: Sequence[np.ndarray[Any, Any]]) -> jax.Array:
        """NumPy arrays, one a device or its logical ones, joined along axis 0."""
        pieces = [part for part in parts for _ in range(self.num_logical)]
        shape = (parts[0].shape[0] * self._num_groups, *parts[0].shape[1:])
        return self._of_host(shape, self.split, pieces)

    def _of_host(
        self,
        shape: Sequence[int],
        sharding: NamedSharding,
        pieces: Sequence[np.ndarray[Any, Any]],
    ) -> jax.Array:
        """An array from NumPy's, one for each device, in one transfer."""
        dtype = jax.dtypes.canonicalize_dtype(pieces[0].dtype.newbyteorder("="))
        pieces = [piece.astype(dtype, copy=False) for piece in pieces]
        return jax_internals.array_of_pieces(
            shape, sharding, pieces, self.local_devices
        )

    @property
    def inside(self) -> AbstractMesh | Mesh:
        """The mesh as one replica's program sees it, the others out of reach."""
        if self.num_replicas == 1:
            return self.mesh
        return self.mesh.abstract_mesh.update_axis_types(
            {REPLICA_AXIS: AxisType.Manual}
        )

    def tracing(self) -> contextlib.AbstractContextManager[Any]:
        """Around the tracing of a program of one replica: what is inside of its loops
        and calls notes the mesh.
        """
        inside = self.inside if self.logical_axes else None
        if isinstance(inside, AbstractMesh):
            return jax.sharding.use_abstract_mesh(inside)
        return contextlib.nullcontext()

    @functools.cached_property
    def replicated(self) -> NamedSharding:
        """The whole array on every device."""
        return NamedSharding(self.mesh, PartitionSpec())

    @functools.cached_property
    def split(self) -> NamedSharding:
        """Axis 0 split over the replicas."""
        return NamedSharding(self.mesh, PartitionSpec(REPLICA_AXIS))

    def divided(self, shape: Sequence[int], axes: Sequence[Any] = ()) -> NamedSharding:
        """The first axis that the number of replicas divides split over them, since a
        part is then one piece of memory; without one, as `axes` say.

        Args:
            axes: How it is divided over the logical devices: for each dimension mesh
                axes or `None`; missing ones too.
        """
        own: list[Any] = [*axes, *[None] * (len(shape) - len(axes))]
        for i, size in enumerate(shape):
            if size and size % self._num_groups == 0 and own[i] is None:
                own[i] = REPLICA_AXIS
                break
        if any(own):
            return NamedSharding(self.mesh, PartitionSpec(*own))
        return self.replicated

    def stacked(self, axes: Sequence[Any]) -> NamedSharding:
        """Of one array for each replica, on it: axis 0 split over the replicas, the
        others divided by `axes`.
        """
        return NamedSharding(self.mesh, PartitionSpec(REPLICA_AXIS, *axes))


def in_own_memory(sharding: NamedSharding) -> NamedSharding:
    """The sharding in the memory that the devices compute with."""
    return NamedSharding(sharding.mesh, sharding.spec)


def copied_to_devices(
    arrays: Sequence[Any], shardings: Sequence[NamedSharding | None]
) -> list[Any]:
    """Inside a program: the arrays, in the memory of the devices."""
    own = [None if each is None else in_own_memory(each) for each in shardings]
    return [
        array if there == plain else jax.device_put(array, plain)
        for array, there, plain in zip(arrays, shardings, own, strict=True)
    ]


def _logical_axes(number: int) -> tuple[list[str], list[int]]:
    """The names of the axes of so many logical devices, and their sizes."""
    factors = _prime_factors(number)
    if len(factors) == 1:
        return [LOGICAL_AXIS], factors
    return [f"{LOGICAL_AXIS}_{i}" for i in range(len(factors))], factors


def _prime_factors(number: int) -> list[int]:
    for factor in range(2, math.isqrt(number) + 1):
        if number % factor == 0:
            return [factor, *_prime_factors(number // factor)]
    return [number] if number > 1 else []


def _check_processes(groups: Sequence[Sequence[jax.Device]]) -> None:
    owners = [{device.process_index for device in group} for group in groups]
    spread = [i for i, processes in enumerate(owners) if len(processes) > 1]
    if spread:
        raise DeviceError(
            "The logical devices of a replica belong to one process.",
            received=f"replica {spread[0]} on the processes "
            f"{sorted(owners[spread[0]])}.",
            fix="fewer logical devices a replica: a computation_shape that fits the "
            "devices of one host.",
        )
    order = [process for processes in owners for process in processes]
    if len(list(itertools.groupby(order))) > len(set(order)):
        raise DeviceError(
            "The replicas of a process come in a row.",
            received=f"replicas of the processes {order}.",
            fix="order the devices by their processes.",
        )


def components(stacked: jax.Array) -> list[tuple[int, jax.Array]]:
    """The replicas of this process, and the row that each has of an array that is split
    over the replicas alone.
    """
    first: dict[int, jax.Array] = {}
    for shard in stacked.addressable_shards:
        start, count = shard.index[0].start or 0, shard.data.shape[0]
        for i in range(count):
            row = shard.data if count == 1 else shard.data[i : i + 1]
            first.setdefault(start + i, row)
    return sorted(first.items())


def copies(array: jax.Array) -> tuple[jax.Array, ...]:
    """The copies of a whole array on this process's replicas, in replica order."""
    sharding, shards = array.sharding, array.addressable_shards
    if isinstance(sharding, NamedSharding) and REPLICA_AXIS in sharding.mesh.axis_names:
        mesh = ReplicaMesh(mesh_of_array(array))
        own = {shard.device: shard.data for shard in shards}
        return tuple(own[mesh.device_of(replica)] for replica in mesh.local_replicas)
    return tuple(shard.data for shard in shards)


def on_host(array: jax.Array) -> np.ndarray[Any, Any]:
    """The whole array; a copy, or the array's own memory. Of one that is divided over
    processes, all take part.
    """
    if is_divided_over_processes(array):
        array = on_every_replica(array)
    if array.is_fully_replicated:
        return np.asarray(array.addressable_data(0))
    if array.is_fully_addressable:
        return np.asarray(array)
    whole = np.empty(array.shape, array.dtype)
    for shard in array.addressable_shards:
        whole[shard.index] = np.asarray(shard.data)
    return whole


def is_divided_over_processes(array: jax.Array) -> bool:
    """Whether another process has a part of the array that this one has not."""
    if array.is_fully_addressable or array.is_fully_replicated:
        return False
    own = array.sharding.addressable_devices_indices_map(array.shape)
    every = array.sharding.devices_indices_map(array.shape)
    return len({str(index) for index in own.values()}) < len(
        {str(index) for index in every.values()}
    )


def on_every_replica(array: jax.Array) -> jax.Array:
    """The array whole on every device; all processes take part."""
    return _whole(ReplicaMesh(mesh_of_array(array)))(array)


@functools.lru_cache(maxsize=64)
def _whole(mesh: ReplicaMesh) -> Any:
    return launches.ordered(jax.jit(lambda array: array, out_shardings=mesh.replicated))


def mesh_of_array(array: jax.Array) -> Mesh:
    """The mesh that an array of this package's making lives on."""
    assert isinstance(array.sharding, NamedSharding)
    assert isinstance(array.sharding.mesh, Mesh)
    return array.sharding.mesh
