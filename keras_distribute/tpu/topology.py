"""`Topology`: the mesh of a TPU's chips, and the place of each device in it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_distribute import checks
from keras_distribute.errors import DeviceError
from keras_distribute.tpu import wire

Array = np.ndarray[Any, np.dtype[np.int32]]
RANK = 4  # x, y, z, and the core of a chip.
# Devices of a mesh; the largest slice that there is has some 2**14.
_LARGEST = 2**24


class Topology:
    """The mesh of a TPU slice: how large it is, and where each device of each host is
    in it.

    Usually what `kd.tpu.experimental.initialize_tpu_system` returns. Source:
    `tf.tpu.experimental.Topology`. A task is a process, and its devices have their
    order there.

    Args:
        serialized: What `serialized()` returned, here or in TensorFlow; then the other
            arguments are ignored.
        mesh_shape: Four positive integers: the size of the mesh in x, y, z, and the
            cores of a chip.
        device_coordinates: Integers of shape `(tasks, devices of each, 4)`.

    Raises:
        DeviceError: For a shape or coordinates that describe no mesh.

    Example:
        >>> import keras_distribute as kd
        >>> topology = kd.tpu.experimental.Topology(
        ...     mesh_shape=[1, 2, 1, 1],
        ...     device_coordinates=[[[0, 0, 0, 0], [0, 1, 0, 0]]])
        >>> topology.num_tasks, topology.num_tpus_per_task
        (1, 2)
        >>> topology.tpu_device_name_at_coordinates([0, 1, 0, 0], job="worker")
        '/job:worker/task:0/device:TPU:1'
    """

    def __init__(
        self,
        serialized: bytes | None = None,
        mesh_shape: Sequence[int] | Array | None = None,
        device_coordinates: Any = None,
    ) -> None:
        if serialized is not None:
            what, fix = "A serialized topology is bytes.", "topology.serialized()"
            checks.instance("serialized", serialized, bytes, what, fix, DeviceError)
        if serialized:
            mesh_shape, device_coordinates = _parsed(serialized)
        self._mesh_shape = shape = integers("mesh_shape", mesh_shape)
        valid = shape.shape == (RANK,) and bool(np.all(shape >= 1))
        if not valid or math.prod(shape.tolist()) > _LARGEST:
            raise DeviceError(
                "The shape of a TPU's mesh is four positive integers: x, y, z, and the "
                f"cores of a chip, with a product of at most {_LARGEST}.",
                received=f"mesh_shape={checks.shown(mesh_shape)}.",
                fix="mesh_shape=[2, 2, 1, 2]",
            )
        self._coordinates = coordinates_in(
            shape, "device_coordinates", device_coordinates, "tasks, devices of each"
        )
        self._tasks: Array = np.full(shape, -1, np.int32)
        self._ordinals: Array = np.full(shape, -1, np.int32)
        for task, devices in enumerate(self._coordinates):
            for ordinal, place in enumerate(devices):
                self._tasks[tuple(place)], self._ordinals[tuple(place)] = task, ordinal

    @property
    def mesh_shape(self) -> Array:
        """The size of the mesh in x, y, z, and the cores of a chip; an integer array of
        shape `(4,)`.
        """
        return self._mesh_shape

    @property
    def mesh_rank(self) -> int:
        """The number of dimensions of the mesh."""
        return len(self._mesh_shape)

    @property
    def device_coordinates(self) -> Array:
        """Where each device is; an integer array of shape `(tasks, devices of each,
        4)`.
        """
        return self._coordinates

    @property
    def missing_devices(self) -> np.ndarray[Any, Any]:
        """The places of the mesh without a device; an integer array of shape `(how
        many, 4)`.
        """
        return np.argwhere(self._tasks < 0)

    @property
    def num_tasks(self) -> int:
        """How many processes have devices of the slice."""
        return self._coordinates.shape[0]

    @property
    def num_tpus_per_task(self) -> int:
        """How many devices each process has."""
        return self._coordinates.shape[1]

    def task_ordinal_at_coordinates(
        self, device_coordinates: Sequence[int] | Array
    ) -> int:
        """The process whose device is at these coordinates; -1 for none."""
        return int(self._tasks[self._place(device_coordinates)])

    def tpu_device_ordinal_at_coordinates(
        self, device_coordinates: Sequence[int] | Array
    ) -> int:
        """The number of the device at these coordinates in its process; -1 for none."""
        return int(self._ordinals[self._place(device_coordinates)])

    def _place(self, device_coordinates: Any) -> tuple[int, ...]:
        place = integers("device_coordinates", device_coordinates)
        if place.shape != (RANK,) or not _are_inside(self._mesh_shape, place):
            raise DeviceError(
                "The coordinates of a device are four integers inside of the mesh.",
                received=f"device_coordinates={checks.shown(device_coordinates)} in "
                f"{self!r}.",
                fix="coordinates of topology.device_coordinates.",
            )
        return tuple(place.tolist())

    def cpu_device_name_at_coordinates(
        self, device_coordinates: Sequence[int] | Array, job: str | None = None
    ) -> str:
        """The name of the host's CPU for the device at these coordinates, as TensorFlow
        writes it.
        """
        task = self.task_ordinal_at_coordinates(device_coordinates)
        return f"{_job_name(job)}/task:{task}/device:CPU:0"

    def tpu_device_name_at_coordinates(
        self, device_coordinates: Sequence[int] | Array, job: str | None = None
    ) -> str:
        """The name of the device at these coordinates, as TensorFlow writes it."""
        task = self.task_ordinal_at_coordinates(device_coordinates)
        ordinal = self.tpu_device_ordinal_at_coordinates(device_coordinates)
        return f"{_job_name(job)}/task:{task}/device:TPU:{ordinal}"

    def serialized(self) -> bytes:
        """The topology as bytes, which TensorFlow reads, too."""
        tasks, devices, _ = self._coordinates.shape
        coordinates = self._coordinates.ravel().tolist()
        return wire.encoded(self._mesh_shape.tolist(), tasks, devices, coordinates)

    def __repr__(self) -> str:
        shape = " x ".join(map(str, self._mesh_shape.tolist()))
        tasks = f"{self.num_tasks} task(s) x {self.num_tpus_per_task} device(s)"
        return f"Topology({shape}; {tasks})"


def integers(name: str, given: Any) -> Array:
    """An array of integers; an empty one for `None`."""
    try:
        numbers = np.asarray([] if given is None else given)
        if numbers.size and numbers.dtype.kind not in "iu":
            raise ValueError(f"the dtype {numbers.dtype}")
        small = numbers.astype(np.int32)
        if not np.array_equal(small, numbers):
            raise ValueError("numbers of more than 32 bits")
    except (TypeError, ValueError, OverflowError) as error:
        raise DeviceError(
            f"{name} is made of integers.",
            received=f"{name}={checks.shown(given)}: {error}.",
            fix=f"{name}=[2, 2, 1, 2]",
        ) from error
    return small


def coordinates_in(mesh_shape: Array, name: str, given: Any, axes: str) -> Array:
    """The coordinates of devices, as an array of shape `(axes, 4)`."""
    found = integers(name, given)
    if found.ndim != 3 or found.shape[2] != RANK or not found.size:
        raise DeviceError(
            f"{name} has the shape ({axes}, 4).",
            received=f"{name} of shape {found.shape}.",
            fix=f"{name}=[[[0, 0, 0, 0], [0, 0, 0, 1]]]",
        )
    for place in found.reshape(-1, RANK):
        if not _are_inside(mesh_shape, place):
            raise DeviceError(
                "Each device is inside of the mesh.",
                received=f"coordinates {place.tolist()} in a mesh of shape "
                f"{mesh_shape.tolist()}.",
                fix="coordinates from 0 to the size of the mesh less 1.",
            )
    return found


def _are_inside(mesh_shape: Array, place: Array) -> bool:
    return bool(np.all((place >= 0) & (place < mesh_shape)))


def _job_name(job: str | None) -> str:
    what, fix = "A job has a name.", 'job="worker"'
    checks.instance("job", job, str | None, what, fix, DeviceError)
    return "" if job is None else f"/job:{job}"


def _parsed(serialized: bytes) -> tuple[list[int], Array]:
    shape, tasks, devices, numbers = wire.decoded(serialized)
    if min(tasks, devices) < 0 or len(numbers) != tasks * devices * len(shape):
        raise DeviceError(
            "A serialized topology has the coordinates of each device of each task.",
            received=f"{len(numbers)} numbers for {tasks} task(s) of {devices} "
            f"device(s) in {len(shape)} dimensions.",
            fix="pass what Topology.serialized() returned.",
        )
    coordinates = integers("device_coordinates", numbers)
    return shape, coordinates.reshape(tasks, devices, len(shape))
