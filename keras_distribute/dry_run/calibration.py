"""How much of its published rates hardware reaches in training steps, and how far off
a prediction from that is.

The factors are fitted to published measurements of training steps by
`benchmarks/published_steps.py --fit`: those with the least sum of squared logarithms of
predicted / measured time. What the cases are, where they are published, and what was
predicted for those that no factor was fitted to, is in
`benchmarks/results/published_steps.md`.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Calibration:
    """The factors of one platform.

    Args:
        compute: The share of the peak rate that matrix products and convolutions reach;
            on a TPU, of the core's clock that the cycles which the compiler expects are
            divided by.
        memory: The share of the memory's bandwidth.
        error: How many times longer or shorter than predicted a step may take.
        num_fitted: How many published steps the factors were fitted to.
        num_held_out: How many others they were tried on.
    """

    compute: float
    memory: float
    error: float
    num_fitted: int
    num_held_out: int


CALIBRATIONS = {
    "tpu": Calibration(1.0, 1.0, 2.0, 3, 3),
    "cuda": Calibration(0.5, 0.7, 2.0, 4, 3),
}
