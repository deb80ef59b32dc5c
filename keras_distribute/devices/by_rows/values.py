"""What a replica has of a value of the program over all rows."""

from __future__ import annotations

import copy
import dataclasses
import functools
import operator
import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from keras_distribute._compat import jax_internals
from keras_distribute.devices import jaxprs
from keras_distribute.devices.axes import REPLICA_AXIS
from keras_distribute.devices.placement import narrowed

SMALL = 1 << 16
"""The elements of a value up to which it is gathered where an operation mixes rows."""

LARGE = 1 << 18
"""The elements that are to be saved where the rows of a whole sum travel in its place:
they are gathered by two operations, while sums of other values go together.
"""

_SHARDINGS = ("sharding", "out_sharding")
_ADDITIONS = ("add", "add_any")
_DEPTH = 100  # Of operations that are made anew to have a part of their result.


class RowsMixError(Exception):
    """An operation that needs other replicas' rows."""


class MixedRows(Exception):
    """A program that cannot be made one of each replica's rows.

    Args:
        operation: The name of the operation that mixes rows.
        scope: Where it is: the names of Keras's layers, as JAX notes them.
    """

    def __init__(self, operation: str, scope: str) -> None:
        super().__init__(f"{operation} in {scope}" if scope else operation)
        self.operation, self.scope = operation, scope
        names = re.findall(r"[^/()]+", scope)
        self.layer = names[-1] if names else ""

    def inside(self, scope: str) -> MixedRows:
        """The same, called in another place."""
        return MixedRows(self.operation, "/".join(filter(None, (scope, self.scope))))


class SumOverRows(Protocol):
    """A sum over rows of which a replica can make its part from the rows of all."""

    def moved(self, replica: Replica, dim: int | None) -> int | None:
        """The elements that a replica has to be given for its part along a dimension,
        or for all of it; `None` where it cannot be made so.
        """
        ...

    def part(self, replica: Replica, dim: int | None, dtype: Any) -> Any:
        """This replica's part along a dimension, or all of it."""
        ...


@dataclasses.dataclass(eq=False)
class Value:
    """A value of the program over all rows, as a replica has it: the whole value, the
    same on every replica, unless it says otherwise.

    Args:
        array: What the replica has.
        rows: The dimension of which it has its own part: replica 0 the first, and so
            on.
        partial: Whether the value is the sum over the replicas of what they have.
        of_state: Whether its parts are not of the batch's rows, but of state that the
            program takes and returns in parts: gathered wherever it has to be. Or
            whether it was gathered from them.
        origin: Of a whole value, the operation that made it, and its operands.
        over_rows: Of a part of a sum that was made of rows: what adds up to the sum.
        parts: Of a whole value, the parts of it that this replica has, too, by their
            dimension: of state, the one from which the whole was gathered.
        addend: What `Replica.addend` has found out.
    """

    array: Any
    rows: int | None = None
    partial: bool = False
    of_state: bool = False
    origin: tuple[Any, list[Value]] | None = None
    over_rows: tuple[SumOverRows, ...] = ()
    total: Value | None = None
    parts: dict[int, Any] = dataclasses.field(default_factory=dict)
    zero: bool = False
    addend: Any = None

    @property
    def ndim(self) -> int:
        return jnp.ndim(self.array)

    @property
    def is_whole(self) -> bool:
        return self.rows is None and not self.partial

    @property
    def is_part_of_state(self) -> bool:
        return self.of_state and self.rows is not None

    @property
    def settled(self) -> Value:
        """The sum, where it is known already."""
        return self.total if self.partial and self.total is not None else self


Rule = Callable[["Replica", Any, list[Value]], list[Value]]
Slicer = Callable[["Replica", Any, list[Value], int, int], Any]
Scatter = Callable[[Any, int], Any]


class Replica:
    """Evaluates operations on what one replica has, inside a program over all.

    Where the rows do not divide, replicas have equally many all the same: behind the
    true rows there are others, which `gathered` leaves out, and `true_part` makes what
    adds nothing to a sum.

    Args:
        rows: How many true rows all of them have.
        slicers: By the name of an operation: what makes a part of its result.
        scatter: From what a replica gives to a sum, and a dimension, to its part of
            the sum along it; `None` where no state is in parts.
        dtype: In which what is summed so travels; `None` for its own.

    Attributes:
        in_loop: Whether a loop's body is evaluated, or another program inside of it.
    """

    def __init__(
        self,
        count: int,
        rows: int,
        slicers: dict[str, Slicer],
        scatter: Scatter | None = None,
        dtype: Any = None,
    ) -> None:
        self.count, self.rows, self.in_loop = count, rows, False
        self._slicers, self._index = slicers, None
        self._scatter, self._dtype = scatter, dtype
        self._contexts: dict[Any, Any] = {}

    def inside(self) -> Replica:
        """The same replica, for the evaluation of a loop's body."""
        inner = copy.copy(self)
        inner.in_loop, inner._index, inner._contexts = True, None, {}
        return inner

    @property
    def is_even(self) -> bool:
        """Whether the rows divide."""
        return self.rows % self.count == 0

    @property
    def each(self) -> int:
        """The rows of a replica."""
        return -(-self.rows // self.count)

    @property
    def has_state_in_parts(self) -> bool:
        return self._scatter is not None

    def index(self) -> Any:
        """Which replica this is."""
        if self._index is None:
            self._index = lax.axis_index(REPLICA_AXIS)
        return self._index

    def apply(
        self,
        eqn: Any,
        arrays: Sequence[Any],
        rows: int | None = None,
        partial: bool = False,
        **params: Any,
    ) -> list[Value]:
        """The results of an operation for other operands.

        Args:
            rows: The dimension of the results of which they are parts.
            partial: Whether the results are to be summed.
            params: In place of the operation's own.
        """
        eqn = self._moved(eqn.replace(params={**eqn.params, **params}))
        return [
            Value(result, rows, partial) for result in jaxprs.bound(eqn, list(arrays))
        ]

    def same(self, eqn: Any, values: Sequence[Value]) -> list[Value]:
        """The results of an operation on whole values."""
        results = self.apply(eqn, list(map(self.whole, values)))
        for result in results:
            result.origin = eqn, list(values)
        return results

    def whole(self, value: Value) -> Any:
        """The value, the same on every replica.

        Raises:
            RowsMixError: Where that is much to gather.
        """
        if value.is_whole:
            return value.array
        if value.total is None:
            if value.partial:
                total = lax.psum(value.array, REPLICA_AXIS)
            elif value.array.size * self.count > SMALL and not value.of_state:
                raise RowsMixError
            else:
                assert value.rows is not None
                total = self.gathered(value.array, value.rows)
            value.total = Value(total)
        return value.total.array

    def part(self, value: Value, dim: int, depth: int = 0) -> Any:
        """This replica's part of a value along a dimension."""
        if value.rows == dim:
            return value.array
        if value.rows is not None:
            raise RowsMixError
        if dim not in value.parts:
            value.parts[dim] = self._part(value, dim, depth)
        return value.parts[dim]

    def part_or_one(self, value: Value, dim: int, depth: int = 0) -> Any:
        """The part; of what has one element there, which is for all, the whole."""
        is_one = value.ndim == 0 or value.array.shape[dim] == 1
        is_one = is_one and value.rows is None
        return self.whole(value) if is_one else self.part(value, dim, depth)

    def summand(self, value: Value) -> Any:
        """What, summed over the replicas, is a value."""
        if value.partial or value.zero:
            return value.array
        array = self.whole(value)
        return jnp.where(self.index() == 0, array, jnp.zeros_like(array))

    def state_whole(self, value: Value) -> Value:
        """A value, whole if it is state in parts."""
        if not value.is_part_of_state:
            return value
        assert value.rows is not None
        own = {value.rows: value.array}
        return Value(self.whole(value), of_state=True, parts=own)

    def part_of_state(self, value: Value, dim: int) -> Value:
        """The part of a value that replaces state in parts, or its gradient: what is to
        be summed is scattered.
        """
        if value.rows is not None:
            if value.rows == dim or not value.of_state:
                return value
            value = Value(self.whole(value))
        if value.partial or _adds_parts(value):
            part_of_rows = self.sum_of_rows(value, dim)
            if part_of_rows is None:
                own = self.addend(value)
                part = self.scattered(self.narrow(own), dim).astype(own.dtype)
            else:
                part = part_of_rows()
            return Value(part, dim, of_state=True)
        return Value(self.part(value, dim), dim, of_state=True)

    def scattered(self, own: Any, dim: int) -> Any:
        """This replica's part, along a dimension, of the sum of what all have."""
        assert self._scatter is not None
        return self._scatter(own, dim)

    def narrow(self, own: Any) -> Any:
        """What is to be summed, in the dtype in which it travels."""
        return narrowed(own, self._dtype)

    def gathered(self, array: Any, dim: int) -> Any:
        """The parts of all replicas along a dimension."""
        if array.dtype == jnp.bool_:
            return self.gathered(array.astype("int8"), dim).astype(bool)
        every = lax.all_gather(array, REPLICA_AXIS, axis=dim, tiled=True)
        if self.is_even:
            return every
        return lax.slice_in_dim(every, 0, self._true_size(array, dim), axis=dim)

    def true_part(self, array: Any, dim: int, filling: Any = 0) -> Any:
        """What a replica has along a dimension, with a filling in the place of what is
        behind the true rows.
        """
        if self.is_even:
            return array
        own = array.shape[dim]
        place = self.index() * own + lax.broadcasted_iota("int32", array.shape, dim)
        is_true = place < self._true_size(array, dim)
        return jnp.where(is_true, array, jnp.asarray(filling, array.dtype))

    def _true_size(self, array: Any, dim: int) -> int:
        """What all replicas have along a dimension of which this is a part."""
        return array.shape[dim] // self.each * self.rows

    def exchanged(self, array: Any, split: int, joined: int) -> Any:
        """What is whole along one dimension and a part along another, the other way."""
        return lax.all_to_all(array, REPLICA_AXIS, split, joined, tiled=True)

    def addend(self, value: Value, depth: int = 0) -> Any:
        """The same, from the parts of what was summed to make the value: the gradient
        of a loss and that of a penalty, say.
        """
        if value.addend is None:
            value.addend = self._addend(value, depth)
        return value.addend

    def _addend(self, value: Value, depth: int) -> Any:
        terms = _terms(value) if depth < _DEPTH else []
        if value.origin and any(v.partial or v.origin is not None for v in terms):
            arrays = [self.addend(term, depth + 1) for term in terms]
            return self.apply(value.origin[0], arrays)[0].array
        return self.summand(value)

    def divided(self, size: int) -> int:
        """A replica's part of a dimension.

        Raises:
            RowsMixError: Where it does not divide.
        """
        if not self.divides(size):
            raise RowsMixError
        if self.is_even:
            return size // self.count
        return size // self.rows * self.each

    def divides(self, size: int) -> bool:
        """Whether a dimension can be divided: over the replicas, or, where the rows
        cannot, as they are.
        """
        if self.is_even:
            return size % self.count == 0
        return size > 0 and size % self.rows == 0

    def divided_at(self, shape: Sequence[int], dim: int) -> tuple[int, ...]:
        """A shape, with one dimension divided."""
        sizes = list(shape)
        sizes[dim] = self.divided(sizes[dim])
        return tuple(sizes)

    def _moved(self, eqn: Any) -> Any:
        """An operation, and the programs that it holds, as it is traced here."""
        params = {
            name: None if name in _SHARDINGS else value  # With the replicas' axis.
            for name, value in eqn.params.items()
        }
        eqn = eqn.replace(params=params, ctx=self._here(eqn.ctx))
        return jaxprs.with_programs(
            eqn, lambda held: jaxprs.traced_again(held, self._moved)
        )

    def _here(self, context: Any) -> Any:
        """What JAX notes of the place where an operation is traced: the mesh is another
        one in the program of one replica.
        """
        if context not in self._contexts:
            self._contexts[context] = jax_internals.traced_here(context)
        return self._contexts[context]

    def _part(self, value: Value, dim: int, depth: int) -> Any:
        whole = self.whole(value)
        size = self.divided(jnp.shape(whole)[dim])
        if value.origin is not None and depth < _DEPTH:
            eqn, operands = value.origin
            slicer = self._slicers.get(eqn.primitive.name)
            if slicer is not None:
                try:
                    return slicer(self, eqn, operands, dim, depth + 1)
                except RowsMixError:  # It has parts along another dimension.
                    pass
        return self.sliced(whole, size, dim)

    def sliced(self, whole: Any, size: int, dim: int) -> Any:
        """This replica's part of an array along a dimension, of that size."""
        missing = size * self.count - jnp.shape(whole)[dim]
        if missing:
            last = lax.slice_in_dim(whole, -1, None, axis=dim)
            copies = jnp.repeat(last, missing, axis=dim)
            whole = jnp.concatenate([whole, copies], axis=dim)
        return lax.dynamic_slice_in_dim(whole, self.index() * size, size, dim)

    def sum_of_rows(self, value: Value, dim: int | None) -> Callable[[], Any] | None:
        """What makes this replica's part of a sum over rows, or all of it, where these
        are less to move than the sum itself.
        """
        moved = [each.moved(self, dim) for each in value.over_rows]
        if not moved or any(elements is None for elements in moved):
            return None
        few, size = sum(filter(None, moved)), value.array.size
        if not are_few(few, size) or (dim is None and size - few < LARGE):
            return None

        def summed() -> Any:
            dtype = value.array.dtype
            parts = [each.part(self, dim, dtype) for each in value.over_rows]
            return functools.reduce(operator.add, parts)

        return summed


def _terms(value: Value) -> list[Value]:
    """What a whole value was added up from; nothing, if it was not."""
    if value.origin is None or value.origin[0].primitive.name not in _ADDITIONS:
        return []
    return value.origin[1]


def _adds_parts(value: Value) -> bool:
    """Whether a whole value was made by additions, of parts of sums too."""
    left = [value]
    for _ in range(_DEPTH):
        if not left:
            break
        terms = _terms(left.pop())
        if any(term.partial for term in terms):
            return True
        left += terms
    return False


def are_few(moved: int, whole: int) -> bool:
    """Whether rows are to be moved to the parts of a value, not the value to the rows.
    At least half of the elements are to be saved: a value can be gathered while
    another layer is computed, rows cannot.
    """
    return 2 * moved <= whole


def common_rows(values: Sequence[Value]) -> int | None:
    """The dimension of which a replica has its part of all values that are divided;
    `None` if none is.

    Raises:
        RowsMixError: Where it is not the same.
    """
    dims = {value.rows for value in values if value.rows is not None}
    refuse(len(dims) > 1)
    return next(iter(dims), None)


def refuse(mixes: bool) -> None:
    """Raises `RowsMixError` where an operation mixes rows."""
    if mixes:
        raise RowsMixError


def literal(atom: core.Literal) -> Value:
    """A number that stands in the program."""
    aval: Any = atom.aval
    array = np.asarray(atom.val, aval.dtype)
    return Value(array, zero=not array.any())


def is_zero(eqn: Any, operands: Sequence[Value]) -> bool:
    """Whether an operation makes nothing but zeros."""
    return eqn.primitive.name in ("broadcast_in_dim", "copy") and operands[0].zero
