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
from keras_distribute.dry_run.gpus import target_config
from keras_distribute.dry_run.hardware import HARDWARE, Hardware
from keras_distribute.errors import BackendError, DeviceError

_NAME = re.compile(r"^([a-z0-9-]+):(\d+(?:x\d+)*)$")
_SAME = {
    "v5litepod": "v5e",
    "v5": "v5p",
    "v6": "v6e",
    "v7x": "tpu7x",
    "ironwood": "tpu7x",
    "a100-40gb": "a100",
}
_MOST_GPUS = 8  # That share one NVLink network.
PACKAGES = {
    "tpu": ("libtpu",),
    "cuda": ("jax-cuda12-plugin", "jax-cuda12-pjrt"),
    "cpu": (),
}
_HOST = {"v5e": (2, 4), "v6e": (2, 4)}  # Chips of the largest single host.


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
        return math.prod(self.shape) * (
            self.hardware.devices_per_chip if self.hardware else 1
        )

    def resized(self, shape: Sequence[int]) -> Target:
        """The same hardware in another number."""
        kind = self.name.partition(":")[0]
        return dataclasses.replace(
            self, name=f"{kind}:{'x'.join(map(str, shape))}", shape=tuple(shape)
        )

    def devices(self) -> list[Any]:
        """The devices to compile for; only those of CPUs can run anything.

        Raises:
            BackendError: Where the compiler is not installed.
            DeviceError: For a topology that it does not know, and for more CPU devices
                than there are.
        """
        if self.platform == "cpu":
            return _cpu_devices(self.num_devices)
        try:
            if self.platform == "tpu":
                return topologies.tpu_devices(*self._libtpu_name())
            assert self.hardware is not None
            return topologies.gpu_devices(
                target_config(self.hardware), self.num_devices
            )
        except topologies.NotInstalledError as error:
            package, extra = {
                "tpu": ("libtpu", "tpu"),
                "cuda": ("jax-cuda12-plugin and jax-cuda12-pjrt", "cuda"),
            }[self.platform]
            raise BackendError(
                f"Compiling for {self.name} needs {package}; no accelerator is needed.",
                received=f"{error}.",
                fix=f"pip install 'keras-distribute[dry-run-{extra}]', or try "
                f'topology="cpu:{self.num_devices}".',
            ) from error
        except topologies.UnknownTopologyError as error:
            raise _unknown(self.name, str(error)) from error

    def _libtpu_name(self) -> tuple[str, tuple[int, int, int], str]:
        """The name, the chips of one host, and how the cores of a chip are used."""
        assert self.hardware is not None
        name, chips = self.hardware.name, list(self.shape)
        single = _HOST.get(name, (2, 2))
        most = (
            single if chips == list(single) else (2, 2)
        )  # A single host may have more than each of several.
        bounds = (min(chips[0], most[0]), min(chips[1], most[1]), 1)
        shape = "x".join(map(str, chips))
        return f"{name}:{shape}", bounds, "megacore" if name == "v4" else "default"


def parse(name: str) -> Target:
    """The hardware that a name such as `"v5e:4x4"`, `"h100:8"` or `"cpu:8"` stands for.

    Raises:
        DeviceError: For anything else.
    """
    match = _NAME.match(name.strip().lower()) if isinstance(name, str) else None
    if match is None:
        raise _unknown(name, "not of the form kind:size")
    kind, shape = match.group(1), tuple(map(int, match.group(2).split("x")))
    kind = _SAME.get(kind, kind)
    if min(shape) < 1:
        raise _unknown(name, "a size of 0")
    if kind == "cpu" and len(shape) == 1:
        return Target(name, "cpu", shape, None)
    hardware = HARDWARE.get(kind)
    if hardware is None:
        raise _unknown(name, f"no hardware {kind!r}")
    if hardware.torus_axes:
        if not 2 <= len(shape) <= hardware.torus_axes:
            raise _unknown(
                name,
                f"a slice of {kind} has "
                f"{'2 or 3' if hardware.torus_axes == 3 else '2'} axes",
            )
        if not hardware.has_slice(shape):
            pod = "x".join(map(str, hardware.pod))
            raise _unknown(name, f"the largest slice of {kind} has {pod} chips")
        return Target(name, "tpu", shape, hardware)
    if len(shape) > 1 or math.prod(shape) > _MOST_GPUS:
        raise _unknown(name, f"GPUs of one host, at most {_MOST_GPUS}")
    return Target(name, "cuda", shape, hardware)


def _cpu_devices(count: int) -> list[Any]:
    if not jax_internals.backends_are_initialized():
        config.set_cpu_devices(max(count, jax.config.values["jax_num_cpu_devices"]))
    found = jax.local_devices(backend="cpu")
    if len(found) < count:
        raise DeviceError(
            f"There are {len(found)} CPU device(s).",
            received=f"topology={f'cpu:{count}'!r}.",
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
