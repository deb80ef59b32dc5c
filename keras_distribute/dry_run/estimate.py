"""A roofline estimate of a step's time, from public peak rates. It is no measurement,
and real steps take longer.

    compute        operations of matrix products and convolutions / peak rate
    memory         bytes moved / bandwidth of the device's memory
    communication  sum over the collectives of bytes / bandwidth + hops * 1 microsecond
    at least       max(compute, memory, communication): everything overlaps perfectly
    in turn        max(compute, memory) + communication: no collective overlaps

Sources: the roofline model (Williams et al. 2009,
https://doi.org/10.1145/1498765.1498785); the times of collectives on a torus, the
halved bandwidth of an axis that is no ring, and a microsecond a hop, from "How to Scale
Your Model" (https://jax-ml.github.io/scaling-book/sharding/,
https://jax-ml.github.io/scaling-book/tpus/); rates: `hardware.py`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from keras_distribute.dry_run.collectives import Collective, bytes_sent
from keras_distribute.dry_run.hardware import Hardware
from keras_distribute.dry_run.targets import Target

FORMULA = (
    "at least = max(FLOPs / peak, bytes / memory bandwidth, collectives); in turn = "
    "max(FLOPs / peak, bytes / memory bandwidth) + collectives; a collective = bytes * "
    "(n - 1) / n / link bandwidth (twice for an all-reduce) + 1 us a hop"
)
_SECONDS_PER_HOP = 1e-6
_AXIS_SIZES = (1, 2, 4, 8, 16)


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Seconds of one step, ESTIMATED, never measured. See the formulas of `kd.dry_run`.

    Args:
        compute: Of the matrix products and convolutions at the peak rate.
        memory: Of the bytes moved at the memory's bandwidth.
        communication: Of the collectives.
        source: Of the rates.
    """

    compute: float
    memory: float
    communication: float
    source: str

    @property
    def at_least(self) -> float:
        """With everything overlapping."""
        return max(self.compute, self.memory, self.communication)

    @property
    def in_turn(self) -> float:
        """With collectives that overlap with nothing."""
        return max(self.compute, self.memory) + self.communication

    @property
    def bound_by(self) -> str:
        """What takes longest: `"compute"`, `"memory"` or `"communication"`."""
        parts = ("compute", "memory", "communication")
        return max(parts, key=lambda name: getattr(self, name))


@dataclasses.dataclass(frozen=True)
class ScalingPoint:
    """The estimate for another number of devices, each with as many rows as here: the
    rows of its global batch, the estimated seconds of a step, and the rows a second and
    device as a share of a single replica's.
    """

    topology: str
    num_devices: int
    batch: int
    in_turn: float
    efficiency: float


def of_step(
    target: Target,
    flops: Mapping[str, float],
    bytes_moved: float,
    collectives: Sequence[Collective],
    num_steps: int,
) -> Estimate | None:
    """The estimate of one step; `None` for CPUs. FLOPs (by dtype) and bytes are those
    of one step on one device, the collectives those of a call of `num_steps` steps.
    """
    hardware = target.hardware
    if hardware is None:
        return None
    return Estimate(
        sum(count / hardware.peak_rate(dtype) for dtype, count in flops.items()),
        bytes_moved / hardware.memory_bandwidth,
        sum(
            seconds(target, each.kind, each.num_bytes, each.group_size) * each.times
            for each in collectives
        )
        / num_steps,
        hardware.source,
    )


def seconds(target: Target, kind: str, num_bytes: float, group_size: int) -> float:
    """The time of one collective, each device putting in `num_bytes`; a part of the
    devices has all links to itself.
    """
    hardware = target.hardware
    assert hardware is not None
    if group_size < 2:
        return 0.0
    sent = bytes_sent(kind, num_bytes, group_size)
    bandwidth, hops = _network(target)
    if kind == "collective-permute":
        return sent / hardware.link_bandwidth + min(hops, 1) * _SECONDS_PER_HOP
    rounds = 2 if kind == "all-reduce" else 1
    return sent / bandwidth + rounds * min(hops, group_size - 1) * _SECONDS_PER_HOP


def _network(target: Target) -> tuple[float, int]:
    """A device's bandwidth into the network, all axes together, and hops to its end."""
    hardware = target.hardware
    assert hardware is not None
    if not hardware.torus_axes:
        return hardware.link_bandwidth, 0
    links = hops = 0
    for chips in target.shape:
        if chips > 1:
            is_ring = chips % hardware.wraps_every == 0
            links += 2 if is_ring else 1
            hops += chips // 2 if is_ring else chips - 1
    return (links or 2) * hardware.link_bandwidth / hardware.devices_per_chip, hops


def scaling(
    target: Target,
    here: Estimate,
    collectives: Sequence[Collective],
    gradient_bytes: int,
    rows: int,
    num_steps: int,
    num_logical: int = 1,
) -> list[ScalingPoint]:
    """Estimates for other numbers of replicas on the same devices, each device with as
    many rows as here.

    Args:
        gradient_bytes: What a step reduces, where a program for one replica shows no
            collective among several.
        rows: On each device.
        num_steps: How many steps a call of the program runs.
        num_logical: How many devices are a replica; what these exchange with each other
            stays as it is.
    """
    assert target.hardware is not None
    compiled_for_one = all(each.num_replicas == 1 for each in collectives)

    def step_time(there: Target, replicas: int) -> float:
        total = 0.0
        if compiled_for_one:
            gradients = seconds(there, "all-reduce", gradient_bytes, replicas)
            total = gradients * num_steps
        for each in collectives:
            scale = replicas if each.num_replicas > 1 else 1
            group = each.group_size // each.num_replicas * scale
            total += seconds(there, each.kind, each.num_bytes, group) * each.times
        return max(here.compute, here.memory) + total / num_steps

    points: list[ScalingPoint] = []
    for there in map(target.resized, _shapes(target.hardware)):
        devices = there.num_devices
        if devices % num_logical == 0:
            time = step_time(there, devices // num_logical)
            efficiency = step_time(there, 1) / time
            points.append(
                ScalingPoint(there.name, devices, rows * devices, time, efficiency)
            )
    return points


def _shapes(hardware: Hardware) -> list[tuple[int, ...]]:
    """From one device on, each with twice as many as the one before."""
    if not hardware.torus_axes:
        return [(1,), (2,), (4,), (8,)]
    squares = [(a, b) for a in _AXIS_SIZES for b in _AXIS_SIZES if b in (a, 2 * a)]
    flat = [shape for shape in squares if math.prod(shape) <= 256 and shape != (1, 2)]
    return [(*shape, 1) for shape in flat] if hardware.torus_axes == 3 else flat
