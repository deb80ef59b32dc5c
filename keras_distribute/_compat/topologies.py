"""Devices of hardware that is not there, from JAX's ahead-of-time compilation.

`jax.experimental.topologies` is public, but says nothing of what is missing:

- libtpu refuses to be loaded while another process has it
  (`ALLOW_MULTIPLE_LIBTPU_LOAD`), even for compiling alone, and logs what it does not
  find on a machine without a TPU;
- a plugin that is not installed is a `RuntimeError` or a `NotImplementedError`, an
  unknown topology a `JaxRuntimeError`;
- JAX gives its CUDA plugin up on a machine without CUDA's libraries, unless
  `JAX_SKIP_CUDA_CONSTRAINTS_CHECK` is set.

Goes when JAX has errors of its own for these.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
from collections.abc import Generator, Mapping
from typing import Any

import jax
from jax.errors import JaxRuntimeError
from jax.experimental import topologies

from keras_distribute._compat import libtpu

_SETTINGS = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
}


class NotInstalledError(Exception):
    """The compiler for a platform is missing."""


class UnknownTopologyError(Exception):
    """The compiler does not know a topology; says why."""


def tpu_devices(
    name: str, chips_per_host: tuple[int, int, int], chip_config: str
) -> list[Any]:
    """The devices of a TPU slice.

    Args:
        name: `"v5e:4x4"`.
        chips_per_host: The chips of one host along each axis.
        chip_config: How the cores of a chip are used, in libtpu's words.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise NotInstalledError("there is no module libtpu")
    # What the user has set stays.
    missing = {key: _SETTINGS[key] for key in _SETTINGS.keys() - os.environ.keys()}
    with _environment(missing):
        libtpu.load_without_profiler(for_compiling=True)
        return _devices(
            "tpu",
            name,
            chips_per_host_bounds=chips_per_host,
            chip_config_name=chip_config,
        )


def gpu_devices(target_config: str, count: int) -> list[Any]:
    """GPUs of one host, from a `GpuTargetConfigProto` as text."""
    names = (f"jax_cuda{version}_plugin" for version in (12, 13))
    plugin = next(filter(importlib.util.find_spec, names), None)
    if plugin is None:
        raise NotInstalledError("there is no module jax_cuda12_plugin")
    options = {"target_config": target_config, "topology": f"1x1x{count}"}
    try:
        return _devices("cuda", "", **options)
    # JAX gives the plugin up where it finds no CUDA, which compiling does not need.
    except NotInstalledError:
        # JAX starts without the plugin, and does not look for GPUs.
        jax.devices("cpu")
        with _environment({"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}):
            module = plugin.removeprefix("jax_").removesuffix("_plugin")
            importlib.import_module(f"jax_plugins.xla_{module}").initialize()
        return _devices("cuda", "", **options)


def assembler() -> contextlib.AbstractContextManager[None]:
    """Lets XLA find the `ptxas` of `nvidia-cuda-nvcc-cu12`, where it is installed, for
    a `with` block.

    XLA looks in the `PATH`, where the one of another CUDA may be, which does not know
    every GPU: that of CUDA 13 none before compute capability 7.5.
    """
    has_nvidia = importlib.util.find_spec("nvidia")
    found = has_nvidia and importlib.util.find_spec("nvidia.cuda_nvcc")
    folders = (found and found.submodule_search_locations) or ()
    paths = [*(f"{folder}/bin" for folder in folders), os.environ.get("PATH", "")]
    return _environment({"PATH": os.pathsep.join(paths)})


def _devices(platform: str, name: str, **options: Any) -> list[Any]:
    try:
        return list(topologies.get_topology_desc(name, platform, **options).devices)
    except NotImplementedError as error:
        raise NotInstalledError(str(error)) from error
    except JaxRuntimeError as error:
        raise UnknownTopologyError(str(error).splitlines()[0]) from error


@contextlib.contextmanager
def _environment(settings: Mapping[str, str]) -> Generator[None]:
    """Environment variables for a `with` block."""
    old = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in old.items():
            del os.environ[name]
            if value is not None:
                os.environ[name] = value
