"""How much of its published rates hardware reaches in training steps, and how far off
a prediction from that is.

The shares are fitted to published measurements of training steps by
`benchmarks/published_steps.py --fit`: those with the least sum of absolute logarithms
of predicted / measured time, which a single odd measurement moves little. What the
cases are, where they are published, and what is predicted for those that no share was
fitted to, is in `benchmarks/results/published_steps.md`.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Calibration:
    """What is known of one platform.

    Args:
        share: Of the published rates, that instructions reach; on a TPU, of the rate
            that its compiler expects, which may be more than all of it.
        error: How many times longer, or shorter, than predicted a step may take: the
            most of all published steps, fitted and held out.
        num_fitted: How many published steps the share was fitted to.
        num_held_out: How many others it was tried on.
    """

    share: float
    error: float
    num_fitted: int
    num_held_out: int


CALIBRATIONS = {
    "tpu": Calibration(1.36, 1.3, num_fitted=3, num_held_out=2),
    "cuda": Calibration(0.54, 1.35, num_fitted=4, num_held_out=7),
}
