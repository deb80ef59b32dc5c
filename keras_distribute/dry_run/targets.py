"""Names of hardware to devices that programs can be compiled for, whether they are
there or not.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any

import jax

from keras_distribute import config
from keras_distribute._compat import jax_internals, topologies
from keras_distribute.dry_run.hardware import HARDWARE, Hardware
from keras_distribute.errors import BackendError, DeviceError

_NAME = re.compile(r"^([a-z0-9-]+):(\d+(?:x\d+)*)$")
_OTHER_NAMES = {
    "v5litepod": "v5e",
    "v5": "v5p",
    "v6": "v6e",
    "v7x": "tpu7x",
    "ironwood": "tpu7x",
    "a100-40gb": "a100",
}
# GPUs that share one NVLink network.
_MOST_GPUS = 8
PACKAGES = {
    "tpu": ("libtpu",),
    "cuda": ("jax-cuda12-plugin", "jax-cuda12-pjrt"),
    "cpu": (),
}
# Chips of the largest single host.
_HOST = {"v5e": (2, 4), "v6e": (2, 4)}


@dataclasses.dataclass(frozen=True)
class Target:
    """Hardware that a step is compiled for.

    Args:
        name: Of the topology, as the user wrote it.
        platform: `"tpu"`, `"cuda"` or `"cpu"`.
        shape: The chips along each axis of a TPU slice; else the number of devices.
        hardware: Of one device; `None` for CPUs, of which nothing is known.
    """

    name: str
    platform: str
    shape: tuple[int, ...]
    hardware: Hardware | None

    @property
    def num_devices(self) -> int:
        """How many devices JAX shows there."""
        per_chip = self.hardware.devices_per_chip if self.hardware else 1
        return math.prod(self.shape) * per_chip

    def resized(self, shape: Sequence[int]) -> Target:
        """The same hardware in another number."""
        name = f"{self.name.partition(':')[0]}:{_shape_name(shape)}"
        return dataclasses.replace(self, name=name, shape=tuple(shape))

    def devices(self) -> list[Any]:
        """The devices to compile for; only those of CPUs can run anything.

        Raises:
            BackendError: Where the compiler is not installed.
            DeviceError: For a topology that it does not know, and for more CPU devices
                than there are.
        """
        if self.hardware is None:
            return _cpu_devices(self.num_devices)
        try:
            if self.platform == "cuda":
                config_text = self.hardware.target_config()
                return topologies.gpu_devices(config_text, self.num_devices)
            return topologies.tpu_devices(*self._libtpu_name(self.hardware.name))
        except topologies.NotInstalledError as error:
            raise BackendError(
                f"Compiling for {self.name} needs "
                f"{' and '.join(PACKAGES[self.platform])}; no accelerator is needed.",
                received=f"{error}.",
                fix=f"pip install 'keras-distribute[dry-run-{self.platform}]', or try "
                f'topology="cpu:{self.num_devices}".',
            ) from error
        except topologies.UnknownTopologyError as error:
            raise _unknown(self.name, str(error)) from error

    def _libtpu_name(self, kind: str) -> tuple[str, tuple[int, int, int], str]:
        """The name, the chips of one host, and how the cores of a chip are used."""
        # A single host may have more chips than each of several.
        host = _HOST.get(kind, (2, 2))
        most = host if self.shape == host else (2, 2)
        x, y = map(min, self.shape, most)
        cores = "megacore" if kind == "v4" else "default"
        return f"{kind}:{_shape_name(self.shape)}", (x, y, 1), cores


def parse(name: str) -> Target:
    """The hardware that a name such as `"v5e:4x4"` or `"cpu:8"` stands for."""
    match = _NAME.match(name.strip().lower()) if isinstance(name, str) else None
    if match is None:
        raise _unknown(name, "not of the form kind:size")
    kind = _OTHER_NAMES.get(match.group(1), match.group(1))
    shape = tuple(map(int, match.group(2).split("x")))
    if min(shape) < 1:
        raise _unknown(name, "a size of 0")
    if kind == "cpu" and len(shape) == 1:
        return Target(name, "cpu", shape, None)
    hardware = HARDWARE.get(kind)
    if hardware is None:
        raise _unknown(name, f"no hardware {kind!r}")
    if not hardware.torus_axes:
        if len(shape) > 1 or math.prod(shape) > _MOST_GPUS:
            raise _unknown(name, f"GPUs of one host, at most {_MOST_GPUS}")
        return Target(name, "cuda", shape, hardware)
    if not 2 <= len(shape) <= hardware.torus_axes:
        axes = "2 or 3" if hardware.torus_axes == 3 else "2"
        raise _unknown(name, f"a slice of {kind} has {axes} axes")
    if not hardware.has_slice(shape):
        pod = _shape_name(hardware.pod)
        raise _unknown(name, f"the largest slice of {kind} has {pod} chips")
    return Target(name, "tpu", shape, hardware)


def _shape_name(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def _cpu_devices(count: int) -> list[Any]:
    if not jax_internals.backends_are_initialized():
        config.set_cpu_devices(max(count, jax.config.values["jax_num_cpu_devices"]))
    found = jax.local_devices(backend="cpu")
    if len(found) < count:
        raise DeviceError(
            f"There are {len(found)} CPU device(s).",
            received=f"topology='cpu:{count}'.",
            fix=f"kd.config.set_cpu_devices({count}) first thing in the program.",
        )
    return found[:count]


def _unknown(name: object, why: str) -> DeviceError:
    gpus = ", ".join(kind for kind, each in HARDWARE.items() if not each.torus_axes)
    tpus = ", ".join(kind for kind, each in HARDWARE.items() if each.torus_axes)
    return DeviceError(
        "A topology is named by the kind of hardware and its number, or by the chips "
        "along each axis of a TPU slice.",
        received=f"{name!r}: {why}.",
        fix=f'"v5e:4x4" ({tpus}), "h100:8" ({gpus}), or "cpu:8".',
    )
