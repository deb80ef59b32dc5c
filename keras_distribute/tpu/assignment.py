"""`DeviceAssignment`: which devices of a TPU's mesh are the logical devices of each
replica.
"""

from __future__ import annotations

import enum
import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_distribute import checks
from keras_distribute.errors import DeviceError
from keras_distribute.tpu.rings import ring
from keras_distribute.tpu.topology import (
    RANK,
    Array,
    Topology,
    coordinates_in,
    integers,
)

_AnyArray = np.ndarray[Any, Any]
_Numbers = Sequence[int] | _AnyArray


class DeviceOrderMode(enum.IntEnum):
    """How replicas and their logical devices follow each other in the mesh.

    `RING`: each beside the one before, and the last beside the first. `MESH`: row by
    row. `AUTO`: rings, where the replicas fill the whole mesh. Source:
    `tf.tpu.experimental.DeviceOrderMode`.
    """

    AUTO = 0
    RING = 1
    MESH = 2


class DeviceAssignment:
    """Which devices of a TPU make up each replica. Made by `build`; by hand from their
    coordinates.

    Source: `tf.tpu.experimental.DeviceAssignment`.

    Args:
        topology: The mesh.
        core_assignment: Integers of shape `(num_replicas, num_cores_per_replica, 4)`:
            for each replica and each of its logical devices, where it is in the mesh.

    Raises:
        DeviceError: For anything else, and for places where there is no device.

    Example:
        >>> import keras_distribute as kd
        >>> resolver = kd.cluster_resolver.TPUClusterResolver("cpu")
        >>> topology = kd.tpu.experimental.initialize_tpu_system(resolver)
        >>> assignment = kd.tpu.experimental.DeviceAssignment.build(
        ...     topology, computation_shape=[1, 2, 1, 1], num_replicas=4)
        >>> assignment.num_replicas, assignment.num_cores_per_replica
        (4, 2)
        >>> assignment.coordinates(replica=0, logical_core=1)
        (0, 1, 0, 0)
    """

    def __init__(self, topology: Topology, core_assignment: Any) -> None:
        self._topology = _checked_topology(topology)
        self._cores = coordinates_in(
            topology.mesh_shape,
            "core_assignment",
            core_assignment,
            "replicas, logical devices of each",
        )
        for place in self._cores.reshape(-1, RANK):
            if topology.task_ordinal_at_coordinates(place) < 0:
                raise DeviceError(
                    "A logical device is one of the mesh's.",
                    received=f"the coordinates {place.tolist()} in {topology!r}.",
                    fix="coordinates of topology.device_coordinates.",
                )

    @property
    def topology(self) -> Topology:
        """The mesh."""
        return self._topology

    @property
    def num_cores_per_replica(self) -> int:
        """How many logical devices each replica has."""
        return self._cores.shape[1]

    @property
    def num_replicas(self) -> int:
        """How many replicas there are."""
        return self._cores.shape[0]

    @property
    def core_assignment(self) -> Array:
        """Where the logical devices are; integers of shape `(num_replicas,
        num_cores_per_replica, 4)`.
        """
        return self._cores

    def coordinates(self, replica: int, logical_core: int) -> tuple[int, ...]:
        """Where a logical device is in the mesh."""
        return tuple(self._core(replica, logical_core).tolist())

    def _core(self, replica: int, logical_core: int) -> Array:
        own, error = self.num_replicas, DeviceError
        replica = checks.count("replica", replica, most=own - 1, error=error)
        most = self.num_cores_per_replica - 1
        core = checks.count("logical_core", logical_core, most=most, error=error)
        return self._cores[replica, core]

    def lookup_replicas(self, task_id: int, logical_core: int) -> list[int]:
        """The replicas whose logical device of this number is in that process, in
        order.

        Raises:
            DeviceError: Where there is none.
        """
        checks.count("task_id", task_id, error=DeviceError)
        checks.count("logical_core", logical_core, error=DeviceError)
        task_of = self._topology.task_ordinal_at_coordinates
        places = self._cores[:, logical_core : logical_core + 1].reshape(-1, RANK)
        found = [i for i, place in enumerate(places) if task_of(place) == task_id]
        if not found:
            raise DeviceError(
                f"No replica has its logical device {logical_core} in task {task_id}.",
                received=f"{self.num_replicas} replica(s) x "
                f"{self.num_cores_per_replica} logical device(s) on "
                f"{self._topology!r}.",
                fix="numbers from 0 on.",
            )
        return found

    def tpu_ordinal(self, replica: int = 0, logical_core: int = 0) -> int:
        """The number of a logical device in its process."""
        place = self._core(replica, logical_core)
        return self._topology.tpu_device_ordinal_at_coordinates(place)

    def host_device(
        self, replica: int = 0, logical_core: int = 0, job: str | None = None
    ) -> str:
        """The name of the CPU of a logical device's host, as TensorFlow writes it."""
        place = self._core(replica, logical_core)
        return self._topology.cpu_device_name_at_coordinates(place, job)

    def tpu_device(
        self, replica: int = 0, logical_core: int = 0, job: str | None = None
    ) -> str:
        """The name of a logical device, as TensorFlow writes it."""
        place = self._core(replica, logical_core)
        return self._topology.tpu_device_name_at_coordinates(place, job)

    @staticmethod
    def build(
        topology: Topology | bytes,
        computation_shape: _Numbers | None = None,
        computation_stride: _Numbers | None = None,
        num_replicas: int = 1,
        device_order_mode: DeviceOrderMode = DeviceOrderMode.AUTO,
    ) -> DeviceAssignment:
        """The assignment of a block of devices to each of `num_replicas` replicas,
        close together. TensorFlow's.

        Args:
            topology: The mesh, or its serialized form.
            computation_shape: The size of a replica's block in x, y, z and the cores of
                a chip; the product is the number of its logical devices. One device, if
                `None`.
            computation_stride: How far the devices of a block are from each other in
                each direction; 1, if `None`.
            num_replicas: How many blocks.
            device_order_mode: How they follow each other.

        Raises:
            DeviceError: For numbers that are not positive, and for blocks that do not
                fit.
        """
        if isinstance(topology, bytes):
            topology = Topology(serialized=topology)
        topology = _checked_topology(topology)
        num_replicas = checks.count("num_replicas", num_replicas, 1, error=DeviceError)
        checks.instance(
            "device_order_mode",
            device_order_mode,
            DeviceOrderMode,
            "The order is one of DeviceOrderMode.",
            "kd.tpu.experimental.DeviceOrderMode.AUTO",
            DeviceError,
        )
        shape = _four(computation_shape, "computation_shape")
        stride = _four(computation_stride, "computation_stride")
        cores = _cores(topology, shape, stride, num_replicas, device_order_mode)
        return DeviceAssignment(topology, cores)


def _checked_topology(topology: Any) -> Topology:
    what = "A device assignment is for a Topology."
    fix = "topology = kd.tpu.experimental.initialize_tpu_system(resolver)"
    checks.instance("topology", topology, Topology, what, fix, DeviceError)
    return topology


def _four(numbers: _Numbers | None, name: str) -> tuple[int, ...]:
    given = np.ones(RANK, np.int32) if numbers is None else integers(name, numbers)
    if given.shape != (RANK,) or np.any(given < 1):
        raise DeviceError(
            f"{name} is four positive integers: x, y, z, and the cores of a chip.",
            received=f"{name}={checks.shown(numbers)}.",
            fix=f"{name}=[1, 1, 1, 2]",
        )
    return tuple(given.tolist())


def _cores(
    topology: Topology,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    num_replicas: int,
    mode: DeviceOrderMode,
) -> Any:
    """The coordinates of the devices of each replica."""
    mesh = tuple(topology.mesh_shape.tolist())
    footprint = tuple(map(operator.mul, shape, stride))
    # How many blocks fit along each axis; strided ones are interleaved.
    room = tuple(m // f * s for m, f, s in zip(mesh, footprint, stride, strict=True))
    most = math.prod(room)
    given = (
        f"num_replicas={num_replicas}, computation_shape={list(shape)}, "
        f"computation_stride={list(stride)} in {topology!r}."
    )
    if not most:
        raise DeviceError(
            "A replica's block of devices is larger than the mesh.",
            received=given,
            fix=f"a computation_shape of at most {list(mesh)}.",
        )
    if num_replicas > most:
        raise DeviceError(
            f"Only {most} replica(s) of this shape fit.",
            received=given,
            fix=f"num_replicas={most}",
        )
    if len(topology.missing_devices):
        return _in_task_order(topology, shape, stride, num_replicas)
    grid = _grid(num_replicas, room)
    fill_mesh = num_replicas == most and math.prod(stride) == 1
    as_rings = fill_mesh and shape[-1] == mesh[-1]
    if mode is DeviceOrderMode.RING and not as_rings:
        raise DeviceError(
            "Replicas form rings where they fill the mesh, without strides, with "
            "all cores of each chip.",
            received=f"DeviceOrderMode.RING for {given}",
            fix="DeviceOrderMode.AUTO",
        )
    if as_rings and mode is not DeviceOrderMode.MESH:
        return _rings(shape, grid)
    return _blocks(num_replicas, shape, stride, grid)


def _grid(num_replicas: int, room: tuple[int, ...]) -> tuple[int, ...]:
    """How many replicas follow each other in each direction: near to a cube, the
    narrowest direction chosen first.

    Among equally narrow ones the cores of a chip come first, then x, y, z: neighbours
    should share a chip or a host.
    """
    grid = [0] * RANK
    left = num_replicas
    order = sorted(range(RANK), key=lambda axis: (room[axis], (axis + 1) % RANK))
    for position, axis in enumerate(order):
        grid[axis] = min(math.ceil(left ** (1 / (RANK - position))), room[axis])
        left = -(-left // grid[axis])
    return tuple(grid)


def _rings(
    shape: tuple[int, ...], grid: tuple[int, ...]
) -> list[list[tuple[int, ...]]]:
    """A ring of replicas, each a ring of chips with all their cores."""
    x, y, z, cores = shape
    inner = [(*chip, core) for chip in ring(x, y, z) for core in range(cores)]
    return [
        [(a * x + i, b * y + j, c * z + k, core) for i, j, k, core in inner]
        for a, b, c in ring(*grid[:3])
    ]


def _blocks(
    num_replicas: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    grid: tuple[int, ...],
) -> _AnyArray:
    """Replicas row by row, the cores of a chip before x, y, z; strided ones interleaved
    with their neighbours.
    """
    x, y, z, cores = map(range, grid)
    places = [(i, j, k, core) for k in z for j in y for i in x for core in cores]
    place, steps = np.asarray(places[:num_replicas]), np.asarray(stride)
    corners = place // steps * (steps * np.asarray(shape)) + place % steps
    offsets = np.stack(np.unravel_index(range(math.prod(shape)), shape), -1) * steps
    return offsets + corners[:, None, :]


def _in_task_order(
    topology: Topology,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    num_replicas: int,
) -> _AnyArray:
    """The devices of a mesh with gaps, one after the other."""
    size, places = math.prod(shape), topology.device_coordinates.reshape(-1, RANK)
    if math.prod(stride) > 1 or num_replicas * size > len(places):
        raise DeviceError(
            "In a mesh with missing devices replicas take the devices one after the "
            "other.",
            received=f"{num_replicas} replica(s) of {size} with "
            f"computation_stride={list(stride)}, of {len(places)} devices.",
            fix=f"computation_stride=None and num_replicas={len(places) // size}",
        )
    return places[: num_replicas * size].reshape(num_replicas, size, RANK)
