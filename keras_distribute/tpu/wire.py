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


def encoded(
    shape: list[int], num_tasks: int, devices_per_task: int, coordinates: list[int]
) -> bytes:
    """The bytes of a topology."""
    fields = enumerate((shape, num_tasks, devices_per_task, coordinates), 1)
    return b"".join(_field(number, value) for number, value in fields)


def _field(number: int, value: int | list[int]) -> bytes:
    # Protocol buffers leave out numbers that are 0, and empty lists.
    if not value:
        return b""
    if isinstance(value, int):
        return _varint(number << 3 | _VARINT) + _varint(value)
    packed = b"".join(map(_varint, value))
    return _varint(number << 3 | _BYTES) + _varint(len(packed)) + packed


def decoded(data: bytes) -> tuple[list[int], int, int, list[int]]:
    """What `encoded` took."""
    lists: dict[int, list[int]] = {1: [], 4: []}
    numbers = {2: 0, 3: 0}
    try:
        for field, value in _fields(data):
            if field in lists:
                lists[field] += [value] if isinstance(value, int) else _varints(value)
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
    start = 0
    while start < len(data):
        key, start = _read(data, start)
        kind = key & 7
        if kind in (_VARINT, _BYTES):
            value, start = _read(data, start)
            if kind == _VARINT:
                yield key >> 3, value
                continue
            size = value
        else:
            size = {_FIXED64: 8, _FIXED32: 4}.get(kind, len(data))
        end = start + size
        if not start <= end <= len(data):
            raise ValueError("the end of a field is missing")
        yield key >> 3, data[start:end]
        start = end


def _varints(data: bytes) -> Iterator[int]:
    start = 0
    while start < len(data):
        value, start = _read(data, start)
        yield value


def _read(data: bytes, start: int) -> tuple[int, int]:
    """The number that begins at `start`, seven bits a byte, and where it ends; one of
    64 bits is signed.
    """
    value = shift = 0
    while True:
        byte = data[start]
        value |= (byte & 0x7F) << shift
        start, shift = start + 1, shift + 7
        if byte < 0x80:
            return value - (1 << 64) if value >= 1 << 63 else value, start


def _varint(value: int) -> bytes:
    # A negative number is that of 64 bits.
    value &= (1 << 64) - 1
    result = bytearray()
    while value >= 0x80:
        result.append(value & 0x7F | 0x80)
        value >>= 7
    result.append(value)
    return bytes(result)
