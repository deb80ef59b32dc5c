"""The cluster of a program that has started `jax.distributed` by itself."""

from __future__ import annotations

import jax

from keras_distribute._compat import jax_internals
from keras_distribute.cluster.resolvers.launched import NumberedResolver
from keras_distribute.errors import ClusterError


class JaxClusterResolver(NumberedResolver):
    """The processes that `jax.distributed.initialize` or
    `keras.distribution.initialize` has connected.

    Raises:
        ClusterError: Where neither has been called.

    Example:
        >>> import keras_distribute as kd
        >>> try:
        ...     kd.cluster_resolver.JaxClusterResolver()
        ... except kd.errors.ClusterError as error:
        ...     print(str(error).splitlines()[0])
        JAX's runtime of several processes does not run.
    """

    def __init__(self) -> None:
        address = jax_internals.coordinator_address()
        if not jax.distributed.is_initialized() or address is None:
            raise ClusterError(
                "JAX's runtime of several processes does not run.",
                received="a process on its own.",
                fix="jax.distributed.initialize() first; or no resolver, where the "
                "environment describes the cluster.",
            )
        own, count = jax_internals.started_as()
        super().__init__(own, [address], count)
