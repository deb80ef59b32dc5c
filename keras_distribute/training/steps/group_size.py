"""`steps_per_execution="auto"`: how many steps of a `fit` to run in one dispatch, found
by measuring them.

The sizes are tried in turn, the next one as long as the one before was a gain, and as
long as a group stays short enough for a progress bar that lives. Each costs a
compilation, so there are few.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

SIZES = (1, 8, 32)
LIVELY_SECONDS = 0.1  # The longest group.
# A step takes this share of the time before, at most, or the smaller size stays.
GAIN = 0.97
_STEPS, _GROUPS = 24, 3  # To measure of each size, at least.


class GroupSize:
    """The size of the groups of one model, from group to group.

    Args:
        sizes: To try.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        sizes: Sequence[int] = SIZES,
    ) -> None:
        self._clock, self._sizes = clock, sizes
        self._index = 0
        self.settled = len(sizes) == 1
        self._before: float | None = None  # Seconds of a step with the size before.
        self._seconds: list[float] = []  # Of groups of this size.
        self._compiled = False
        self._begun: float | None = None

    @property
    def size(self) -> int:
        """Of the next group."""
        return self._sizes[self._index]

    def interrupted(self) -> None:
        """Something else than steps takes time now, such as a validation."""
        self._begun = None

    def group_begins(self, size: int) -> None:
        """Called before each group: the time between two calls is that of a group and
        all that belongs to it.
        """
        if self.settled or size != self.size:
            self._begun = None
            return
        now = self._clock()
        if self._begun is not None and self._compiled:
            self._seconds.append(now - self._begun)
        # The first group of a size compiles.
        self._compiled = self._compiled or self._begun is not None
        self._begun = now
        if len(self._seconds) >= max(_GROUPS, _STEPS / size):
            self._judge(statistics.median(self._seconds) / size)

    def _judge(self, seconds: float) -> None:
        if self._before is not None and seconds > GAIN * self._before:
            self._index, self.settled = self._index - 1, True
            return
        if (
            self._index + 1 == len(self._sizes)
            or self._sizes[self._index + 1] * seconds > LIVELY_SECONDS
        ):
            self.settled = True
            return
        self._before, self._seconds, self._compiled = seconds, [], False
        self._begun = None
        self._index += 1
