"""The connections between the processes of a mesh, made before any step needs them.

Gloo connects the processes of a collective when it first runs, and waits 30 seconds for
each: far less than compiling a step may take longer in one process than in another.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import jax
from jax import lax
from jax.sharding import PartitionSpec

from keras_distribute.devices.axes import REPLICA_AXIS
from keras_distribute.devices.launches import launches
from keras_distribute.devices.mesh import ReplicaMesh


def connect(mesh: ReplicaMesh) -> None:
    """Returns when the processes are connected; all of them take part. They stay so:
    only the first mesh of the same devices has something to do.
    """
    _connect(mesh.devices, mesh.num_logical)


@functools.cache
def _connect(devices: Sequence[jax.Device], num_logical: int) -> None:
    starts = range(0, len(devices), num_logical)
    mesh = ReplicaMesh.of_groups([devices[i : i + num_logical] for i in starts])
    # A replica is in one process, so collectives inside of it need no other one.
    all_axes = [
        (REPLICA_AXIS, *logical)
        for count in range(len(mesh.logical_axes) + 1)
        for logical in itertools.combinations(mesh.logical_axes, count)
    ]

    def sums() -> list[jax.Array]:
        own = lax.axis_index(REPLICA_AXIS)  # XLA needs no connection for a constant.
        return [lax.psum(own, axes) for axes in all_axes]

    program = jax.shard_map(
        sums, mesh=mesh.mesh, in_specs=(), out_specs=PartitionSpec(), check_vma=False
    )
    jax.block_until_ready(launches.ordered(jax.jit(program))())
