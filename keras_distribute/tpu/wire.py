"""TensorFlow's `TopologyProto` in bytes, written and read without TensorFlow.

The fields are those of `tensorflow/core/protobuf/tpu/topology.proto`: lists of `int32`
under 1 (the shape of the mesh) and 4 (the coordinates), numbers under 2 (tasks) and 3
(devices a task). The encoding is protocol buffers' own:
https://protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

from collections.abc import Iterator

from keras_distribute.errors import DeviceError

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_LISTS, _NUMBERS = (1, 4), (2, 3)


def encoded(
    shape: list[int], num_tasks: int, devices_per_task: int, coordinates: list[int]
) -> bytes:
    """The bytes of a topology; numbers that are 0 and empty lists are left out, as
    protocol buffers do.
    """
    parts: list[bytes] = []
    for field, value in (
        (1, shape),
        (2, num_tasks),
        (3, devices_per_task),
        (4, coordinates),
    ):
        if isinstance(value, list) and value:
            packed = b"".join(map(_varint, value))
            parts.append(_varint(field << 3 | _BYTES) + _varint(len(packed)) + packed)
        elif not isinstance(value, list) and value:
            parts.append(_varint(field << 3 | _VARINT) + _varint(value))
    return b"".join(parts)


def decoded(data: bytes) -> tuple[list[int], int, int, list[int]]:
    """What `encoded` took.

    Raises:
        DeviceError: For bytes that are no topology.
    """
    lists: dict[int, list[int]] = {field: [] for field in _LISTS}
    numbers = dict.fromkeys(_NUMBERS, 0)
    try:
        for field, value in _fields(data):
            if field in lists:
                lists[field] += (
                    [value] if isinstance(value, int) else list(_varints(value))
                )
            elif field in numbers and isinstance(value, int):
                numbers[field] = value
    except (IndexError, ValueError) as error:
        raise DeviceError(
            "These bytes are no serialized topology.",
            received=f"{len(data)} bytes.",
            fix="pass what Topology.serialized() returned.",
        ) from error
    return lists[1], numbers[2], numbers[3], lists[4]


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    at = 0
    while at < len(data):
        key, at = _read(data, at)
        kind = key & 7
        if kind == _VARINT:
            value, at = _read(data, at)
            yield key >> 3, _signed(value)
            continue
        size = {_FIXED64: 8, _FIXED32: 4}.get(kind)
        if kind == _BYTES:
            size, at = _read(data, at)
        if size is None or at + size > len(data):
            raise ValueError("the end of a field is missing")
        yield key >> 3, data[at : at + size]
        at += size


def _varints(data: bytes) -> Iterator[int]:
    at = 0
    while at < len(data):
        value, at = _read(data, at)
        yield _signed(value)


def _read(data: bytes, at: int) -> tuple[int, int]:
    """The number that begins at `at`, seven bits a byte, and where it ends."""
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


def _varint(value: int) -> bytes:
    value &= (1 << 64) - 1  # A negative number is that of 64 bits.
    result = bytearray()
    while value >= 0x80:
        result.append(value & 0x7F | 0x80)
        value >>= 7
    result.append(value)
    return bytes(result)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
