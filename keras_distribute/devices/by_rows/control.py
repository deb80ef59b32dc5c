"""Operations that hold programs: calls, loops, conditions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from keras_distribute._compat import jax_internals
from keras_distribute.devices import jaxprs
from keras_distribute.devices.axes import REPLICA_AXIS
from keras_distribute.devices.by_rows.values import (
    MixedRows,
    Replica,
    RowsMixError,
    Value,
)

Run = Callable[[core.ClosedJaxpr, Sequence[Value], Replica], list[Value]]


@dataclasses.dataclass(frozen=True)
class Kind:
    """What a replica has of a value, whatever the value."""

    rows: int | None = None
    partial: bool = False
    of_state: bool = dataclasses.field(default=False, compare=False)

    @staticmethod
    def of(value: Value) -> Kind:
        return Kind(value.rows, value.partial, value.of_state)

    @staticmethod
    def unsummed(value: Value) -> Kind:
        """The same, of the sum."""
        return Kind(value.rows, of_state=value.of_state)

    def of_array(self, array: Any) -> Value:
        return Value(array, self.rows, self.partial, self.of_state)

    def joined(self, other: Kind) -> Kind:
        """What both can be made."""
        if self == other or other == WHOLE:
            return self
        if self == WHOLE:
            return other
        if self.partial and other.partial:
            return self
        raise RowsMixError

    def made(self, replica: Replica, value: Value) -> Any:
        """A value's array, in this kind."""
        if self.rows is not None:
            return replica.part(value, self.rows)
        return replica.summand(value) if self.partial else replica.whole(value)


WHOLE, SUM = Kind(), Kind(partial=True)


class Control:
    """The rules of operations that hold programs."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def cond(self, replica: Replica, eqn: Any, values: list[Value]) -> list[Value]:
        """A choice that is the same on all replicas."""
        index, *operands = values
        # A branch may be the only one that sums a part.
        given = list(map(Kind.of, operands))
        arrays = [
            kind.made(replica, v) for kind, v in zip(given, operands, strict=True)
        ]
        branches = eqn.params["branches"]
        kinds = [
            self._kinds(replica, branch, given, arrays, sums=False)
            for branch in branches
        ]
        results = [_joined(each) for each in zip(*kinds, strict=True)]
        functions = [
            self._function(replica, branch, given, results) for branch in branches
        ]
        found = lax.switch(replica.whole(index), functions, *arrays)
        return [k.of_array(a) for k, a in zip(results, found, strict=True)]

    def mapped(self, replica: Replica, eqn: Any, values: list[Value]) -> list[Value]:
        """A program that is mapped over the replicas is each one's own already."""
        found = jax_internals.mapped_program(eqn.params, REPLICA_AXIS)
        if found is None:
            raise RowsMixError
        program, taken, made = found
        arrays = [
            replica.whole(value) if dim is None else replica.part(value, dim)
            for value, dim in zip(values, taken, strict=True)
        ]
        results = core.jaxpr_as_fun(core.ClosedJaxpr(program, ()))(*arrays)
        return [Value(array, dim) for array, dim in zip(results, made, strict=True)]

    def scan(self, replica: Replica, eqn: Any, values: list[Value]) -> list[Value]:
        """A loop of a known length."""
        params, body = eqn.params, eqn.params["jaxpr"]
        num_consts, num_carry = jaxprs.scan_counts(eqn)
        begin = values[num_consts : num_consts + num_carry]
        sliced = values[num_consts + num_carry :]
        consts = [Kind.unsummed(v) for v in values[:num_consts]]
        fixed = [
            k.made(replica, v) for k, v in zip(consts, values[:num_consts], strict=True)
        ]
        length = params["length"]
        own = _is_over_rows(sliced, num_carry, consts)
        if own:
            length = replica.divided(length)
            xs, taken = [replica.part(v, 0) for v in sliced], [WHOLE] * len(sliced)
        else:
            outer = [Kind.unsummed(v) for v in sliced]
            xs = [k.made(replica, v) for k, v in zip(outer, sliced, strict=True)]
            taken = [Kind(k.rows - 1) if k.rows else WHOLE for k in outer]

        def made_of(carry: list[Kind]) -> list[Kind]:
            shapes = [
                *fixed,
                *(_local(replica, v, k) for v, k in zip(begin, carry, strict=True)),
                *(jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in xs),
            ]
            return self._kinds(replica, body, [*consts, *carry, *taken], shapes)

        carry, made = _carried(begin, made_of)
        function = self._function(
            replica, body, [*consts, *carry, *taken], [*carry, *made]
        )

        def step(arrays: Any, x: Any) -> Any:
            results = function(*fixed, *arrays, *x)
            return results[:num_carry], results[num_carry:]

        last, stacked = lax.scan(
            step,
            [k.made(replica, v) for k, v in zip(carry, begin, strict=True)],
            xs,
            length=length,
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
        return [
            *(k.of_array(a) for k, a in zip(carry, last, strict=True)),
            *(
                Value(a, 0)
                if own
                else Value(a, None if k.rows is None else k.rows + 1, k.partial)
                for k, a in zip(made, stacked, strict=True)
            ),
        ]

    def while_(self, replica: Replica, eqn: Any, values: list[Value]) -> list[Value]:
        """A loop whose length is the same on all replicas."""
        eqn, values = jaxprs.with_one_test(eqn, values)
        params = eqn.params
        num_tested, num_body = params["cond_nconsts"], params["body_nconsts"]
        begin = values[num_tested + num_body :]
        given = list(map(Kind.unsummed, values))
        arrays = [k.made(replica, v) for k, v in zip(given, values, strict=True)]
        tested, fixed = given[:num_tested], given[num_tested : num_tested + num_body]
        carry, body = given[num_tested + num_body :], params["body_jaxpr"]
        outer = arrays[num_tested : num_tested + num_body]
        while True:
            shapes = [
                *outer,
                *(_local(replica, v, k) for v, k in zip(begin, carry, strict=True)),
            ]
            kinds = self._kinds(replica, body, [*fixed, *carry], shapes, sums=False)
            new = [a.joined(b) for a, b in zip(carry, kinds, strict=True)]
            if new == carry:
                break
            carry = new
        test = self._function(replica, params["cond_jaxpr"], [*tested, *carry], [WHOLE])
        step = self._function(replica, body, [*fixed, *carry], carry)
        found = lax.while_loop(
            lambda state: jnp.reshape(test(*arrays[:num_tested], *state)[0], ()),
            lambda state: step(*outer, *state),
            [k.made(replica, v) for k, v in zip(carry, begin, strict=True)],
        )
        return [k.of_array(a) for k, a in zip(carry, found, strict=True)]

    def recomputed(
        self, replica: Replica, eqn: Any, values: list[Value]
    ) -> list[Value]:
        """A forward pass that the backward pass computes again, to save memory."""
        given = [Kind.of(value) for value in values]
        program = core.ClosedJaxpr(eqn.params["jaxpr"], ())
        arrays = [value.array for value in values]
        kinds = self._kinds(replica, program, given, arrays)
        function = self._function(replica, program, given, kinds)
        own = jax.make_jaxpr(function)(*arrays)
        found = eqn.primitive.bind(
            *arrays,
            *own.consts,
            **{**eqn.params, "jaxpr": jaxprs.with_constants_given(own.jaxpr)},
        )
        return [k.of_array(a) for k, a in zip(kinds, found, strict=True)]

    def _kinds(
        self,
        replica: Replica,
        program: core.ClosedJaxpr,
        given: Sequence[Kind],
        arrays: Sequence[Any],
        *,
        sums: bool = True,
    ) -> list[Kind]:
        """What a replica has of the results of a program.

        Args:
            sums: Whether results may be parts of sums.
        """
        kinds: list[Kind] = []

        def traced(*own: Any) -> list[Any]:
            inputs = [k.of_array(a) for k, a in zip(given, own, strict=True)]
            results = self._run(program, inputs, replica.inside())
            kinds[:] = [
                k if sums or not k.partial else WHOLE for k in map(Kind.of, results)
            ]
            return [value.array for value in results]

        jax.make_jaxpr(traced)(
            *(jax.ShapeDtypeStruct(jnp.shape(a), jnp.result_type(a)) for a in arrays)
        )
        return kinds

    def _function(
        self,
        replica: Replica,
        program: core.ClosedJaxpr,
        given: Sequence[Kind],
        wanted: Sequence[Kind],
    ) -> Callable[..., list[Any]]:
        """A program of one replica's arrays, with results of the kinds wanted."""

        def function(*arrays: Any) -> list[Any]:
            own = replica.inside()
            inputs = [k.of_array(a) for k, a in zip(given, arrays, strict=True)]
            results = self._run(program, inputs, own)
            return [k.made(own, v) for k, v in zip(wanted, results, strict=True)]

        return function


def _carried(
    begin: Sequence[Value], made_of: Callable[[list[Kind]], list[Kind]]
) -> tuple[list[Kind], list[Kind]]:
    """What a loop carries, so that a turn can leave it as it gets it, and what else it
    makes.

    Zeros are taken for a sum that begins, such as a gradient's over the turns: its
    parts are summed behind the loop, and not in each turn.

    Args:
        begin: What the first turn gets.
        made_of: From what a turn gets to what it leaves, and what else it makes.
    """
    sums = [v.zero and jnp.issubdtype(v.array.dtype, jnp.inexact) for v in begin]
    carry = [
        SUM if is_sum else Kind.of(v) for v, is_sum in zip(begin, sums, strict=True)
    ]
    pinned = [False] * len(begin)
    while True:
        try:
            left = made_of(carry)
        except (RowsMixError, MixedRows):
            if not any(sums):
                raise
            sums, carry = [False] * len(begin), list(map(Kind.of, begin))
            pinned = [False] * len(begin)
            continue
        new: list[Kind] = []
        for i, (before, after) in enumerate(zip(carry, left, strict=False)):
            if sums[i] and not after.partial:
                sums[i], before, after = False, WHOLE, WHOLE
            # What was a part of a sum, and is whole after a turn, stays whole, or there
            # would be no end.
            pinned[i] |= before.partial and after == WHOLE
            is_whole = pinned[i] and (before.partial or after.partial)
            new.append(WHOLE if is_whole else before.joined(after))
        if new == carry:
            return carry, left[len(begin) :]
        carry = new


def _is_over_rows(
    sliced: Sequence[Value], num_carry: int, consts: Sequence[Kind]
) -> bool:
    """Whether a loop is over the rows, each by itself."""
    if not any(value.rows == 0 for value in sliced):
        return False
    others = any(value.rows not in (0, None) for value in sliced)
    if num_carry or others or any(kind != WHOLE for kind in consts):
        raise RowsMixError
    return True


def _joined(kinds: Sequence[Kind]) -> Kind:
    found = kinds[0]
    for kind in kinds[1:]:
        found = found.joined(kind)
    return found


def _local(replica: Replica, value: Value, kind: Kind) -> jax.ShapeDtypeStruct:
    """The shape that a value's array has in a kind."""
    shape = jnp.shape(value.array)
    if kind.rows is not None and value.rows is None:
        shape = replica.divided_at(shape, kind.rows)
    return jax.ShapeDtypeStruct(shape, jnp.result_type(value.array))
