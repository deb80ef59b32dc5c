"""The search itself, and what it recommends."""

import pytest

from keras_distribute.batch_size.result import recommended
from keras_distribute.dry_run import fitting


@pytest.mark.parametrize("most", [1, 7, 100, 5000])
@pytest.mark.parametrize("unit", [1, 8])
@pytest.mark.parametrize("knows", [True, False])
def test_trials_that_run_out_of_memory(most, unit, knows):
    """Sizes are not known of those, so the search goes to the middle."""
    tried = []

    def needed(rows):
        tried.append(rows)
        return None if rows > most * unit else (rows if knows else 1)

    fits, too_large, count = fitting.largest(needed, None, unit, 32, most_trials=25)
    assert fits <= most * unit < too_large
    assert too_large - fits <= max(1, fits // unit // 32) * unit
    assert len(tried) == len(set(tried)) == count <= 25


def test_the_largest_to_try():
    assert fitting.largest(lambda rows: rows, None, 8, 32, most=1001) == (1000, None, 6)
    assert fitting.largest(lambda rows: rows, 10**9, 1, 32, most=50) == (50, None, 2)
    assert fitting.largest(lambda rows: None, None, 4, 64) == (0, 4, 5)


@pytest.mark.parametrize(
    ("largest", "whole", "unit", "found"),
    [
        (1000, None, 8, (944, 1)),
        (1000, 1000, 8, (1000, 1)),  # Tried as it is.
        (999, 4096, 8, (512, 8)),
        (100, 1024, 4, (64, 16)),
        (100, 96, 4, (48, 2)),  # 96 is over the margin.
        (10, 7, 4, (7, 1)),
        (6, 30, 4, (3, 10)),  # No divisor is a multiple of 4.
        (3, 7, 1, (1, 7)),
        (1000, 2**31 - 8, 8, (904, (2**31 - 8) // 904)),
        (1000, 2**31 - 1, 8, (1, 2**31 - 1)),  # A prime number.
    ],
)
def test_what_is_recommended(largest, whole, unit, found):
    given = {"is_limited": True, "margin": 0.05, "unit": unit, "whole": whole}
    size, parts = found
    assert recommended(largest, **given) == found
    assert whole is None or size * parts == whole
