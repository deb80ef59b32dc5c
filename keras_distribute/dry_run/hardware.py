"""What public sources say about accelerators: memory, peak rates, links, and what XLA
asks about a GPU. Nothing here was measured by us.

All numbers are of one *device*, as JAX counts them: of one TensorCore on TPU v2, v3 and
v7x, which have two to a chip, else of a chip. `usable_bytes` is what a program may
take: what the compilers themselves say (libtpu 0.0.52 in the error of a program that is
too large), and on GPUs the 75 % that JAX takes by default.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

_HALF = ("bfloat16", "float16")
_CLOUD = "https://cloud.google.com/tpu/docs/"
_V2_V3 = (
    "Jouppi et al. 2020, A domain-specific supercomputer for training deep neural "
    "networks, https://doi.org/10.1145/3360307"
)
_V4 = (
    "Jouppi et al. 2023, TPU v4: an optically reconfigurable supercomputer, "
    "https://arxiv.org/abs/2304.01433"
)
_NVIDIA = "https://www.nvidia.com/"
_A100 = (
    f"{_NVIDIA}content/dam/en-zz/Solutions/Data-Center/a100/pdf/"
    "nvidia-a100-datasheet.pdf"
)
_H100 = f"{_NVIDIA}en-us/data-center/h100/"
_H200 = f"{_NVIDIA}en-us/data-center/h200/"
_V100 = (
    "https://images.nvidia.com/content/technologies/volta/pdf/"
    "volta-v100-datasheet-update-us-1165301-r5.pdf"
)
# https://docs.jax.dev/en/latest/gpu_memory_allocation.html
_GPU_FRACTION = 0.75
# What XLA asks about a GPU, in the words of its `GpuTargetConfigProto`. Source:
# NVIDIA's tables of technical specifications for each compute capability (CUDA C++
# Programming Guide,
# https://docs.nvidia.com/cuda/cuda-c-programming-guide/#compute-capabilities), and the
# data sheets above.
_EVERY_GPU = {
    "threads_per_block_limit": 1024,
    "threads_per_warp": 32,
    "shared_memory_per_block": 49152,
    "threads_per_core_limit": 2048,
    "block_dim_limit_x": 2**31 - 1,
    "block_dim_limit_y": 65535,
    "block_dim_limit_z": 65535,
    "registers_per_core_limit": 65536,
    "registers_per_block_limit": 65536,
}
_VOLTA = {
    "cuda_compute_capability": "{ major: 7 minor: 0 }",
    "core_count": 80,
    "fpus_per_core": 64,
    "shared_memory_per_core": 98_304,
    "shared_memory_per_block_optin": 98_304,
    "l2_cache_size": 6_291_456,
    "clock_rate_ghz": 1.53,
}
_AMPERE = {
    "cuda_compute_capability": "{ major: 8 minor: 0 }",
    "core_count": 108,
    "fpus_per_core": 64,
    "shared_memory_per_core": 167_936,
    "shared_memory_per_block_optin": 166_912,
    "l2_cache_size": 41_943_040,
    "clock_rate_ghz": 1.41,
}
_HOPPER = {
    "cuda_compute_capability": "{ major: 9 minor: 0 }",
    "core_count": 132,
    "fpus_per_core": 128,
    "shared_memory_per_core": 233_472,
    "shared_memory_per_block_optin": 232_448,
    "l2_cache_size": 52_428_800,
    "clock_rate_ghz": 1.98,
}


@dataclasses.dataclass(frozen=True)
class Hardware:
    """One kind of device.

    Args:
        name: As in the names of topologies.
        half_rate: Peak floating-point operations a second of dense matrix products of
            16 bits.
        single_rate: Those of float32: a TPU multiplies it as bfloat16 by JAX's default
            precision, a GPU as TF32 by XLA's.
        usable_bytes: What of its memory a program may take.
        memory_bandwidth: Bytes a second.
        link_bandwidth: Bytes a second in one direction over one link between chips; of
            a GPU over all of its links.
        source: Where the numbers are published.
        pod: The chips along each axis of the largest TPU slice.
        wraps_every: An axis whose number of chips is a multiple of it is a ring; others
            are lines.
        devices_per_chip: How many devices share a chip's links.
        clock_rate: Of a TPU's cores, in cycles a second; 0 for GPUs, whose compiler
            counts none.
        gpu: What XLA asks about a GPU.
    """

    name: str
    half_rate: float
    single_rate: float
    usable_bytes: int
    memory_bandwidth: float
    link_bandwidth: float
    source: str
    pod: tuple[int, ...] = ()
    wraps_every: int = 0
    devices_per_chip: int = 1
    clock_rate: float = 0
    gpu: Mapping[str, float | str] = dataclasses.field(default_factory=dict)

    def peak_rate(self, dtype: str) -> float:
        """Operations a second of matrix products, by the dtype of the operands."""
        return self.half_rate if dtype in _HALF else self.single_rate

    def is_plain(self, dtype: str) -> bool:
        """Whether products of a dtype have no matrix units: float32 on a V100."""
        return dtype not in _HALF and self.single_rate < self.half_rate / 2

    @property
    def torus_axes(self) -> int:
        """The most axes of a slice's network; 0: every device reaches every other."""
        return len(self.pod)

    def has_slice(self, shape: Sequence[int]) -> bool:
        """Whether there is a TPU slice with these numbers of chips along its axes."""
        # Optical switches join cubes of chips to any shape.
        if len(self.pod) == 3:
            return math.prod(shape) <= math.prod(self.pod)
        return all(chips <= most for chips, most in zip(shape, self.pod, strict=True))

    def target_config(self) -> str:
        """XLA's `GpuTargetConfigProto` of a GPU, as text."""
        # A message has no colon in front of its braces.
        lines = [
            f"{name} {value}" if isinstance(value, str) else f"{name}: {value}"
            for name, value in self.gpu.items()
        ]
        return (
            f"gpu_device_info {{ {' '.join(lines)} }}\n"
            'platform_name: "CUDA"\n'
            "dnn_version_info { major: 9 minor: 10 patch: 0 }\n"
            f'device_description_str: "NVIDIA {self.name.upper()}"\n'
        )


def _tpu(
    name: str,
    teraflops: float,
    usable_gib: float,
    gigabytes: float,
    link_gigabytes: float,
    pod: tuple[int, ...],
    wraps_every: int,
    source: str,
    gigahertz: float,
    cores: int = 1,
) -> Hardware:
    """A TPU, from the numbers of a chip, but for `usable_gib`, of a device."""
    rate, usable = teraflops * 1e12 / cores, int(usable_gib * 2**30)
    memory, link = gigabytes * 1e9 / cores, link_gigabytes * 1e9
    return Hardware(
        name,
        rate,
        rate,
        usable,
        memory,
        link,
        source,
        pod,
        wraps_every,
        cores,
        gigahertz * 1e9,
    )


def _gpu(
    name: str,
    half: float,
    single: float,
    memory_bytes: int,
    gigabytes: float,
    link_gigabytes: float,
    source: str,
    properties: Mapping[str, float | str],
) -> Hardware:
    """A GPU, its rates in teraflops."""
    usable, memory = int(memory_bytes * _GPU_FRACTION), gigabytes * 1e9
    sizes = {"device_memory_size": memory_bytes, "memory_bandwidth": int(memory)}
    gpu = {**_EVERY_GPU, **properties, **sizes}
    link = link_gigabytes * 1e9
    return Hardware(
        name, half * 1e12, single * 1e12, usable, memory, link, source, gpu=gpu
    )


HARDWARE = {
    each.name: each
    for each in (
        # Clock rates of v2, v3 and v4: the papers. Of the others: the peak rate by the
        # operations of a cycle, 2 * 128 * 128 for each of the 4 matrix units of v5e and
        # the 8 of v5p, 4 times v5e's of a core of v6e and tpu7x by the cycles that
        # libtpu 0.0.52 expects of large products.
        # Links: 496 and 656 Gbit/s in each direction.
        _tpu("v2", 46, 7.48, 700, 62, (16, 16), 16, _V2_V3, 0.7, cores=2),
        _tpu("v3", 123, 15.48, 900, 82, (32, 32), 32, _V2_V3, 0.94, cores=2),
        _tpu("v4", 275, 30.75, 1200, 50, (16, 16, 16), 4, _V4, 1.05),
        # The chip's bandwidth in both directions, over its ports: 400 GB/s and 4, 1200
        # and 6, 800 and 4, 1200 and 6.
        _tpu("v5e", 197, 15.75, 819, 50, (16, 16), 16, _CLOUD + "v5e", 1.5),
        _tpu("v5p", 459, 95.73, 2765, 100, (16, 20, 28), 4, _CLOUD + "v5p", 1.75),
        _tpu("v6e", 918, 31.24, 1638, 100, (16, 16), 16, _CLOUD + "v6e", 1.75),
        _tpu(
            "tpu7x", 2307, 94.74, 7380, 100, (16, 24, 24), 4, _CLOUD + "tpu7x", 2.2, 2
        ),
        # NVLink: half of what is published, which counts both directions.
        _gpu("v100", 125, 15.7, 16_935_682_048, 900, 150, _V100, _VOLTA),
        _gpu("a100", 312, 156, 42_331_013_120, 1555, 300, _A100, _AMPERE),
        _gpu("a100-80gb", 312, 156, 85_094_825_984, 2039, 300, _A100, _AMPERE),
        _gpu("h100", 989, 494.5, 84_942_979_072, 3350, 450, _H100, _HOPPER),
        _gpu("h200", 989, 494.5, 150_019_538_944, 4800, 450, _H200, _HOPPER),
    )
}
