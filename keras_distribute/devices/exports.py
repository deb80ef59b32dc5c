"""Programs for other processes, by `jax.export`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.export

# JAX promises for few custom calls that another version of it knows them; not for those
# of cuDNN, nor for kernels by Triton. Tasks of a cluster have the same version, and who
# replays a kept step with another one is told.
_ANY_CALL = jax.export.DisabledSafetyCheck.custom_call("ALL")


def exported(
    program: Any, platforms: Sequence[str]
) -> Callable[..., jax.export.Exported]:
    """From the forms of the arguments to the program.

    Args:
        program: Made by `jax.jit`.
        platforms: Where it will run: `"cpu"`, `"cuda"`, `"rocm"`, `"tpu"`.
    """
    return jax.export.export(program, platforms=platforms, disabled_checks=[_ANY_CALL])


def platform_of(device: Any) -> str:
    """What `jax.export` calls the hardware; a `jax.Device` may say `"gpu"`."""
    if device.platform != "gpu":
        return str(device.platform)
    is_rocm = "rocm" in device.client.platform_version.lower()
    return "rocm" if is_rocm else "cuda"
