"""Where the variables and programs of a strategy are: all that the rooms below
`strategies/` know of one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, Sharding, SingleDeviceSharding

from keras_distribute.devices.compiler_options import DISABLED_PASSES, joined
from keras_distribute.devices.mesh import ReplicaMesh

MIN_SHARD_BYTES = 16 * 1024
_LEAST_BYTES = 8  # A seed, of which JAX takes no parts.


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a variable is divided over the logical devices of a replica: for each
    dimension mesh axes, or `None`.
    """

    axes: tuple[Any, ...] = ()


class Layouts(Protocol):
    """The layouts of a strategy's variables."""

    def of(self, path: str, shape: tuple[int, ...]) -> Layout:
        """The layout of one variable."""
        ...

    def warn_of_unused(self, paths: Sequence[str]) -> None:
        """Warns of layouts that no variable has, before a model with variables of these
        paths is trained.
        """
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class Placement:
    """Where variables and programs are.

    Args:
        mesh: The devices of the replicas.
        layouts: How variables are divided over the logical devices of a replica;
            `None`: none is.
        shard_optimizer_state: Whether each replica keeps a part of the optimizer's
            state, not all of it.
        shard_variables: Whether it keeps a part of each large variable.
        min_shard_bytes: How many bytes such a part has at least.
        communication_dtype: In which gradients are summed over the replicas; `None`:
            in the one that they have.
        memory_kind: The memory that mirrored variables are in between two programs;
            `None`: that of the replicas' devices.
        parameter_device: The device that they are on then; `None`: the replicas' own.
        is_on_servers: Whether they are with parameter servers once a program has
            used them.
    """

    mesh: ReplicaMesh
    layouts: Layouts | None = None
    shard_optimizer_state: bool = False
    shard_variables: bool = False
    min_shard_bytes: int = MIN_SHARD_BYTES
    communication_dtype: str | None = None
    memory_kind: str | None = None
    parameter_device: jax.Device | None = None
    is_on_servers: bool = False

    def divides(self, shape: Sequence[int], dtype: Any) -> bool:
        """Whether each replica keeps a part of a variable of this form, by its size.

        Args:
            dtype: Its name.
        """
        return self.shard_variables and self.is_large(shape, dtype)

    def is_large(self, shape: Sequence[int], dtype: Any) -> bool:
        """Whether the parts of a variable of this form would not be too small."""
        least = max(self.min_shard_bytes, _LEAST_BYTES)
        return num_bytes(shape, dtype) >= least * self.mesh.num_replicas

    @property
    def compiler_options(self) -> dict[str, Any] | None:
        """How steps are compiled here, where not as XLA likes.

        XLA for CPUs would begin whatever it can as early as it can: with divided
        weights, gather those of the last layer while the first one is computed.
        """
        options = self.mesh.compiler_options
        if self.shard_variables and self.mesh.platform == "cpu":
            own = {"xla_cpu_enable_concurrency_optimized_scheduler": False}
            return joined(options, own)
        return options

    @property
    def apart_options(self) -> dict[str, Any] | None:
        """The same for steps whose sums XLA places, which may be of whole gradients:
        joined into one, all of these would be there at the same time.

        XLA for CPUs joins sums of any size, those for other devices up to a limit.
        """
        options = self.compiler_options
        if self.shard_variables and self.mesh.platform == "cpu":
            own = {DISABLED_PASSES: "cpu-all-reduce-combiner"}
            return joined(options, own)
        return options

    @property
    def rests_elsewhere(self) -> bool:
        """Whether mirrored variables are not on the replicas between two programs."""
        return self.memory_kind is not None or self.parameter_device is not None

    @property
    def donated(self) -> tuple[int, ...]:
        """Which arguments of a program are given away, if the state is the first.

        None where they are in two memories: an output whose sharding is left to XLA may
        take the place of any argument of its shape (`_set_up_aliases` of JAX 0.10), and
        an array in the wrong memory ends the process.
        """
        return (0,) if self.memory_kind is None else ()

    def in_programs(self, sharding: NamedSharding) -> NamedSharding:
        """Where a program takes and leaves mirrored variables: it copies them to the
        replicas by itself where they are in another memory.
        """
        if self.memory_kind is None:
            return sharding
        return sharding.with_memory_kind(self.memory_kind)

    def at_rest(self, sharding: NamedSharding) -> Sharding:
        """Where mirrored variables are between two programs."""
        if self.parameter_device is not None:
            return SingleDeviceSharding(self.parameter_device)
        return self.in_programs(sharding)

    def layout_of(self, path: str, shape: tuple[int, ...]) -> Layout:
        """How a variable is divided over the logical devices of a replica."""
        return Layout() if self.layouts is None else self.layouts.of(path, shape)

    def check_layouts(self, paths: Sequence[str]) -> None:
        """Warns of layouts that no variable of a model has."""
        if self.layouts is not None:
            self.layouts.warn_of_unused(paths)


def num_bytes(shape: Sequence[int], dtype: Any) -> int:
    """What an array of this form takes."""
    return math.prod(shape) * jnp.dtype(dtype).itemsize


def narrowed(value: Any, dtype: Any) -> Any:
    """A value in the dtype in which it travels, where it is a wider float.

    Args:
        dtype: `Placement.communication_dtype`.
    """
    is_wider = jnp.issubdtype(value.dtype, jnp.floating) and value.dtype.itemsize > 2
    return value.astype(dtype) if dtype is not None and is_wider else value
