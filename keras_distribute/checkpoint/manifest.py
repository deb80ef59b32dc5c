"""What a checkpoint says about itself: the names, shapes, types and checksums of all
that it holds. Knows no files.

The array store below has no checksums of the data: a flipped bit in a file would come
back as another weight. So the manifest has one for each array, one for each file that
says where they are, and one for itself. CRC-32 because it finds every burst of up to 32
flipped bits, and costs 50 ms for 200 MB (SHA-256: 110 ms); nobody is expected to forge
a checkpoint.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import zlib
from typing import Any

import numpy as np

from keras_distribute.errors import CheckpointError, DamagedCheckpointError

FORMAT = 1
FALLBACK = (
    "restore another checkpoint; CheckpointManager.restore(fallback=True) finds the "
    "last good one."
)
_STORED_AS_THEY_ARE = frozenset(
    ["bool", "bfloat16", "float16", "float32", "float64", "complex64", "complex128"]
    + [f"{sign}int{size}" for sign in ("", "u") for size in (8, 16, 32, 64)]
)


@dataclasses.dataclass(frozen=True)
class VariableRecord:
    """How a variable was saved.

    Args:
        path: Its path in the process that saved it.
        replicas: How many components its array has along axis 0; `None` for one value.
        aggregation: How the components combine into the value.
        checksum: Of the array, which was divided, as the devices had it.
    """

    path: str
    replicas: int | None = None
    aggregation: str = "none"
    checksum: int | None = None


@dataclasses.dataclass(frozen=True)
class Manifest:
    """All of a checkpoint but its arrays.

    Args:
        variables: By name.
        objects: The encoded states of other objects, by name.
        optimizers: The classes of the optimizers, by name.
        unbuilt: Beginnings of the names of metrics that had no variables yet.
        counter: How many times the `Checkpoint` had been saved.
        step: The step that a `CheckpointManager` saved it for.
        metrics: The numbers given along with it.
        in_between: Whether the next save with a number takes its place.
    """

    variables: dict[str, VariableRecord]
    objects: dict[str, Any]
    optimizers: dict[str, str]
    unbuilt: list[str]
    counter: int
    step: int | None = None
    metrics: dict[str, float] | None = None
    in_between: bool = False


@dataclasses.dataclass(frozen=True)
class ArrayRecord:
    """Shape, type and checksum of one array; for a table in blocks also its file."""

    shape: tuple[int, ...]
    dtype: str
    checksum: int
    file: str | None = None

    @staticmethod
    def of(array: np.ndarray[Any, Any]) -> ArrayRecord:
        return ArrayRecord(array.shape, _dtype_name(array.dtype), checksum(array))


@dataclasses.dataclass(frozen=True)
class FileRecord:
    """Size and checksum of a file; `None` for one of arrays, which have their own."""

    size: int
    checksum: int | None


def checksum(array: np.ndarray[Any, Any]) -> int:
    """CRC-32 of the array's bytes in C order."""
    return zlib.crc32(as_bytes(array).data)


def as_bytes(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The array's memory as a flat array of bytes."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def storable(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The array, or its bytes where the array store does not know its type."""
    known = array.dtype.name in _STORED_AS_THEY_ARE and array.dtype.isnative
    return array if known else as_bytes(array)


def as_recorded(
    stored: np.ndarray[Any, Any], record: ArrayRecord
) -> np.ndarray[Any, Any]:
    """What `storable` was given; `ValueError` or `TypeError` for anything else."""
    dtype = np.dtype(record.dtype)
    if stored.dtype != dtype and stored.dtype == np.uint8:
        stored = stored.view(dtype).reshape(record.shape)
    return stored


def to_bytes(
    manifest: Manifest, arrays: dict[str, ArrayRecord], files: dict[str, FileRecord]
) -> bytes:
    """A file of two lines of JSON: its own checksum, and all else."""
    content = {"format": FORMAT, **dataclasses.asdict(manifest)}
    for kind, records in (("arrays", arrays), ("files", files)):
        content[kind] = {name: dataclasses.asdict(r) for name, r in records.items()}
    line = json.dumps(content).encode()
    return _header(line) + b"\n" + line


def _header(line: bytes) -> bytes:
    return json.dumps({"sha256": hashlib.sha256(line).hexdigest()}).encode()


def from_bytes(
    file: bytes, where: str
) -> tuple[Manifest, dict[str, ArrayRecord], dict[str, FileRecord]]:
    """What `to_bytes` was given.

    Raises:
        DamagedCheckpointError: If a bit of it has changed.
        CheckpointError: If a later version of this package wrote it.
    """
    header, _, line = file.partition(b"\n")
    if header != _header(line):
        raise DamagedCheckpointError(
            f"The file {where!r} is damaged: its checksum is wrong.", fix=FALLBACK
        )
    content = json.loads(line)
    written = content.pop("format")
    if written != FORMAT:
        raise CheckpointError(
            f"The file {where!r} was written by another version of keras_distribute.",
            received=f"format {written}, this version reads format {FORMAT}.",
            fix="pip install --upgrade keras-distribute",
        )
    arrays = {
        name: ArrayRecord(tuple(record.pop("shape")), **record)
        for name, record in content.pop("arrays").items()
    }
    files = {name: FileRecord(**r) for name, r in content.pop("files").items()}
    variables = content.pop("variables").items()
    records = {name: VariableRecord(**record) for name, record in variables}
    return Manifest(records, **content), arrays, files


def _dtype_name(dtype: np.dtype[Any]) -> str:
    """A name that `numpy.dtype` understands; of JAX's small floats only their own."""
    try:
        if np.dtype(dtype.name) == dtype:
            return dtype.name
    except TypeError:
        pass
    return dtype.str
