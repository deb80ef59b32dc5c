"""The workers of a training of Ray Train. They find each other through Ray."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from keras_distribute import checks
from keras_distribute._compat import jax_internals
from keras_distribute.cluster import addresses, signing
from keras_distribute.cluster.ports import free_port
from keras_distribute.cluster.resolvers.launched import NumberedResolver
from keras_distribute.errors import ClusterError


class RayTrainClusterResolver(NumberedResolver):
    """The workers of `ray.train`, in the function that its trainer runs.

    Ray says how many there are, and which one this is; the first one says to the
    others, through Ray, where it listens, and the token of the job, if there is none in
    the environment. So all of them have to make one, in the same order beside other
    collective functions of `ray.train`. `kd.MultiWorkerMirroredStrategy()` finds it by
    itself. Use `ray.train.v2.jax.JaxTrainer`; needs `pip install
    'keras-distribute[ray]'`. TensorFlow has no such resolver.

    Raises:
        BackendError: Without Ray, or with its former `ray.train`.
        ClusterError: Outside of a function that Ray Train runs.

    Example:
        >>> def train_func():
        ...     strategy = kd.MultiWorkerMirroredStrategy()
        >>> from ray.train import ScalingConfig  # doctest: +SKIP
        >>> from ray.train.v2.jax import JaxTrainer  # doctest: +SKIP
        >>> workers = ScalingConfig(num_workers=2)  # doctest: +SKIP
        >>> JaxTrainer(train_func, scaling_config=workers).fit()  # doctest: +SKIP
    """

    def __init__(self) -> None:
        what = "RayTrainClusterResolver needs Ray Train, version 2."
        fix = "pip install 'keras-distribute[ray]', without RAY_TRAIN_V2_ENABLED=0."
        train = checks.imported("ray.train", what, fix)
        collective = checks.imported("ray.train.collective", what, fix)
        context = _context(train)
        if context is None:
            raise ClusterError(
                "This is no worker of Ray Train.",
                received="a process on its own.",
                fix="create the strategy in the function that is given to "
                "ray.train.v2.jax.JaxTrainer.",
            )
        rank, num_processes = context.get_world_rank(), context.get_world_size()
        address = "localhost:0"
        if num_processes > 1:
            own = (_own_address(), signing.new_token()) if rank == 0 else None
            address, token = collective.broadcast_from_rank_zero(own)
            if signing.token_of_job() is None:
                os.environ[signing.TOKEN] = token
        super().__init__(rank, [address], num_processes)


def trains_in_ray() -> bool:
    """Whether this process is a worker of Ray Train, which would have been imported."""
    train = sys.modules.get("ray.train")
    if train is None:
        return False
    try:
        # The former Ray Train, without it, says so of each process.
        importlib.import_module("ray.train.collective")
    except ImportError:
        return False
    return _context(train) is not None


def _context(train: Any) -> Any:
    """What Ray Train says of this process; `None` where it is no worker."""
    try:
        return train.get_context()
    except (RuntimeError, DeprecationWarning):  # The latter in a function of Ray Tune.
        return None


def _own_address() -> str:
    """Where the others find this worker: what Ray has told JAX, if it has started JAX's
    runtime itself, as on GPUs and TPUs; or a free port of this node.
    """
    if (started := jax_internals.coordinator_address()) is not None:
        return started
    host = importlib.import_module("ray").util.get_node_ip_address()
    return addresses.joined(host, free_port(host))
