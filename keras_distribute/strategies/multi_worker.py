"""`MultiWorkerMirroredStrategy`: one replica on each device of every process of a
cluster.
"""

from __future__ import annotations

import jax

from keras_distribute import checks, config
from keras_distribute.cluster import liveness, processes
from keras_distribute.cluster.resolvers.automatic import automatic_resolver
from keras_distribute.cluster.resolvers.base import ClusterResolver
from keras_distribute.devices import connections
from keras_distribute.devices.placement import MIN_SHARD_BYTES
from keras_distribute.errors import DeviceError
from keras_distribute.strategies.base import check_communication_dtype
from keras_distribute.strategies.layout_maps import LayoutMap
from keras_distribute.strategies.logical_methods import LogicalDevicesStrategy
from keras_distribute.strategies.meshes import mesh_of
from keras_distribute.types import CommunicationImplementation, CommunicationOptions
from keras_distribute.values.cross_device_ops import NcclAllReduce

# Gloo sums each array by itself, and takes about 0.4 ms or more for it
# (`benchmarks/processes.py`).
_CPU_PACK_BYTES = 4 * 2**20


class MultiWorkerMirroredStrategy(LogicalDevicesStrategy):
    """Trains one model on the devices of several processes, each with a copy of the
    variables and a part of each batch.

    Every process runs the same script; create the strategy first thing in it, before
    any array, model or variable. A process keeps its rows of each global batch, or
    reads data of its own (`kd.InputOptions.auto_shard_policy`); what `fit`, `evaluate`
    and `predict` return is the same in every process, and the same as on one device.
    Files and the progress bar are the chief's, which is process 0. Source:
    `tf.distribute.MultiWorkerMirroredStrategy`. Differs from TF: batch sizes are global
    for every kind of data; processes with unequal data take as many steps as the
    longest; the cluster is found by whatever started the processes, not by `TF_CONFIG`
    alone; without a cluster it is a `MirroredStrategy`.

    Args:
        cluster_resolver: Says which processes train together; by default
            `kd.cluster_resolver.automatic_resolver()`.
        communication_options: `bytes_per_pack` is the size of the buffers that
            gradients are packed into, by default 4 MiB between processes on CPUs, and
            elsewhere left to XLA; `timeout_seconds` how long another process may be
            silent; `implementation` must be one that the devices have.
        shard_optimizer_state: As of `kd.MirroredStrategy`. Then a read of a slot
            (`variable.numpy()`) involves all processes, as saving does.
        communication_dtype: As of `kd.MirroredStrategy`.
        deterministic: As of `kd.MirroredStrategy`: the same bits on any number of
            devices and processes.
        num_replicas: As of `kd.MirroredStrategy`, of all processes.
        shard_variables: As of `kd.MirroredStrategy`. Then a read of a divided variable
            involves all processes, as saving does.
        min_shard_bytes: As of `kd.MirroredStrategy`.
        num_logical_devices: As of `kd.MirroredStrategy`; all of a replica belong to one
            process.
        layout_map: As of `kd.TPUStrategy`.

    Raises:
        ClusterError: Where the cluster makes no sense, JAX has started already, or the
            processes do not find each other.
        DeviceError: For NCCL without GPUs.
        StructureTypeError: For a resolver or options that are none, and for another
            `communication_dtype`.

    Example:
        >>> import keras_distribute as kd
        >>> strategy = kd.MultiWorkerMirroredStrategy()  # In a program of one process.
        >>> strategy.cluster_resolver.cluster_spec()
        ClusterSpec({})
        >>> strategy.num_replicas_in_sync == len(strategy.extended.worker_devices)
        True
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        communication_options: CommunicationOptions | None = None,
        shard_optimizer_state: bool = False,
        communication_dtype: str | None = None,
        deterministic: bool = False,
        num_replicas: int | None = None,
        shard_variables: bool = False,
        min_shard_bytes: int = MIN_SHARD_BYTES,
        num_logical_devices: int = 1,
        layout_map: LayoutMap | None = None,
    ) -> None:
        checks.instance(
            "cluster_resolver",
            cluster_resolver,
            ClusterResolver | None,
            "The cluster is found by a ClusterResolver.",
            "kd.cluster_resolver.TFConfigClusterResolver(), or None.",
        )
        options = CommunicationOptions.checked(communication_options)
        checks.flag("shard_optimizer_state", shard_optimizer_state)
        check_communication_dtype(communication_dtype)
        if deterministic is True:
            config.size_pool_for_same_bits()
        self._resolver = cluster_resolver or automatic_resolver()
        processes.start(
            self._resolver.topology(),
            type(self._resolver).__name__,
            options.timeout_seconds,
        )
        devices = sorted(
            jax.devices(), key=lambda device: (device.process_index, device.id)
        )
        processes.check_connected(devices)
        platform = devices[0].platform
        if platform == "cpu":
            config.check_pool(jax.local_device_count())
        _check_implementation(options.implementation, platform)
        packed = _CPU_PACK_BYTES if platform == "cpu" and jax.process_count() > 1 else 0
        ops = NcclAllReduce(0, bytes_per_pack=options.bytes_per_pack or packed)
        mesh = mesh_of(devices, deterministic, num_replicas, num_logical_devices)
        if platform == "cpu" and mesh.num_processes > 1:
            liveness.current.begin_program(mesh.num_processes)
            connections.connect(mesh)
        super().__init__(
            mesh,
            ops,
            shard_optimizer_state,
            communication_dtype,
            shard_variables,
            min_shard_bytes,
            layout_map,
        )

    @property
    def cluster_resolver(self) -> ClusterResolver:
        """The resolver that found the cluster."""
        return self._resolver


def _check_implementation(
    implementation: CommunicationImplementation, platform: str
) -> None:
    """Raises `DeviceError` where the devices have none."""
    if implementation is CommunicationImplementation.NCCL and platform != "gpu":
        raise DeviceError(
            "NCCL is for GPUs.",
            received=f"CommunicationImplementation.NCCL on {platform} devices.",
            fix="CommunicationImplementation.AUTO, which is Gloo on CPUs and ICI on "
            "TPUs.",
        )
