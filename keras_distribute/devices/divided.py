"""What is written otherwise in a program whose arrays XLA divides over the devices."""

from __future__ import annotations

from keras_distribute.devices import extremes, scatters, windows
from keras_distribute.devices.rewriting import Rewriting


def rewritings(rows: int | None) -> tuple[Rewriting, ...]:
    """Extremes beside whether there is a NaN, windows each of an array of its own, and
    places of scatters as int32.

    Args:
        rows: Of the batch, which is divided; `None` where other dimensions are, too.
    """
    return (extremes.with_nans(rows), windows.each_by_itself(rows), scatters.BY_INT32)
