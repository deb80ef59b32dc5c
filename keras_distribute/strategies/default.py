"""The default strategy: what is in force where the user chose none. One replica,
nothing compiled, Keras as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from keras_distribute import context
from keras_distribute.context import Frame, Mode
from keras_distribute.devices.mesh import ReplicaMesh
from keras_distribute.devices.placement import Placement
from keras_distribute.input import sharing
from keras_distribute.input.options import InputContext, InputOptions
from keras_distribute.run.replica_context import ReplicaContext
from keras_distribute.strategies.base import Strategy
from keras_distribute.types import RunOptions, ValueContext


class DefaultStrategy(Strategy):
    """The strategy of code that uses none: `run` calls the function, and variables are
    Keras's own.
    """

    def __init__(self) -> None:
        super().__init__(mesh=None)
        self._replica_frame = Frame(self, Mode.REPLICA, ReplicaContext(self, 0))

    @property
    def num_replicas_in_sync(self) -> int:
        return 1

    @property
    def placement(self) -> Placement:
        # Made when first asked for: it starts JAX's client.
        if self._placement is None:
            self._placement = Placement(ReplicaMesh.of(jax.local_devices()[:1]))
        return self._placement

    def __repr__(self) -> str:
        return "DefaultStrategy()"

    @property
    def top_frame(self) -> Frame:
        return self._replica_frame

    def run(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: Any = None,
        options: RunOptions | None = None,
    ) -> Any:
        """Calls `fn` in the context of the only replica; nothing is compiled."""
        self._check_run(fn, args, kwargs, options)
        with context.entered(self._replica_frame):
            return fn(*args, **(kwargs or {}))

    def experimental_distribute_values_from_function(
        self, value_fn: Callable[[ValueContext], Any]
    ) -> Any:
        """What `value_fn` returns."""
        self._check_value_fn(value_fn)
        return value_fn(ValueContext())

    def experimental_distribute_dataset(
        self, dataset: Any, options: InputOptions | None = None
    ) -> Any:
        """`dataset` itself."""
        self._require_cross_replica("experimental_distribute_dataset")
        sharing.check_options(options)
        return dataset

    def distribute_datasets_from_function(
        self,
        dataset_fn: Callable[[InputContext], Any],
        options: InputOptions | None = None,
    ) -> Any:
        """What `dataset_fn` returns."""
        self._require_cross_replica("distribute_datasets_from_function")
        sharing.check_options(options)
        sharing.check_dataset_fn(dataset_fn)
        return dataset_fn(self.input_context)


@functools.cache
def default_strategy() -> DefaultStrategy:
    """The only default strategy; made when first asked for, so that importing starts no
    JAX client.
    """
    return DefaultStrategy()
