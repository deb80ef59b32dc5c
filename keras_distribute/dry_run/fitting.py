"""The largest batch that fits, from few compilations."""

from __future__ import annotations

from collections.abc import Callable

_PRECISION = 32  # Up to a share of 1 / 32 of the batch.
_MOST = 12  # Compilations.
_GROWTH = 8  # From one that fits to the next guess, at most.


def largest(
    needed: Callable[[int], int], limit: int, unit: int, start: int
) -> tuple[int, int | None, int]:
    """Searches between a batch that fits and one that does not, where a line through
    both crosses the limit.

    What a step needs grows about in proportion to the batch, until the compiler starts
    to compute activations again to save memory; so each guess is tried, and the
    interval shrinks from both sides.

    Args:
        needed: The bytes that a batch needs; compiles it.
        limit: The bytes that there are.
        unit: Batches are multiples of it.
        start: A batch that `needed` was called with already.

    Returns:
        The largest batch that was found to fit (0 for none), the smallest that was
        found not to (`None` for none), and the number of compilations.
    """
    tried: dict[int, int] = {}

    def bytes_of(units: int) -> int:
        if units not in tried:
            tried[units] = needed(units * unit)
        return tried[units]

    fits, too_large = 0, None
    guess = max(1, start // unit)
    while len(tried) < _MOST:
        if bytes_of(guess) <= limit:
            fits = max(fits, guess)
        else:
            too_large = guess if too_large is None else min(too_large, guess)
        if too_large is not None and too_large - fits <= max(1, fits // _PRECISION):
            break
        guess = _next(tried, limit, fits, too_large)
    return fits * unit, None if too_large is None else too_large * unit, len(tried)


def _next(tried: dict[int, int], limit: int, fits: int, too_large: int | None) -> int:
    """The next number of units, strictly between what fits and what does not."""
    low, high = min(tried), max(tried)
    crossing = None
    if len(tried) > 1:
        below = max((units for units in tried if units <= fits), default=low)
        above = too_large if too_large is not None else high
        if above == below:
            below, above = low, high
        slope = (tried[above] - tried[below]) / (above - below)
        crossing = int(below + (limit - tried[below]) / slope) if slope > 0 else None
    if too_large is None:
        beyond = (
            2 * fits
            if crossing is None
            else max(crossing, fits) + max(1, crossing // _PRECISION)
        )
        return min(max(beyond, fits + 1), _GROWTH * fits)
    if crossing is None:
        crossing = too_large // 2
    margin = max(
        1, (too_large - fits) // _PRECISION
    )  # To come from both sides, not to creep along one.
    return min(max(crossing, fits + margin), too_large - margin)
