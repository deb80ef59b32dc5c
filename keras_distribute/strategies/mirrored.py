"""`MirroredStrategy`: one replica on each device of this host."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from keras_distribute import config
from keras_distribute.devices.names import parse_devices
from keras_distribute.devices.placement import MIN_SHARD_BYTES
from keras_distribute.strategies.layout_maps import LayoutMap
from keras_distribute.strategies.logical_methods import LogicalDevicesStrategy
from keras_distribute.strategies.meshes import mesh_of
from keras_distribute.values.cross_device_ops import CrossDeviceOps


class MirroredStrategy(LogicalDevicesStrategy):
    """Trains one model on several devices of one host, each with a copy of the
    variables and a part of each batch.

    Source: `tf.distribute.MirroredStrategy`. Differs from TF: `fit`, `evaluate` and
    `predict` give the numbers of one device for the same global batches, whatever the
    number of replicas and the size of the last batch; and with one device, `run`
    returns `PerReplica` values all the same.

    Args:
        devices: Names or `jax.Device`s, `num_logical_devices` for each replica; by
            default all
            accelerators of this host, else all its CPU devices.
        cross_device_ops: How `run` reduces gradients and values over the replicas; by
            default each by itself, as XLA does best.
        shard_optimizer_state: Whether each replica keeps only its part of the
            optimizer's slots, such as Adam's moments, and updates that part of the
            weights. The numbers are the same; the slots take `1 / num_replicas` of the
            memory, but for those of weights without an axis that the number of replicas
            divides. For `fit`; in `run` each replica gathers the slots for the time of
            the step.
        communication_dtype: `"bfloat16"` or `"float16"`: gradients are rounded to it,
            summed over the replicas in it, and half as many bytes travel. `None`, the
            default, sums them as they are: then the numbers are those of one device. In
            `fit` it has an effect where each replica computes the gradients of its own
            rows, as `strategy.summary(model)` says, on batches whose rows divide.
        deterministic: Whether weights, logs and predictions have the same bits on any
            number of devices: the batch is cut into `num_replicas` parts, of which each
            device computes its own one after the other, in programs of the same shapes,
            and sums over the replicas follow one binary tree. Differs from TF, whose
            replicas are devices. Batch normalization is of a replica's rows, and in
            `run` dropout draws per replica. `docs/guide/deterministic.md` says what it
            costs, and what must be equal beside.
        num_replicas: With `deterministic`: a power of two, and a multiple of the number
            of devices; by default 8.
        shard_variables: Whether each replica keeps only its part of each large weight
            and of its slots and gradient; a program gathers a weight where a layer
            needs it, in the dtype that the layer computes with, and again in the
            backward pass. The numbers are the same; weights and slots take `1 /
            num_replicas` of the memory, and about half as many bytes more travel.
            For `fit`, `evaluate` and `predict`; in `run` each replica gathers all of
            them for the time of the step. Differs from TF, which has it not; known as
            fully sharded data parallel, or stage 3 of ZeRO.
        min_shard_bytes: With `shard_variables`: variables whose parts would have fewer
            bytes stay whole, as those of which the number of replicas divides no
            dimension.
        num_logical_devices: Of how many devices each replica consists; neighbours in
            `devices`. It divides their number.
        layout_map: How variables are divided over the logical devices of a replica, as
            of `kd.TPUStrategy`.

    Raises:
        DeviceError: For devices that do not exist, are named twice, or are of different
            kinds; for `num_replicas` that cannot be divided over them, and
            `num_logical_devices` that does not divide them.
        ValueStructureError: For layouts of axes that do not exist; for
            `shard_variables` with `deterministic`.
        StructureTypeError: For another `communication_dtype`.

    Example:
        >>> import keras, numpy as np, keras_distribute as kd
        >>> strategy = kd.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> with strategy.scope():
        ...     dense = keras.layers.Dense(1, kernel_initializer="ones")
        ...     model = keras.Sequential([dense])
        ...     model.compile("sgd", "mse")
        >>> model.predict(np.ones((3, 2)), verbose=0).ravel()
        array([2., 2., 2.], dtype=float32)
    """

    def __init__(
        self,
        devices: Sequence[str | jax.Device] | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        shard_optimizer_state: bool = False,
        communication_dtype: str | None = None,
        deterministic: bool = False,
        num_replicas: int | None = None,
        shard_variables: bool = False,
        min_shard_bytes: int = MIN_SHARD_BYTES,
        num_logical_devices: int = 1,
        layout_map: LayoutMap | None = None,
    ) -> None:
        if deterministic is True:
            config.size_pool_for_same_bits()
        found = parse_devices(devices)
        if found[0].platform == "cpu":
            config.check_pool(len(found))
        super().__init__(
            mesh_of(found, deterministic, num_replicas, num_logical_devices),
            cross_device_ops,
            shard_optimizer_state,
            communication_dtype,
            shard_variables,
            min_shard_bytes,
            layout_map,
        )
