"""libtpu on a machine without a TPU, where it can compile, but its profiler ends the
process.

JAX registers the profiler of libtpu whenever it loads libtpu, which it does at its
start wherever libtpu is installed. `jax.profiler.start_trace` is then a segmentation
fault on a machine without a TPU (libtpu 0.0.52, JAX 0.10.2). Loaded before JAX does,
libtpu has no profiler, and everything else goes on as ever.

Private are `xla_client.load_pjrt_plugin_dynamically` and `pjrt_plugin_loaded`,
`get_tpu_library_path`, `num_available_tpu_chips_and_device_id` and
`backends_are_initialized`. Goes when libtpu's profiler does nothing there.
"""

from __future__ import annotations

import jax
from jax._src import xla_bridge
from jax._src.cloud_tpu_init import get_tpu_library_path
from jax._src.hardware_utils import num_available_tpu_chips_and_device_id
from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]

from keras_distribute._compat.seams import changes


def load_without_profiler(for_compiling: bool = False) -> None:
    """Loads libtpu without its profiler where it is installed, JAX has not loaded it,
    and there is no TPU; for compiling even where `JAX_PLATFORMS` leaves it out.
    """
    platforms = jax.config.values["jax_platforms"]
    wanted = for_compiling or (
        not xla_bridge.backends_are_initialized()
        and (not platforms or "tpu" in platforms)
    )
    if not wanted or xla_client.pjrt_plugin_loaded("tpu"):
        return
    path = get_tpu_library_path()
    if path is not None and not num_available_tpu_chips_and_device_id()[0]:
        xla_client.load_pjrt_plugin_dynamically("tpu", path)
        changes.loaded_libtpu = True


def profiling_ends_the_process() -> bool:
    """Whether `jax.profiler` would: JAX itself has loaded libtpu, and there is no TPU.
    Starts JAX.
    """
    on_cpu = jax.default_backend() == "cpu"
    return on_cpu and xla_client.pjrt_plugin_loaded("tpu") and not changes.loaded_libtpu
