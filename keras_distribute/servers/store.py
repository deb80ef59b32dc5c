"""What a parameter server does: keeps values, and updates them by programs that the
coordinator has sent.

One thread does all, so updates have one order, in which the log tells of them. What is
pushed is a gradient, or what is added; a step of a function counts once, whoever
pushes it again.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from keras_distribute.devices.exports import platform_of
from keras_distribute.errors import ReplacedWorkerError
from keras_distribute.remote.endpoint import Answer
from keras_distribute.remote.frames import Array, Header
from keras_distribute.servers.programs import loaded
from keras_distribute.servers.task import Task


@dataclasses.dataclass(frozen=True)
class Update:
    """An optimizer's update of some weights: from its state, the weights and their
    gradients to the new state and weights.

    Args:
        programs: Of arrays; each with how many rows every gradient has at most, `None`
            for one that is whole. The ones for fewer rows come first.
        keys: Of the state and the weights.
        rows: For each of those, which gradient's rows are taken of it; `None` for all.
    """

    programs: list[tuple[list[int | None], Callable[..., Any]]]
    keys: list[int]
    rows: list[int | None]

    def fitting(self, counts: Sequence[int]) -> tuple[list[int | None], Any]:
        """The program for as few rows as possible."""
        for sizes, program in self.programs:
            most = (size for size in sizes if size is not None)
            if all(map(operator.le, counts, most)):
                return sizes, program
        raise AssertionError("more rows than a call looks up at most")


def update_of(header: Header, blobs: Sequence[Any]) -> Update:
    """The update that a message of the coordinator holds."""
    programs = list(zip(header["sizes"], map(loaded, blobs), strict=True))
    return Update(programs, header["keys"], header["rows"])


class Values(dict[int, Any]):
    """Values by their keys, and how optimizers update them. What an update has made
    stays an array of JAX, which the next update takes as it is.

    Attributes:
        updates: By their numbers.
    """

    def __init__(self, values: Mapping[int, Any] | None = None) -> None:
        super().__init__(values or {})
        self.updates: dict[int, Update] = {}

    def apply(self, push: Mapping[str, Any], arrays: Sequence[Array]) -> None:
        """Does what is pushed: updates by gradients, additions, and new values."""
        left = list(arrays)
        for number in push["updates"]:
            self._optimize(self.updates[number], left)
        for key in push["adds"]:
            old, change = np.asarray(self[key]), left.pop(0)
            self[key] = new = np.asarray(old + change, old.dtype)
            new.flags.writeable = False  # Sent without a copy.
        for key in push["sets"]:
            self[key] = left.pop(0)

    def _optimize(self, update: Update, left: list[Array]) -> None:
        """Applies the first of the arrays that are left, which are the gradients."""
        given: list[Array] = []
        ids: dict[int, Array] = {}
        for i, size in enumerate(update.programs[0][0]):
            if size is not None:
                ids[i] = left.pop(0)
            given.append(left.pop(0))
        sizes, program = update.fitting([len(own) for own in ids.values()])
        gradients = list(map(_padded, given, sizes))
        values: list[Any] = []
        for key, gradient in zip(update.keys, update.rows, strict=True):
            if gradient is None:
                values.append(self[key])
            else:
                own, size = ids[gradient], sizes[gradient]
                values.append(_rows(np.asarray(self[key]), own, size))
        new = program(*values, *gradients)
        for key, gradient, value in zip(update.keys, update.rows, new, strict=True):
            if gradient is None:
                self[key] = value
            else:
                own, rows = ids[gradient], _as_items(np.asarray(value))
                # An assignment by index would take twice as long.
                _as_items(self.changing(key)).put(own, rows[: len(own)])

    def sent(self, key: int, rows: slice | None = None) -> Array:
        """A value, or rows of it, to be sent: of a table a copy, since its rows may
        change in place before the message has gone.
        """
        value = np.asarray(self[key])
        value = value if rows is None else value[rows]
        return value.copy() if value.flags.writeable else value

    def changing(self, key: int) -> Array:
        """A table, to change rows of it."""
        table = self[key]
        if not isinstance(table, np.ndarray) or not table.flags.writeable:
            table = self[key] = np.array(table)
        return table


def _as_items(rows: Array) -> Array:
    """Each row as one item: NumPy writes those in half the time."""
    size = math.prod(rows.shape[1:]) * rows.itemsize
    return np.ndarray(len(rows), f"V{size}", rows.view(np.uint8))


def _padded(rows: Array, size: int | None) -> Array:
    if size is None or len(rows) == size:
        return rows
    whole = np.zeros((size, *rows.shape[1:]), rows.dtype)
    whole[: len(rows)] = rows
    return whole


def _rows(table: Array, ids: Array, size: int | None) -> Array:
    """Rows of a table, and zeros after them."""
    assert size is not None
    whole = np.empty((size, *table.shape[1:]), table.dtype)
    # They are rows of it; to say what to do otherwise spares a copy.
    np.take(table, ids, 0, whole[: len(ids)], "clip")
    whole[len(ids) :] = 0
    return whole


class Store(Task):
    """The values of one server.

    Attributes:
        version: How many pushes were applied.
        traffic: The bytes of all arrays that came and went.
    """

    kind = "parameter server"

    def __init__(self) -> None:
        super().__init__()
        self._empty()

    def _empty(self) -> None:
        self.version = self._writes = self.traffic = 0
        self._values = Values()
        self._applied: dict[int, set[int]] = {}
        self._done = 0
        self._incarnations: dict[int, int] = {}
        self._log: list[list[Any]] = []
        self._is_logged = False

    def handle(self, header: Header, arrays: list[Array]) -> Answer:
        answer = super().handle(header, arrays)
        if answer is not None:
            self.traffic += sum(array.nbytes for array in (*arrays, *answer[1]))
        return answer

    def _begin(self, header: Header, arrays: list[Array]) -> Answer:
        """Of a coordinator that starts: its checkpoint says what the values are."""
        self._empty()
        return {"platform": platform_of(jax.local_devices()[0])}, []

    def _set(self, header: Header, arrays: list[Array]) -> Answer:
        self._values.update(zip(header["keys"], arrays, strict=True))
        self._writes += 1
        if self._is_logged:
            self._log.append(["set", self._writes])
        return self._state(), []

    def _draw(self, header: Header, arrays: list[Array]) -> Answer:
        """Draws rows of a table, in blocks of which each has a key of its own."""
        start, stop, rows = header["start"], header["stop"], header["rows"]
        shape, dtype = (stop - start, *header["shape"]), np.dtype(header["dtype"])
        if header["fill"] is not None:
            table = np.full(shape, header["fill"], dtype)
        else:
            block, key = loaded(arrays[0]), arrays[1]
            table = np.empty(shape, dtype)
            for number in range(start // rows, -(-stop // rows)):
                drawn = np.asarray(block(key, np.uint32(number)))
                first = number * rows
                own = drawn[max(start - first, 0) : stop - first]
                at = max(first - start, 0)
                table[at : at + len(own)] = own
        self._values[header["key"]] = table
        self._writes += 1
        return self._state(), []

    def _pull(self, header: Header, arrays: list[Array]) -> Answer:
        return self._state(), self._wanted(header, arrays)

    def _pull_rows(self, header: Header, arrays: list[Array]) -> Answer:
        """Some rows of a table, one after the other."""
        rows = slice(*header["rows"])
        return self._state(), [self._values.sent(header["key"], rows)]

    def _set_rows(self, header: Header, arrays: list[Array]) -> Answer:
        """Rows of a table told in blocks, in order: there is never a second table."""
        key, first = header["key"], header["first"]
        if not first:
            self._values.pop(key, None)
            dtype = np.dtype(jnp.dtype(header["dtype"]))
            self._values[key] = np.empty(header["shape"], dtype)
        self._values[key][first : first + len(arrays[0])] = arrays[0]
        self._writes += 1
        return self._state(), []

    def _wanted(self, header: Header, ids: Sequence[Array]) -> list[Array]:
        """What a worker asks for: whole values, and rows of tables."""
        values, asked = self._values, zip(header.get("rows", []), ids, strict=True)
        return [
            *map(values.sent, header["keys"]),
            *(np.asarray(values[key]).take(own, 0) for key, own in asked),
        ]

    def _program(self, header: Header, arrays: list[Array]) -> Answer:
        self._values.updates[header["id"]] = update_of(header, arrays)
        return {}, []

    def _drop(self, header: Header, arrays: list[Array]) -> Answer:
        """Drops values, and programs of updates, that nobody asks for any more."""
        for key in header["keys"]:
            self._values.pop(key, None)
        for number in header["programs"]:
            self._values.updates.pop(number, None)
        return self._state(), []

    def _fence(self, header: Header, arrays: list[Array]) -> Answer:
        """From now on pushes of a worker's earlier lives are refused."""
        self._incarnations[header["worker"]] = header["incarnation"]
        return {}, []

    def _push(self, header: Header, arrays: list[Array]) -> Answer:
        worker, closure, step = header["worker"], header["closure"], header["step"]
        if header["incarnation"] < self._incarnations.get(worker, 0):
            raise ReplacedWorkerError(
                f"The worker {worker} was given up, and another one has its work.",
                received=f"a push of its life {header['incarnation']}.",
                fix="nothing: the worker is taken again by itself.",
            )
        self._forget(header["done"])
        bound = header.get("bound")
        steps = self._applied.setdefault(closure, set())
        stale = bound is not None and self.version - header["pulled"] > bound
        if closure >= self._done and step not in steps and not stale:
            self._values.apply(header, arrays)
            steps.add(step)
            self.version += 1
            if self._is_logged:
                pulled = header["pulled_of_all"]
                self._log.append(["push", closure, step, worker, pulled])
        elif step in steps:
            stale = False
        ids = arrays[len(arrays) - len(header["rows"]) :]
        return {**self._state(), "stale": stale}, self._wanted(header, ids)

    def _forget(self, done: int) -> None:
        """Drops what is known of functions below a number: all have returned."""
        if done > self._done:
            self._done = done
            for closure in [each for each in self._applied if each < done]:
                del self._applied[closure]

    def _state(self) -> Header:
        return {"version": self.version, "writes": self._writes}

    def _keep_log(self, header: Header, arrays: list[Array]) -> Answer:
        """Begins to keep a log, or ends that, with the log, as often as it is asked."""
        self._is_logged = header["keep"]
        if self._is_logged:
            self._log = []
        return {"log": self._log, **self._state()}, []

    def _status(self, header: Header, arrays: list[Array]) -> Answer:
        size = sum(value.nbytes for value in self._values.values())
        return {
            **self._state(),
            "values": len(self._values),
            "bytes": size,
            "traffic": self.traffic,
        }, []


Store.operations = {
    "begin": Store._begin,
    "set": Store._set,
    "draw": Store._draw,
    "pull": Store._pull,
    "pull_rows": Store._pull_rows,
    "set_rows": Store._set_rows,
    "program": Store._program,
    "drop": Store._drop,
    "fence": Store._fence,
    "push": Store._push,
    "log": Store._keep_log,
    "status": Store._status,
    "end": Task.end,
}
