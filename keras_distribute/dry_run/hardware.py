"""What public sources say about accelerators: memory, peak rates, links. Nothing here
was measured by us.

All numbers are of one *device*, as JAX counts them: of one TensorCore on TPU v2, v3 and
v7x, which have two to a chip, else of a chip. `usable_bytes` is what a program may
take: what the compilers themselves say (libtpu 0.0.52 in the error of a program that is
too large), and on GPUs the 75 % that JAX takes by default.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

GIB = 2**30
_CLOUD = "https://cloud.google.com/tpu/docs/"
_V2_V3 = "Jouppi et al. 2020, A domain-specific supercomputer for training deep neural networks, https://doi.org/10.1145/3360307"
_V4 = "Jouppi et al. 2023, TPU v4: an optically reconfigurable supercomputer, https://arxiv.org/abs/2304.01433"
_A100 = "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/nvidia-a100-datasheet.pdf"
_H100 = "https://www.nvidia.com/en-us/data-center/h100/"
_H200 = "https://www.nvidia.com/en-us/data-center/h200/"
_V100 = "https://images.nvidia.com/content/technologies/volta/pdf/volta-v100-datasheet-update-us-1165301-r5.pdf"
_GPU_FRACTION = 0.75  # https://docs.jax.dev/en/latest/gpu_memory_allocation.html


@dataclasses.dataclass(frozen=True)
class Hardware:
    """One kind of device.

    Args:
        name: As in the names of topologies.
        flops: Peak floating-point operations a second of dense matrix products, by the
            dtype of the operands.
        memory_bytes: The device's own memory.
        usable_bytes: What of it a program may take.
        memory_bandwidth: Bytes a second.
        link_bandwidth: Bytes a second in one direction over one link between chips; of
            a GPU over all of its links.
        pod: The chips along each axis of the largest TPU slice.
        wraps_every: An axis whose number of chips is a multiple of it is a ring; others
            are lines.
        devices_per_chip: That share the chip's links.
        source: Where the numbers are published.
    """

    name: str
    flops: Mapping[str, float]
    memory_bytes: int
    usable_bytes: int
    memory_bandwidth: float
    link_bandwidth: float
    pod: tuple[int, ...]
    wraps_every: int
    devices_per_chip: int
    source: str

    @property
    def torus_axes(self) -> int:
        """The most axes of a slice's network; 0: every device reaches every other."""
        return len(self.pod)

    def has_slice(self, shape: Sequence[int]) -> bool:
        """Whether there is a TPU slice of so many chips along each axis."""
        if len(self.pod) == 3:  # Optical switches join cubes of chips to any shape.
            return math.prod(shape) <= math.prod(self.pod)
        return all(chips <= most for chips, most in zip(shape, self.pod, strict=True))


def _tpu(
    name: str,
    teraflops: float,
    memory_gib: float,
    usable_gib: float,
    gigabytes: float,
    link_gigabytes: float,
    pod: tuple[int, ...],
    wraps_every: int,
    cores: int,
    source: str,
) -> Hardware:
    """A TPU, from the numbers of a chip, but for `usable_gib`, of a device."""
    # JAX's default precision multiplies float32 as bfloat16 on a TPU.
    rate = teraflops * 1e12 / cores
    flops = {"bfloat16": rate, "float16": rate, "float32": rate}
    memory = int(memory_gib * GIB / cores)
    usable, bandwidth = int(usable_gib * GIB), gigabytes * 1e9 / cores
    return Hardware(
        name,
        flops,
        memory,
        usable,
        bandwidth,
        link_gigabytes * 1e9,
        pod,
        wraps_every,
        cores,
        source,
    )


def _gpu(
    name: str,
    half: float,
    tf32: float,
    memory_bytes: int,
    gigabytes: float,
    link_gigabytes: float,
    source: str,
) -> Hardware:
    """A GPU: teraflops of dense matrix products in 16 bits, and in TF32, as which XLA
    multiplies float32.
    """
    flops = {"bfloat16": half * 1e12, "float16": half * 1e12, "float32": tf32 * 1e12}
    usable = int(memory_bytes * _GPU_FRACTION)
    return Hardware(
        name,
        flops,
        memory_bytes,
        usable,
        gigabytes * 1e9,
        link_gigabytes * 1e9,
        (),
        0,
        1,
        source,
    )


HARDWARE = {
    each.name: each
    for each in (
        # Links: 496 and 656 Gbit/s in each direction.
        _tpu("v2", 46, 16, 7.48, 700, 62, (16, 16), 16, 2, _V2_V3),
        _tpu("v3", 123, 32, 15.48, 900, 82, (32, 32), 32, 2, _V2_V3),
        _tpu("v4", 275, 32, 30.75, 1200, 50, (16, 16, 16), 4, 1, _V4),
        # The chip's bandwidth in both directions, over its ports: 400 GB/s and 4, 1200
        # and 6, 800 and 4, 1200 and 6.
        _tpu("v5e", 197, 16, 15.75, 819, 50, (16, 16), 16, 1, _CLOUD + "v5e"),
        _tpu("v5p", 459, 95, 95.73, 2765, 100, (16, 20, 28), 4, 1, _CLOUD + "v5p"),
        _tpu("v6e", 918, 32, 31.24, 1638, 100, (16, 16), 16, 1, _CLOUD + "v6e"),
        _tpu(
            "tpu7x", 2307, 192, 94.74, 7380, 100, (16, 24, 24), 4, 2, _CLOUD + "tpu7x"
        ),
        # NVLink: half of what is published, which counts both directions.
        _gpu("v100", 125, 15.7, 16_935_682_048, 900, 150, _V100),
        _gpu("a100", 312, 156, 42_331_013_120, 1555, 300, _A100),
        _gpu("a100-80gb", 312, 156, 85_094_825_984, 2039, 300, _A100),
        _gpu("h100", 989, 494.5, 84_942_979_072, 3350, 450, _H100),
        _gpu("h200", 989, 494.5, 150_019_538_944, 4800, 450, _H200),
    )
}
