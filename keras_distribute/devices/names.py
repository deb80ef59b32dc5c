"""Device names of TensorFlow and JAX, as devices; and the names that users see."""

from __future__ import annotations

import re
from collections.abc import Sequence

import jax

from keras_distribute import checks
from keras_distribute.errors import DeviceError

_PLACE = r"(?:/job:\w+)?(?:/replica:\d+)?(?:/task:\d+)?/?(?:device:)?"
_NAME = re.compile(rf"^{_PLACE}([a-z]+)(?::([0-9]{{1,9}}))?$")
_PLATFORMS = {"cuda": "gpu", "rocm": "gpu"}


def name_of(device: jax.Device) -> str:
    """What users call a device: `"cpu:0"`."""
    return f"{device.platform}:{device.id}"


def parse_device(name: str | jax.Device) -> jax.Device:
    """The local device that a name of TensorFlow's or JAX's stands for.

    Args:
        name: `"GPU:0"`, `"/gpu:1"`, `"cpu:3"`, `"/job:worker/task:0/device:TPU:2"`,
            `"tpu"` (the first one), or a `jax.Device`.

    Raises:
        DeviceError: For a name that is no device name, or a device that does not exist;
            lists those that do.
    """
    if isinstance(name, jax.Device):
        return name
    match = _NAME.match(name.lower()) if isinstance(name, str) else None
    if match is None:
        raise DeviceError(
            "A device is named by its kind and its number.",
            received=f"{checks.shown(name)}.",
            fix='"GPU:0", "/gpu:1", "cpu:3", "TPU:0", or a jax.Device.',
        )
    kind = _PLATFORMS.get(match.group(1), match.group(1))
    index = int(match.group(2) or 0)
    devices = _devices_of(kind)
    if index < len(devices):
        return devices[index]
    raise DeviceError(
        f"There is no device {kind}:{index}.",
        received=f"{name!r}, with the devices {_available()}.",
        fix=f"kd.config.set_cpu_devices({index + 1}) at the start of the program."
        if kind == "cpu"
        else "name one of the devices above.",
    )


def parse_devices(names: Sequence[str | jax.Device] | None) -> tuple[jax.Device, ...]:
    """Devices from their names; all local accelerators (else CPU devices) for `None`.

    Raises:
        DeviceError: For an empty list, an unknown name, a device named twice, or
            devices of different kinds.
    """
    if names is None:
        return tuple(jax.local_devices())
    if isinstance(names, str | jax.Device):
        names = [names]
    if not isinstance(names, list | tuple):
        raise DeviceError(
            "The devices come as a list.",
            received=f"devices={checks.shown(names)}.",
            fix='["GPU:0", "GPU:1"], or None for all.',
        )
    devices = tuple(parse_device(name) for name in names)
    if not devices:
        raise DeviceError(
            "A strategy needs at least one device.",
            received="[].",
            fix='["GPU:0", "GPU:1"], or None.',
        )
    twice = sorted({str(d) for d in devices if devices.count(d) > 1})
    if twice:
        raise DeviceError(
            f"Each device can be named once; {', '.join(twice)} is named more often.",
            received=f"{list(names)}.",
            fix="name each device once.",
        )
    kinds = sorted({d.platform for d in devices})
    if len(kinds) > 1:
        raise DeviceError(
            "The replicas of one strategy are devices of one kind.",
            received=f"{list(names)} ({' and '.join(kinds)}).",
            fix=f'only "{kinds[-1]}" devices.',
        )
    return devices


def _devices_of(kind: str) -> Sequence[jax.Device]:
    try:
        return jax.local_devices(backend=kind)
    except RuntimeError:  # JAX knows no such platform, or cannot start it.
        return ()


def _available() -> str:
    kinds = dict.fromkeys([jax.default_backend(), "cpu"])
    return ", ".join(
        f"{kind}:{i}" for kind in kinds for i in range(len(_devices_of(kind)))
    )
