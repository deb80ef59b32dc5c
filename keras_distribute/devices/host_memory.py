"""Memory of the host that XLA for CPUs takes as it is: it begins where a cache line
does, which NumPy's own rarely does. Other memory is copied once more, and much of it by
threads that the step could use.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

_LINE = 64  # Bytes, as XLA wants them.
_LARGE = 100 * 1024  # Bytes; fewer are copied as quickly as they are handed over.


def gathered(
    array: np.ndarray[Any, Any], indices: np.ndarray[Any, Any]
) -> np.ndarray[Any, Any]:
    """`array[indices]`.

    Args:
        indices: Of rows, all below their number and none negative.
    """
    shape = (*indices.shape, *array.shape[1:])
    size = math.prod(shape) * array.itemsize
    if size <= _LARGE or array.dtype.hasobject:
        return array[indices]
    memory = np.empty(size + _LINE, np.uint8)
    start = -memory.__array_interface__["data"][0] % _LINE
    rows = memory[start : start + size].view(array.dtype).reshape(shape)
    # By the default mode NumPy would fill another array first.
    return np.take(array, indices, axis=0, out=rows, mode="clip")
