"""What is asked of TensorFlow's device assignment, and of ours: meshes, shapes, and the
questions.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

MESHES: dict[str, tuple[list[int], list[list[list[int]]]]] = {}


def _mesh(name: str, shape: list[int], tasks: int, leave_out: int = 0) -> None:
    """Devices chip by chip, x first, a chip's cores together, dealt to the tasks."""
    x, y, z, cores = map(range, shape)
    places = [[i, j, k, core] for k in z for j in y for i in x for core in cores]
    places = places[: len(places) - leave_out]
    MESHES[name] = (shape, np.asarray(places).reshape(tasks, -1, 4).tolist())


_mesh("one chip", [1, 1, 1, 1], 1)
_mesh("v5e 8", [2, 4, 1, 1], 1)
_mesh("v3 8", [2, 2, 1, 2], 1)
_mesh("v5e 16", [4, 4, 1, 1], 4)
_mesh("v4 cube", [2, 2, 4, 1], 4)
_mesh("even cube", [4, 2, 2, 2], 4)
_mesh("odd", [3, 2, 1, 1], 1)
_mesh("line", [1, 6, 1, 1], 1)
_mesh("gaps", [2, 4, 1, 1], 1, leave_out=2)
_mesh("two-core gaps", [2, 2, 1, 2], 2, leave_out=2)

_SHAPES = [
    None,
    [1, 1, 1, 2],
    [1, 2, 1, 1],
    [2, 1, 1, 1],
    [2, 2, 1, 1],
    [1, 2, 1, 2],
    [2, 2, 2, 1],
    [1, 4, 1, 1],
    [3, 1, 1, 1],
]
_BAD: list[dict[str, Any]] = [
    {"computation_shape": [1, 1, 1]},
    {"computation_shape": [1, 1, 0, 1]},
    {"computation_shape": [1, -2, 1, 1]},
    {"computation_shape": [9, 1, 1, 1]},
    {"computation_stride": [1, 1, 1]},
    {"computation_stride": [1, 1, 0, 1]},
    {"computation_stride": [9, 1, 1, 1]},
    {"num_replicas": 99},
]

CASES: list[dict[str, Any]] = [
    *(
        {
            "mesh": mesh,
            "computation_shape": shape,
            "num_replicas": number,
            "device_order_mode": mode,
        }
        for mesh, shape, number, mode in itertools.product(
            MESHES, _SHAPES, (1, 2, 3, 4, 8, 16), (0, 1, 2)
        )
        if mode == 0 or number in (2, 4)
    ),
    *(
        {
            "mesh": mesh,
            "computation_shape": shape,
            "computation_stride": stride,
            "num_replicas": number,
        }
        for mesh, shape, stride, number in itertools.product(
            ("v5e 8", "v5e 16", "even cube", "gaps"),
            ([1, 2, 1, 1], [2, 1, 1, 1], [1, 1, 1, 1]),
            ([1, 2, 1, 1], [2, 1, 1, 1], [2, 2, 1, 1]),
            (1, 2, 4, 8),
        )
    ),
    *({"mesh": "v5e 8", **bad} for bad in _BAD),
]

TOPOLOGIES: list[dict[str, Any]] = [
    {"mesh_shape": [2, 2, 1], "device_coordinates": [[[0, 0, 0, 0]]]},
    {"mesh_shape": [2, 0, 1, 1], "device_coordinates": [[[0, 0, 0, 0]]]},
    {"mesh_shape": [2, 2, 1, 1], "device_coordinates": [[0, 0, 0, 0]]},
    {"mesh_shape": [2, 2, 1, 1], "device_coordinates": [[[0, 0, 0]]]},
    {"mesh_shape": [2, 1, 1, 1], "device_coordinates": [[[2, 0, 0, 0]]]},
    *(
        {"mesh_shape": shape, "device_coordinates": devices}
        for shape, devices in MESHES.values()
    ),
]


def _tried(ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except Exception as error:
        return {"error": [cls.__name__ for cls in type(error).__mro__[:-2]]}


def build(namespace: Any, case: dict[str, Any]) -> Any:
    """The assignment that `namespace` (`tf.tpu.experimental`, or ours) makes, and what
    it says of each replica.
    """
    arguments = dict(case)
    shape, devices = MESHES[arguments.pop("mesh")]
    if "device_order_mode" in arguments:
        arguments["device_order_mode"] = namespace.DeviceOrderMode(
            arguments["device_order_mode"]
        )
    topology = namespace.Topology(mesh_shape=shape, device_coordinates=devices)
    return _tried(
        lambda: np.asarray(
            namespace.DeviceAssignment.build(topology, **arguments).core_assignment
        ).tolist()
    )


def described(namespace: Any, mesh: str) -> dict[str, Any]:
    """What an assignment of two replicas, and its topology, say of devices and hosts."""
    shape, devices = MESHES[mesh]
    topology = namespace.Topology(mesh_shape=shape, device_coordinates=devices)
    assignment = namespace.DeviceAssignment.build(topology, num_replicas=2)
    return {
        "replicas": [assignment.num_replicas, assignment.num_cores_per_replica],
        "coordinates": [int(number) for number in assignment.coordinates(1, 0)],
        "ordinals": [int(assignment.tpu_ordinal(replica)) for replica in range(2)],
        "hosts": [assignment.host_device(1), assignment.host_device(1, 0, "worker")],
        "devices": [assignment.tpu_device(1), assignment.tpu_device(1, 0, "worker")],
        "replicas of": [
            _tried(lambda task=task: assignment.lookup_replicas(task, 0))
            for task in range(3)
        ],
        "replicas of core 1": _tried(lambda: assignment.lookup_replicas(0, 1)),
        "tasks": [topology.num_tasks, topology.num_tpus_per_task, topology.mesh_rank],
        "missing": np.asarray(topology.missing_devices).tolist(),
        "serialized": topology.serialized().hex(),
        "again": np.asarray(
            namespace.Topology(topology.serialized()).device_coordinates
        ).tolist()
        == devices,
    }


def topology(namespace: Any, arguments: dict[str, Any]) -> Any:
    """Whether `namespace` takes a topology."""
    return _tried(lambda: namespace.Topology(**arguments).num_tasks)
