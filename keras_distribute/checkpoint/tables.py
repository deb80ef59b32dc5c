"""Tables of a checkpoint that nobody may hold as a whole: each is a file of its own, in
NumPy's format, written and read in blocks of rows.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from etils import epath

from keras_distribute.checkpoint.manifest import ArrayRecord, as_bytes
from keras_distribute.variables import Blocks

FOLDER = "tables"


def write(folder: epath.Path, arrays: Mapping[str, Any]) -> dict[str, ArrayRecord]:
    """Writes those of `arrays` that are `Blocks`, and says what was written.

    Args:
        folder: Made if there is any.
    """
    tables = {name: each for name, each in arrays.items() if isinstance(each, Blocks)}
    records: dict[str, ArrayRecord] = {}
    for number, (name, table) in enumerate(tables.items()):
        folder.mkdir(parents=True, exist_ok=True)
        file, checksum = f"{number}.npy", 0
        with (folder / file).open("wb") as out:
            np.lib.format.write_array_header_2_0(out, _header(table))
            for block in table:
                data = as_bytes(block).data
                checksum = zlib.crc32(data, checksum)
                out.write(data)
        records[name] = ArrayRecord(table.shape, table.dtype.name, checksum, file)
    return records


def _header(table: Blocks) -> dict[str, Any]:
    """What NumPy's format says of an array; of one of a type that NumPy does not know,
    as `bfloat16`, it has the bytes.
    """
    shape, descr = table.shape, np.lib.format.dtype_to_descr(table.dtype)
    if table.dtype.kind == "V":
        shape, descr = (*shape, table.dtype.itemsize), "|u1"
    return {"descr": descr, "fortran_order": False, "shape": shape}


def opened(
    folder: epath.Path, records: Mapping[str, ArrayRecord]
) -> tuple[dict[str, Blocks], list[str]]:
    """The tables among some records, every block read; the names of damaged ones."""
    tables: dict[str, Blocks] = {}
    damaged: list[str] = []
    for name, record in records.items():
        if record.file is None:
            continue
        try:
            tables[name] = table = _opened(folder / record.file, record)
            checksum = 0
            for block in table:
                checksum = zlib.crc32(as_bytes(block).data, checksum)
            intact = checksum == record.checksum
        except (OSError, ValueError):
            intact = False
        damaged += [] if intact else [f"{name} ({folder / record.file})"]
    return tables, damaged


def _opened(path: epath.Path, record: ArrayRecord) -> Blocks:
    with path.open("rb") as file:
        np.lib.format.read_magic(file)
        np.lib.format.read_array_header_2_0(file)
        begin = file.tell()
    shape, dtype = record.shape, np.dtype(record.dtype)
    row = int(np.prod(shape[1:], dtype=np.int64)) * dtype.itemsize

    def read(start: int, stop: int) -> np.ndarray[Any, Any]:
        with path.open("rb") as file:
            file.seek(begin + start * row)
            data = file.read((stop - start) * row)
        return np.frombuffer(data, dtype).reshape(stop - start, *shape[1:])

    return Blocks(shape, record.dtype, read)
