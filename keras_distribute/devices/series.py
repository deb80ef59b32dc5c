"""Replicas that share a device, and the values of their programs."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax

from keras_distribute.devices.axes import REPLICA_AXIS
from keras_distribute.devices.compiler_options import DISABLED_PASSES


@dataclasses.dataclass(frozen=True)
class Series:
    """How many replicas there are, and on how many devices.

    Args:
        num_replicas: A power of two.
        num_devices: Which divides it.
        platform: Of the devices: `"cpu"`, `"gpu"` or `"tpu"`.
    """

    num_replicas: int
    num_devices: int
    platform: str

    @property
    def on_cpu(self) -> bool:
        """Whether the devices are CPUs."""
        return self.platform == "cpu"

    @property
    def compiler_options(self) -> dict[str, Any]:
        """What XLA is told, so that a replica's part is the same code on any number of
        devices.

        What in a loop depends on no turn would be moved out of it, and joined with what
        is around; a condition could become a choice of results. Loops over few bytes
        become one function on CPUs, which LLVM compiles otherwise: it leaves out that a
        product is rounded to 16 bits before it is added, where the CPU can do both at
        once. On GPUs, XLA may else choose algorithms by how fast they were, and add in
        any order (https://openxla.org/xla/determinism).
        """
        options: dict[str, Any] = {
            DISABLED_PASSES: "while-loop-invariant-code-motion,simplify-conditional,"
            "small-while-loop-hoisting"
        }
        if self.platform == "gpu":
            options["xla_gpu_deterministic_ops"] = True
            options["xla_gpu_autotune_level"] = 0
        return options

    @property
    def each(self) -> int:
        """How many replicas a device has."""
        return self.num_replicas // self.num_devices

    @property
    def first(self) -> Any:
        """The number of this device's first replica, inside a program."""
        if self.num_devices == 1:
            return 0
        return lax.axis_index(REPLICA_AXIS) * self.each

    def own(self, of_all: Any) -> Any:
        """Of an array with one row for each replica, those of this device's."""
        return lax.dynamic_slice_in_dim(of_all, self.first, self.each)


@dataclasses.dataclass(frozen=True)
class Value:
    """A value in the program of a device.

    Args:
        array: The value, or those of the device's replicas along axis 0.
        is_equal: Whether it is the same on every replica.
    """

    array: Any
    is_equal: bool

    def stacked(self, each: int) -> Any:
        """One for each of the device's replicas, of which there are `each`."""
        if not self.is_equal:
            return self.array
        array = jnp.asarray(self.array)
        return jnp.broadcast_to(array, (each, *array.shape))

    def alone(self) -> Any:
        """The one value; of several, which are known to be equal, the first."""
        return jnp.asarray(self.array) if self.is_equal else self.array[0]
