"""The devices that a resolver names: found, started on every host, and laid out as a
mesh.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence

import jax
import numpy as np

from keras_distribute import checks, config
from keras_distribute.cluster import processes
from keras_distribute.cluster.resolvers.automatic import automatic_resolver
from keras_distribute.cluster.resolvers.base import ClusterResolver
from keras_distribute.cluster.resolvers.google_cloud import TPUClusterResolver
from keras_distribute.errors import DeviceError
from keras_distribute.tpu.topology import RANK, Array, Topology


def initialize_tpu_system(cluster_resolver: ClusterResolver | None = None) -> Topology:
    """Starts JAX on the TPU that a resolver names, on all of its hosts, and says how
    its devices are laid out.

    On several hosts call it first thing in the program, before any array, model or
    variable; `kd.TPUStrategy` does the same, if it was not done before. Source:
    `tf.tpu.experimental.initialize_tpu_system`. Differs from TF: nothing is connected
    to from outside, and no memory is cleared: JAX holds the chips from its start to the
    end of the process.

    Args:
        cluster_resolver: By default `kd.cluster_resolver.TPUClusterResolver("")`.

    Returns:
        Where the devices are. CPU devices in the place of a TPU
        (`TPUClusterResolver("cpu")`) are laid out like chips of one core, in a mesh
        near to a square: eight of them like a `v5e-8`, 2 by 4.

    Raises:
        DeviceError: Where this machine has no TPU.
        ClusterError: Where the hosts do not find each other.
        StructureTypeError: For anything that is no resolver.

    Example:
        >>> import keras_distribute as kd
        >>> resolver = kd.cluster_resolver.TPUClusterResolver("cpu")
        >>> kd.tpu.experimental.initialize_tpu_system(resolver)
        Topology(2 x 4 x 1 x 1; 1 task(s) x 8 device(s))
    """
    return topology_of(tpu_devices(resolver_or_default(cluster_resolver)))


def shutdown_tpu_system(cluster_resolver: ClusterResolver | None = None) -> None:
    """Forgets what was compiled for the TPU.

    Source: `tf.tpu.experimental.shutdown_tpu_system`. Differs from TF: arrays and
    variables stay, and the chips are free for another process when this one ends.

    Args:
        cluster_resolver: As of `initialize_tpu_system`.

    Raises:
        DeviceError: Where this machine has no TPU.

    Example:
        >>> import keras_distribute as kd
        >>> resolver = kd.cluster_resolver.TPUClusterResolver("cpu")
        >>> kd.tpu.experimental.shutdown_tpu_system(resolver)
    """
    tpu_devices(resolver_or_default(cluster_resolver))
    jax.clear_caches()


def resolver_or_default(resolver: ClusterResolver | None) -> ClusterResolver:
    """The resolver, or one for the TPU of this machine."""
    what = "A TPU is named by a ClusterResolver."
    fix = 'kd.cluster_resolver.TPUClusterResolver(""), or kd.TPUStrategy(tpu="").'
    checks.instance("cluster_resolver", resolver, ClusterResolver | None, what, fix)
    return resolver or TPUClusterResolver("")


def tpu_devices(resolver: ClusterResolver) -> list[list[jax.Device]]:
    """The devices of each process, after all processes have started.

    Raises:
        DeviceError: Where this machine has no TPU.
    """
    on_cpu = isinstance(resolver, TPUClusterResolver) and resolver.on_cpu
    start = automatic_resolver() if on_cpu else resolver
    processes.start(start.topology(), type(start).__name__)
    devices = jax.devices("cpu") if on_cpu else jax.devices()
    if on_cpu:
        config.check_pool(jax.local_device_count("cpu"))
    elif devices[0].platform != "tpu":
        raise DeviceError(
            "This machine has no TPU that JAX can use.",
            received=f"{type(resolver).__name__} where JAX has {len(devices)} "
            f"{devices[0].platform} device(s).",
            fix="to run the same program on CPU devices, kd.config.set_cpu_devices(8) "
            'first thing in it, and kd.TPUStrategy(tpu="cpu"), or TPU_NAME=cpu in the '
            "environment. On Colab or Kaggle choose a TPU for the notebook; on a TPU "
            "virtual machine, pip install 'jax[tpu]', and leave JAX_PLATFORMS unset.",
        )
    processes.check_connected(devices)
    process_of = operator.attrgetter("process_index")
    ordered = sorted(devices, key=operator.attrgetter("process_index", "id"))
    return [list(group) for _, group in itertools.groupby(ordered, process_of)]


def topology_of(devices: Sequence[Sequence[jax.Device]]) -> Topology:
    """The mesh of the devices of each process; slices follow each other in z."""
    counts = [len(own) for own in devices]
    if len(set(counts)) > 1:
        raise DeviceError(
            "The processes have different numbers of devices.",
            received=f"{counts} devices.",
            fix="hosts of one kind.",
        )
    flat = [device for own in devices for device in own]
    has_coordinates = hasattr(flat[0], "coords")
    places = _places_of_chips(flat) if has_coordinates else _places_in_plane(len(flat))
    return Topology(
        mesh_shape=places.max(0) + 1,
        device_coordinates=places.reshape(len(devices), counts[0], RANK),
    )


def _places_of_chips(devices: Sequence[jax.Device]) -> Array:
    chips = np.asarray([(*device.coords, device.core_on_chip) for device in devices])
    chips -= chips.min(0)
    slices = [getattr(device, "slice_index", None) or 0 for device in devices]
    chips[:, 2] += np.asarray(slices) * (chips[:, 2].max() + 1)
    return chips


def _places_in_plane(count: int) -> Array:
    width = next(size for size in range(math.isqrt(count), 0, -1) if count % size == 0)
    return np.asarray([(i % width, i // width, 0, 0) for i in range(count)])
