"""Messages as frames of bytes: a header of plain data, then the arrays as they lie in
memory.

A header is msgpack, which holds data alone: nothing that arrives is ever called.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, cast

import ml_dtypes
import numpy as np

from keras_distribute.errors import ClusterError
from keras_distribute.remote.engine import msgpack

Header = dict[str, Any]
Array = np.ndarray[Any, Any]
LARGEST_FRAME = 32 * 2**20  # What a stranger can make a receiver set aside.
STAYS: Array = np.empty(0, np.uint8)
"""In the place of an array that its task has already, or keeps."""
_MOST_ARRAYS = 2**20
_SMALL, _ALIGNED = 2**15, 8


def encode(header: Header, arrays: Sequence[Any] = ()) -> list[Any]:
    """The frames of a message: the header, the parts of all small arrays together, and
    those of each large one, which are not copied: each frame has a cost of its own.

    Args:
        header: Numbers, strings, bytes, lists and dicts with keys of strings.
        arrays: What NumPy takes as arrays of numbers.
    """
    forms: list[Any] = []
    small: list[Any] = []
    frames: list[Any] = []
    for array in arrays:
        own = np.asarray(array)
        if not own.flags.c_contiguous:
            own = np.ascontiguousarray(own)
        forms.append(form_of(own))
        raw: Any = own.reshape(-1).view(np.uint8)
        if own.nbytes <= _SMALL:
            small += [memoryview(raw), b"\0" * (-own.nbytes % _ALIGNED)]
        else:
            frames += _parts(raw)
    return [msgpack.packb([header, forms]), *_parts(b"".join(small)), *frames]


def _parts(raw: Any) -> list[Any]:
    """Bytes as frames, of which there is one at least."""
    starts = range(0, len(raw) or 1, LARGEST_FRAME)
    return [memoryview(raw)[i : i + LARGEST_FRAME] for i in starts]


def _num_parts(size: int) -> int:
    return -(-size // LARGEST_FRAME) or 1


def decode(frames: Sequence[Any]) -> tuple[Header, list[Array]]:
    """The header and the arrays of a message; arrays may be read-only views of it.

    Raises:
        ClusterError: For frames that are no message.
    """
    try:
        header, forms = msgpack.unpackb(frames[0], max_array_len=_MOST_ARRAYS)
        if not isinstance(header, dict):
            raise TypeError("no header")
        dtypes = [_dtype(name) for name, _ in forms]
        sizes = [
            math.prod(shape) * dtype.itemsize
            for dtype, (_, shape) in zip(dtypes, forms, strict=True)
        ]
        total = sum(size + -size % _ALIGNED for size in sizes if size <= _SMALL)
        count = _num_parts(total)
        small = _joined(frames[1 : 1 + count], total, _dtype("uint8")).data
        arrays, start, left = list[Array](), 0, list(frames[1 + count :])
        for dtype, size, (_, shape) in zip(dtypes, sizes, forms, strict=True):
            if size <= _SMALL:
                parts = [small[start : start + size]]
                start += size + -size % _ALIGNED
            else:
                count = _num_parts(size)
                parts, left = left[:count], left[count:]
            arrays.append(_joined(parts, size, dtype).reshape(shape))
        if left:
            raise ValueError("more than its header says")
    except Exception as error:  # Whatever a stranger can send.
        raise ClusterError(
            "A message that is none was received.",
            received=f"{len(frames)} frames: {error}.",
            fix="run the same version of keras_distribute in all tasks.",
        ) from error
    return cast(Header, header), arrays


def form_of(array: Array) -> list[Any]:
    """The name of an array's dtype, and its shape."""
    return [_name(array.dtype), list(array.shape)]


@functools.lru_cache  # NumPy composes it anew each time.
def _name(dtype: np.dtype[Any]) -> str:
    return dtype.name


@functools.lru_cache
def _dtype(name: str) -> np.dtype[Any]:
    special = getattr(ml_dtypes, name, None)
    dtype = np.dtype(name if special is None else special)
    if dtype.hasobject:
        raise ValueError(f"arrays of {name}")
    return dtype


def _joined(parts: Sequence[Any], size: int, dtype: np.dtype[Any]) -> Array:
    if not parts or sum(map(len, parts)) != size:
        raise ValueError(f"{sum(map(len, parts))} bytes for {size}")
    if len(parts) == 1:
        return np.frombuffer(parts[0], dtype)
    whole, start = np.empty(size, np.uint8), 0
    for part in parts:
        whole[start : start + len(part)] = np.frombuffer(part, np.uint8)
        start += len(part)
    return whole.view(dtype)
