"""`TPUStrategy`: replicas on the devices of a TPU, one or several logical
devices each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from keras_distribute import checks, context
from keras_distribute.cluster.resolvers.base import ClusterResolver
from keras_distribute.cluster.resolvers.google_cloud import TPUClusterResolver
from keras_distribute.devices.placement import MIN_SHARD_BYTES
from keras_distribute.errors import DeviceError, ValueStructureError
from keras_distribute.strategies import logical_devices
from keras_distribute.strategies.layout_maps import LayoutMap
from keras_distribute.strategies.logical_methods import LogicalDevicesStrategy
from keras_distribute.strategies.meshes import mesh_of_groups
from keras_distribute.tpu import system
from keras_distribute.tpu.assignment import DeviceAssignment


class TPUStrategy(LogicalDevicesStrategy):
    """Trains one model on the devices of a TPU: of one chip, one host, or a slice of
    many.

    Each device is a replica, or `experimental_device_assignment` makes several *logical
    devices* one replica: then tensors can be divided over them in the model's code, and
    variables by `layout_map`, beside the batch, which is divided over the replicas. The
    numbers are those of one logical device.

    On a slice every host runs the same script; create the strategy first thing in it.
    Source: `tf.distribute.TPUStrategy`. Differs from TF: the program is always
    partitioned by XLA's SPMD partitioner, which has no single logical device to place a
    value on; the arguments from `tpu` on are
    new.

    Args:
        tpu_cluster_resolver: Names the TPU; by default
            `kd.cluster_resolver.TPUClusterResolver("")`, this machine's.
            `TPUClusterResolver("cpu")` runs the same program on CPU devices.
        experimental_device_assignment: The devices of each replica; by default one
            each, all of them.
        experimental_spmd_xla_partitioning: As in TensorFlow, `True` refuses
            `experimental_assign_to_logical_device`.
        tpu: A short way for `TPUClusterResolver(tpu)`.
        layout_map: How variables are divided over the logical devices of a replica: a
            `keras.distribution.LayoutMap`, or a dictionary from regular expressions of
            their paths to a name or `None` for each dimension, `{".*dense.*kernel":
            (None, "logical")}`. The slots of an optimizer are divided like their
            weights.
        shard_optimizer_state: As of `kd.MirroredStrategy`: the slots are divided among
            the replicas, too.
        shard_variables: As of `kd.MirroredStrategy`: weights, too, in another of their
            dimensions than `layout_map` divides.
        min_shard_bytes: As of `kd.MirroredStrategy`.
        deterministic: As of `kd.MirroredStrategy`: the same bits on any number of
            devices, of replicas with one logical device each.
        num_replicas: As of `kd.MirroredStrategy`, with `deterministic`.

    Raises:
        DeviceError: Where there is no TPU, or the assignment is for another one, or has
            a replica on several hosts; for `num_replicas` that cannot be divided over
            the devices.
        ClusterError: Where the hosts do not find each other.
        StructureTypeError: For arguments of other types.
        ValueStructureError: For both a resolver and a name, and for layouts of axes
            that do not exist.

    Example:
        >>> import numpy as np, keras_distribute as kd
        >>> # "" on a machine with a TPU, in place of "cpu".
        >>> resolver = kd.cluster_resolver.TPUClusterResolver("cpu")
        >>> topology = kd.tpu.experimental.initialize_tpu_system(resolver)
        >>> assignment = kd.tpu.experimental.DeviceAssignment.build(
        ...     topology, computation_shape=[1, 2, 1, 1], num_replicas=4)
        >>> strategy = kd.TPUStrategy(
        ...     resolver, experimental_device_assignment=assignment)
        >>> strategy.num_replicas_in_sync
        4
        >>> def fn(x):
        ...     x = strategy.experimental_split_to_logical_devices(x, [1, 2])
        ...     return (x * x).sum()
        >>> values = strategy.run(fn, args=(np.ones((2, 6), "float32"),))
        >>> float(strategy.reduce("SUM", values, axis=None))
        48.0
    """

    def __init__(
        self,
        tpu_cluster_resolver: ClusterResolver | None = None,
        experimental_device_assignment: DeviceAssignment | None = None,
        experimental_spmd_xla_partitioning: bool = False,
        *,
        tpu: str | None = None,
        layout_map: LayoutMap | None = None,
        shard_optimizer_state: bool = False,
        shard_variables: bool = False,
        min_shard_bytes: int = MIN_SHARD_BYTES,
        deterministic: bool = False,
        num_replicas: int | None = None,
    ) -> None:
        if tpu is not None and tpu_cluster_resolver is not None:
            raise ValueStructureError(
                "A TPU is named once.",
                received=f"tpu={tpu!r} and {tpu_cluster_resolver!r}.",
                fix="either of them.",
            )
        what = "A TPU is named by a string."
        checks.instance("tpu", tpu, str | None, what, 'tpu="", or tpu="cpu".')
        checks.instance(
            "experimental_device_assignment",
            experimental_device_assignment,
            DeviceAssignment | None,
            "The devices of the replicas are given as a DeviceAssignment.",
            "kd.tpu.experimental.DeviceAssignment.build(topology, "
            "computation_shape=[1, 1, 1, 2])",
        )
        spmd = experimental_spmd_xla_partitioning
        checks.flag("experimental_spmd_xla_partitioning", spmd)
        checks.flag("shard_optimizer_state", shard_optimizer_state)
        named = tpu_cluster_resolver if tpu is None else TPUClusterResolver(tpu)
        self._resolver = system.resolver_or_default(named)
        devices = system.tpu_devices(self._resolver)
        groups = (
            [[device] for own in devices for device in own]
            if experimental_device_assignment is None
            else _assigned(experimental_device_assignment, devices)
        )
        mesh = mesh_of_groups(groups, deterministic, num_replicas)
        super().__init__(
            mesh,
            shard_optimizer_state=shard_optimizer_state,
            shard_variables=shard_variables,
            min_shard_bytes=min_shard_bytes,
            layout_map=layout_map,
        )
        self._spmd = spmd

    @property
    def cluster_resolver(self) -> ClusterResolver:
        """The resolver that named the TPU."""
        return self._resolver

    def experimental_assign_to_logical_device(
        self, tensor: Any, logical_device_id: int
    ) -> Any:
        """`tensor`, for one logical device to work on; here each of them does, since
        they share one program.

        Source: `tf.distribute.TPUStrategy.experimental_assign_to_logical_device`.
        Differs from TF: the value is whole on every logical device of the replica, not
        on one; the numbers are the same.

        Args:
            tensor: An array, of any shape.
            logical_device_id: From 0 to the number of logical devices less 1.

        Returns:
            The same numbers.

        Raises:
            ValueStructureError: For another number, and with
                `experimental_spmd_xla_partitioning=True`, as in TensorFlow.
        """
        if self._spmd:
            raise ValueStructureError(
                "One SPMD program runs on all logical devices: no value can be "
                "assigned to one of them.",
                received="experimental_assign_to_logical_device with "
                "experimental_spmd_xla_partitioning=True.",
                fix="kd.TPUStrategy(..., experimental_spmd_xla_partitioning=False), or "
                "experimental_replicate_to_logical_devices.",
            )
        count = self.replica_mesh.num_logical
        checks.count(
            "logical_device_id",
            logical_device_id,
            most=count - 1,
            what=f"A replica has the logical devices 0 to {count - 1}.",
            fix="one of them.",
            error=ValueStructureError,
        )
        context.require_own("experimental_assign_to_logical_device", self)
        return logical_devices.replicate(
            self.replica_mesh, tensor, "experimental_assign_to_logical_device"
        )

    def __repr__(self) -> str:
        mesh = self.replica_mesh
        kind = mesh.platform
        return (
            f"TPUStrategy({mesh.num_replicas} replica(s) x "
            f"{mesh.num_logical} logical device(s), {kind})"
        )


def _assigned(
    assignment: DeviceAssignment, devices: Sequence[Sequence[jax.Device]]
) -> list[list[jax.Device]]:
    """The devices of each replica; the replicas of a process follow each other."""
    topology = assignment.topology
    expected = (len(devices), len(devices[0]))
    if (topology.num_tasks, topology.num_tpus_per_task) != expected:
        raise DeviceError(
            "The device assignment is for another TPU than this one.",
            received=f"{topology!r}, where there are {expected[0]} task(s) x "
            f"{expected[1]} device(s).",
            fix="build it from what "
            "kd.tpu.experimental.initialize_tpu_system(resolver) returns here.",
        )
    if assignment.num_replicas < 1:
        raise DeviceError(
            "A strategy has at least one replica.",
            received="none.",
            fix="num_replicas=1",
        )
    places = assignment.core_assignment
    numbers = [
        [
            (
                topology.task_ordinal_at_coordinates(p),
                topology.tpu_device_ordinal_at_coordinates(p),
            )
            for p in replica
        ]
        for replica in places
    ]
    flat = [number for replica in numbers for number in replica]
    if len(set(flat)) < len(flat):
        raise DeviceError(
            "A device belongs to one replica.",
            received=f"core_assignment={places.tolist()}.",
            fix="kd.tpu.experimental.DeviceAssignment.build(topology, ...), which "
            "shares none.",
        )
    owners = [replica[0][0] for replica in numbers]
    per_task = [owners.count(task) for task in range(topology.num_tasks)]
    if len(set(per_task)) > 1:
        raise DeviceError(
            "Every process has as many replicas as the others.",
            received=f"{', '.join(map(str, per_task))} replicas on the tasks of "
            f"{topology!r}.",
            fix="num_replicas in DeviceAssignment.build, for all devices; or no "
            "assignment, for a replica on each device.",
        )
    groups = [
        [devices[task][ordinal] for task, ordinal in replica] for replica in numbers
    ]
    return sorted(groups, key=lambda group: group[0].process_index)
