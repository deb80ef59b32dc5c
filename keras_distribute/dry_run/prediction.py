"""A prediction of a step's time, with an error bar: what each instruction of the
compiled program takes at the share of the hardware's rates that published training
steps reach.

    TPU          the cycles that the compiler expects / clock rate / share
    GPU          max(operations / peak rate, bytes / bandwidth) / share; float32 without
                 matrix units (V100) at its peak rate, which convolutions come close to
    step         sum over the instructions, or the collectives beside them where these
                 take longer; and the collectives that nothing runs beside

The rooflines of `estimate.py` are bounds; this is a guess at the time itself. The
share, and where it comes from: `calibration.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from keras_distribute.dry_run import estimate, work
from keras_distribute.dry_run.calibration import CALIBRATIONS, Calibration
from keras_distribute.dry_run.collectives import Collective
from keras_distribute.dry_run.hardware import Hardware
from keras_distribute.dry_run.hlo import Module
from keras_distribute.dry_run.targets import Target
from keras_distribute.dry_run.work import Work


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Seconds of one step, PREDICTED, never measured.

    Args:
        seconds: Of the step.
        low: Of the step, at the lower end of the error bar.
        high: At its upper end.
        work: Seconds of the instructions, one after the other.
        overlapped: Seconds of the collectives that run beside them.
        exposed: Seconds of the collectives that nothing runs beside.
        num_fitted: How many published steps of this platform the share was fitted to.
        num_held_out: How many others it was tried on.
    """

    seconds: float
    low: float
    high: float
    work: float
    overlapped: float
    exposed: float
    num_fitted: int
    num_held_out: int


def of_step(
    target: Target,
    module: Module,
    collectives: Sequence[Collective],
    num_steps: int,
    calibration: Calibration | None = None,
) -> Prediction | None:
    """The prediction for one step of a program that runs `num_steps`; `None` where
    nothing is published (CPUs). Another `calibration` than the platform's is for
    fitting it.
    """
    hardware = target.hardware
    if hardware is None:
        return None
    known = calibration or CALIBRATIONS[target.platform]
    beside = alone = 0.0
    for each in collectives:
        seconds = estimate.seconds(target, each.kind, each.num_bytes, each.group_size)
        if each.overlaps:
            beside += seconds * each.times / num_steps
        else:
            alone += seconds * each.times / num_steps
    instructions = work.of_program(module)
    busy = seconds_of(hardware, instructions, known.share) / num_steps
    total = max(busy, beside) + alone
    return Prediction(
        seconds=total,
        low=total / known.error,
        high=total * known.error,
        work=busy,
        overlapped=beside,
        exposed=alone,
        num_fitted=known.num_fitted,
        num_held_out=known.num_held_out,
    )


def seconds_of(hardware: Hardware, instructions: Iterable[Work], share: float) -> float:
    """What instructions take, one after the other, at a share of the rates."""
    return sum(each.times * _seconds(hardware, each, share) for each in instructions)


def _seconds(hardware: Hardware, each: Work, share: float) -> float:
    if each.cycles is not None:
        return each.cycles / hardware.clock_rate / share
    compute = 0.0
    for dtype, count in each.flops.items():
        seconds = count / hardware.peak_rate(dtype)
        compute += seconds if hardware.is_plain(dtype) else seconds / share
    return max(compute, each.num_bytes / hardware.memory_bandwidth / share)
