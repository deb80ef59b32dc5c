"""The largest batch that fits, from few trials."""

from __future__ import annotations

from collections.abc import Callable, Mapping

# The search ends within 1 / 32 of the batch, or after 12 trials.
_PRECISION = 32
_MOST_TRIALS = 12
# From one batch that fits to the next guess, at most.
_GROWTH = 8


def largest(
    needed: Callable[[int], int | None],
    limit: int | None,
    unit: int,
    start: int,
    *,
    most: int | None = None,
    most_trials: int = _MOST_TRIALS,
) -> tuple[int, int | None, int]:
    """Searches between a batch that fits and one that does not, where a line through
    both crosses the limit, and in the middle where that is not known.

    What a step needs grows about in proportion to the batch, until the compiler starts
    to compute activations again to save memory; so each guess is tried, and the
    interval shrinks from both sides.

    Args:
        needed: The bytes that a batch needs, from a trial; `None` for one that ran out
            of memory.
        limit: The bytes that there are; `None` where only trials can tell.
        unit: Batches are multiples of it.
        start: The first batch to try.
        most: The largest to try, at least `unit`; `None` for any.

    Returns:
        The largest batch that was found to fit (0 for none), the smallest that was
        found not to (`None` for none), and the number of trials.
    """
    # Bytes by units of the batch.
    tried: dict[int, int | None] = {}
    fits, too_large = 0, None
    last = None if most is None else most // unit
    guess = max(1, start // unit)
    while len(tried) < most_trials:
        guess = guess if last is None else min(guess, last)
        if guess not in tried:
            tried[guess] = needed(guess * unit)
        bytes_needed = tried[guess]
        if bytes_needed is not None and (limit is None or bytes_needed <= limit):
            fits = max(fits, guess)
        else:
            too_large = guess if too_large is None else min(too_large, guess)
        if fits == last or (
            too_large is not None and too_large - fits <= max(1, fits // _PRECISION)
        ):
            break
        guess = _next_guess(tried, limit, fits, too_large)
    return fits * unit, None if too_large is None else too_large * unit, len(tried)


def _next_guess(
    tried: Mapping[int, int | None], limit: int | None, fits: int, too_large: int | None
) -> int:
    """The next number of units, strictly between what fits and what does not."""
    crossing = _crossing(tried, limit, fits, too_large)
    if too_large is None:
        beyond = 2 * fits
        if crossing is not None:
            beyond = max(crossing, fits) + max(1, crossing // _PRECISION)
        return min(max(beyond, fits + 1), _GROWTH * fits)
    # Both ends are left by a margin, or the guesses would creep along one of them.
    margin = max(1, (too_large - fits) // _PRECISION)
    guess = (fits + too_large) // 2 if crossing is None else crossing
    return min(max(guess, fits + margin), too_large - margin)


def _crossing(
    tried: Mapping[int, int | None], limit: int | None, fits: int, too_large: int | None
) -> int | None:
    """Where a line through two tried batches crosses the limit; `None` for one batch,
    where the memory does not grow, and where it is not known.
    """
    known = {units: size for units, size in tried.items() if size is not None}
    if limit is None or (too_large is not None and too_large not in known):
        return None
    low, high = min(known), max(known)
    below = max((units for units in known if units <= fits), default=low)
    above = high if too_large is None else too_large
    if above == below:
        below, above = low, high
    grown = known[above] - known[below]
    if grown <= 0:
        return None
    return int(below + (limit - known[below]) * (above - below) / grown)
