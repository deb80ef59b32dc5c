"""An array that may be larger than what this process can hold: its rows, some at a
time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

_BYTES = 2**24  # Of a block.
Array = np.ndarray[Any, Any]


class Blocks:
    """The rows of an array, which are read in blocks.

    Args:
        dtype: Its name.
        read: From the numbers of two rows to those from the first to before the other.
        multiple_of: What the rows of a block are a multiple of.

    Attributes:
        rows: Of a block; the last one may have fewer.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: str,
        read: Callable[[int, int], Array],
        multiple_of: int = 1,
    ) -> None:
        self.shape, self.dtype, self.read = shape, np.dtype(jnp.dtype(dtype)), read
        of_row = max(1, math.prod(shape[1:]) * self.dtype.itemsize)
        self.rows = max(1, _BYTES // of_row // multiple_of) * multiple_of

    def between(self, start: int, stop: int) -> Iterator[tuple[int, Array]]:
        """Blocks of these rows in their order, each with the number of its first."""
        for first in range(start, stop, self.rows):
            yield first, self.read(first, min(first + self.rows, stop))

    def __iter__(self) -> Iterator[Array]:
        return (block for _, block in self.between(0, self.shape[0]))

    def whole(self) -> Array:
        """The array."""
        array = np.empty(self.shape, self.dtype)
        for first, block in self.between(0, self.shape[0]):
            array[first : first + len(block)] = block
        return array
