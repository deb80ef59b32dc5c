"""The properties of GPUs that XLA compiles for, in the text form of its
`GpuTargetConfigProto`.

Source: NVIDIA's tables of technical specifications for each compute capability (CUDA
C++ Programming Guide,
https://docs.nvidia.com/cuda/cuda-c-programming-guide/#compute-capabilities), and the
data sheets of `hardware.py`.
"""

from __future__ import annotations

from keras_distribute.dry_run.hardware import Hardware

# Compute capability; multiprocessors; FP32 units and bytes of shared memory of each; of
# a block at most; L2 bytes; GHz.
_PROPERTIES = {
    "v100": ((7, 0), 80, 64, 98_304, 98_304, 6_291_456, 1.53),
    "a100": ((8, 0), 108, 64, 167_936, 166_912, 41_943_040, 1.41),
    "a100-80gb": ((8, 0), 108, 64, 167_936, 166_912, 41_943_040, 1.41),
    "h100": ((9, 0), 132, 128, 233_472, 232_448, 52_428_800, 1.98),
    "h200": ((9, 0), 132, 128, 233_472, 232_448, 52_428_800, 1.98),
}
_CUDNN = (9, 10, 0)


def target_config(hardware: Hardware) -> str:
    """The text of the proto."""
    (major, minor), cores, units, shared, shared_block, cache, clock = _PROPERTIES[
        hardware.name
    ]
    device = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": 49152,
        "shared_memory_per_core": shared,
        "shared_memory_per_block_optin": shared_block,
        "threads_per_core_limit": 2048,
        "core_count": cores,
        "fpus_per_core": units,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 65535,
        "block_dim_limit_z": 65535,
        "memory_bandwidth": int(hardware.memory_bandwidth),
        "l2_cache_size": cache,
        "clock_rate_ghz": clock,
        "device_memory_size": hardware.memory_bytes,
        "registers_per_core_limit": 65536,
        "registers_per_block_limit": 65536,
    }
    lines = "\n".join(f"  {name}: {value}" for name, value in device.items())
    return (
        f"gpu_device_info {{\n{lines}\n  cuda_compute_capability {{ major: {major} "
        f"minor: {minor} }}\n}}\n"
        'platform_name: "CUDA"\n'
        f"dnn_version_info {{ major: {_CUDNN[0]} minor: {_CUDNN[1]} patch: {_CUDNN[2]} "
        f"}}\n"
        f'device_description_str: "NVIDIA {hardware.name.upper()}"\n'
    )
