"""What a worker knows of a parameter server: the values that came with its last
answer.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

from keras_distribute.remote.channel import Channel
from keras_distribute.remote.frames import Array, Header

_FRESH_SECONDS = 0.1  # For which values that came with an answer are good for a step.


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What a program reads of one server.

    Attributes:
        keys: Of what it takes as a whole.
        rows: The keys of tables, each with the rows that it takes.
    """

    keys: list[int]
    rows: list[tuple[int, Array]]

    def __bool__(self) -> bool:
        return bool(self.keys or self.rows)

    @property
    def told(self) -> Header:
        """For the header of a question."""
        return {"keys": self.keys, "rows": [key for key, _ in self.rows]}

    @property
    def ids(self) -> list[Array]:
        """The last arrays of a question."""
        return [ids for _, ids in self.rows]


NOTHING = Wanted([], [])


@dataclasses.dataclass
class Pulled:
    """A parameter server as a worker sees it.

    Attributes:
        channel: To ask it.
        version: Of `values`.
        writes: How often the coordinator had written by then.
        values: By their keys; of tables some rows.
        time: When they came.
    """

    channel: Channel
    version: int = -1
    writes: int = -1
    values: dict[int, Array] = dataclasses.field(default_factory=dict[int, Array])
    time: float = 0.0
    _ids: dict[int, Array] = dataclasses.field(default_factory=dict[int, Array])

    def has(self, wanted: Wanted, floor: Sequence[int]) -> bool:
        """Whether it is known what these values are, at least as new as wanted."""
        return (
            time.monotonic() - self.time < _FRESH_SECONDS
            and self.version >= floor[0]
            and self.writes >= floor[1]
            and set(wanted.keys) <= self.values.keys() - self._ids
            and all(self._ids.get(key) is ids for key, ids in wanted.rows)
        )

    def note(self, header: Header, wanted: Wanted, arrays: list[Array]) -> None:
        """Takes the answer to a question for values."""
        self.version, self.writes = header["version"], header["writes"]
        keys = [*wanted.keys, *(key for key, _ in wanted.rows)]
        self.values = dict(zip(keys, arrays, strict=True))
        self._ids = dict(wanted.rows)
        self.time = time.monotonic()
