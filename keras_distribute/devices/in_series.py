"""Programs of more replicas than devices: each device runs its replicas one after the
other. Knows no Keras.

The traced program of one replica is cut where the replicas communicate. What is the
same on every replica is computed once on each device; everything else between two
communications is the body of a loop over the device's replicas, whose values that are
needed later are stacked, or added up. So a replica's part is compiled as one
computation of its own shapes, with nothing around it that depends on the number of
devices, and sums over the replicas follow one binary tree, on each device (`_in_pairs`)
and over them (`collectives.py`): the results have the same bits on any number of
devices.

What is computed once is a loop of one turn: XLA compiles each body of a loop by itself.
It must not know the length of a loop, or it would take apart one of a single turn, and
fuse what is in it with what is around it. A step's new weights take the memory of the
old ones on the way through it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from keras_distribute.devices import own_index, unknown
from keras_distribute.devices.collectives import added, summed, total_of_devices
from keras_distribute.devices.communication import Communication
from keras_distribute.devices.flat_arrays import (
    Form,
    entering,
    flattened,
    form_of,
    formed,
    of_several,
)
from keras_distribute.devices.jaxprs import bound
from keras_distribute.devices.levels import Levels, Operation
from keras_distribute.devices.series import Series, Value


def run(
    series: Series, program: core.ClosedJaxpr, inputs: Sequence[Value], zero: Any
) -> list[Value]:
    """The outputs of a replica's program on this device, inside a program over
    all devices.

    Args:
        program: Of one replica, with an axis of all replicas, as `merging` leaves it.
        inputs: What the device's replicas get.
        zero: As the compiler does not know it (`unknown.zero`).

    Raises:
        ContextError: For a communication that is none over all replicas.
    """
    levels = Levels(program, [value.is_equal for value in inputs])
    part = _Part(series, levels, inputs, zero)
    for level in range(levels.count):
        part.compute_equal(level)
        part.loop(level)
        part.communicate(level)
    return [part.value(number) for number in levels.outputs]


class _Part:
    """What of a program one device does, and the values that it knows."""

    def __init__(
        self, series: Series, levels: Levels, inputs: Sequence[Value], zero: Any
    ) -> None:
        self._series, self._levels, self._zero = series, levels, zero
        self._known = dict(zip(levels.inputs, inputs, strict=True))
        for number, array in levels.arrays.items():
            self._known[number] = Value(unknown.array(array, zero), True)
        self._stacks: dict[int, Any] = {}
        self._totals: dict[int, Any] = {}  # Of the device's replicas, for sums.

    def compute_equal(self, level: int) -> None:
        """Does what is the same on every replica, once."""
        operations, leaving = self._levels.at("once", level)
        if not operations:
            return
        given = {n: self._known[n].array for n in self._levels.taken(operations)}
        replaced = self._levels.replaced
        old = {n: replaced[n] for n in leaving if replaced.get(n) in given}
        stay = {n: entering(a) for n, a in given.items() if n not in old.values()}
        others = [number for number in leaving if number not in old]
        forms: dict[int, Form] = {}

        def turn(_: Any, carry: tuple[list[Any], list[Any]]) -> Any:
            own = {n: formed(flat, form_of(given[n])) for n, flat in stay.items()}
            own.update(zip(old.values(), carry[0], strict=True))
            self._compute(operations, own)
            forms.update((number, form_of(own[number])) for number in others)
            return [own[n] for n in old], [flattened(own[n]) for n in others]

        begin = [given[n] for n in old.values()], self._zeros(others)
        new, flat = lax.fori_loop(0, 1 + self._zero, turn, begin)
        results = dict(zip(old, new, strict=True))
        for number, array in zip(others, flat, strict=True):
            results[number] = formed(array, forms[number])
        self._known.update((n, Value(array, True)) for n, array in results.items())

    def loop(self, level: int) -> None:
        """Does what is each replica's own, one replica after the other."""
        operations, _ = self._levels.at("each", level)
        if not operations:
            return
        taken = self._levels.taken(operations)
        stacked, added_up = self._levels.kept(level), self._levels.summed(level)
        first, each = self._series.first, self._series.each
        given = [self._known[number] for number in taken]
        entered = [
            entering(value.array) if value.is_equal else self._stack(number)
            for number, value in zip(taken, given, strict=True)
        ]
        forms: dict[int, Form] = {}

        def turn(j: Any, stacks: list[Any]) -> tuple[list[Any], list[Any]]:
            own: dict[int, Any] = {}
            for number, value, flat in zip(taken, given, entered, strict=True):
                form = form_of(value.array)
                if not value.is_equal:
                    form = dataclasses.replace(form, shape=form.shape[1:])
                    size = (flat.size - 1) // each
                    flat = lax.dynamic_slice(flat, (j * size,), (size,))
                own[number] = formed(flat, form)
            self._compute(operations, own, first + j)
            forms.update((number, form_of(own[number])) for number in stacked)
            rows = [flattened(own[number]) for number in stacked]
            stacks = [
                lax.dynamic_update_slice(stack, row, (j * row.size,))
                for stack, row in zip(stacks, rows, strict=True)
            ]
            summands = (flattened(own[number]) for number in added_up)
            return stacks, [unknown.rounded(flat, self._zero) for flat in summands]

        none = [of_several(jnp.tile(z, each)) for z in self._zeros(stacked)]
        avals = [self._levels.avals[number] for number in added_up]
        stacks, totals = _in_pairs(turn, each, self._zero, none, avals)
        for number, flat in zip(stacked, stacks, strict=True):
            form = forms[number]
            form = dataclasses.replace(form, shape=(each, *form.shape))
            self._stacks[number] = flat
            self._known[number] = Value(formed(flat[:-1], form), False)
        self._totals = dict(zip(added_up, totals, strict=True))

    def communicate(self, level: int) -> None:
        """Does what the replicas do together, and what holds it."""
        self._sum(self._levels.at("sum", level)[0])
        together = Communication(
            self._series,
            lambda program, inputs: run(self._series, program, inputs, self._zero),
        )
        for op in self._levels.at("together", level)[0]:
            results = together(op.eqn, list(map(self.value, op.inputs)))
            self._known.update(zip(op.outputs, results, strict=True))

    def value(self, number: int) -> Value:
        """A value that is known, or made of what is."""
        if number not in self._known:
            own = {n: self._known[n].array for n in self._levels.needs([number])}
            self._known[number] = Value(self._read(number, own), True)
        return self._known[number]

    def _sum(self, operations: Sequence[Operation]) -> None:
        """Adds up over the replicas, all of a dtype at once."""
        levels, sums = self._levels, dict[int, list[int]]()
        for op in operations:
            for number, total in zip(op.inputs, op.outputs, strict=True):
                sums.setdefault(number, []).append(total)
        totals, self._totals = self._totals, {}
        of_dtypes: dict[Any, list[int]] = {}
        for number, total in totals.items():
            of_dtypes.setdefault(total.dtype, []).append(number)
        for numbers in of_dtypes.values():
            joint = self._joint([totals[number] for number in numbers])
            whole, begin = levels.number(joint), 0
            self._known[whole] = Value(total_of_devices(self._series, joint), True)
            for number in numbers:
                part = levels.part(whole, begin, number)
                levels.light.update(dict.fromkeys(sums[number], part))
                begin += totals[number].size
        others = [number for number in sums if number not in totals]
        values = summed(self._series, [self.value(number) for number in others])
        for number, value in zip(others, values, strict=True):
            self._known.update(dict.fromkeys(sums[number], value))

    def _joint(self, totals: Sequence[Any]) -> Any:
        """Flat arrays, one after the other in one that any number of devices may divide
        among them. XLA fuses a concatenation with what is around, and is then twenty
        times slower on CPUs.
        """
        count, begin = self._series.num_replicas, 0
        size = -(-sum(total.size for total in totals) // count) * count
        joint = jnp.zeros(size, totals[0].dtype)
        for total in totals:
            joint = lax.dynamic_update_slice(joint, total, (begin,))
            begin += total.size
        return joint

    def _stack(self, number: int) -> Any:
        """The values of the device's replicas as a loop takes them."""
        if number not in self._stacks:
            self._stacks[number] = of_several(flattened(self._known[number].array))
        return self._stacks[number]

    def _zeros(self, numbers: Sequence[int]) -> list[Any]:
        avals = [self._levels.avals[number] for number in numbers]
        shapes = [jax.eval_shape(flattened, aval) for aval in avals]
        return [jnp.zeros(shape.shape, shape.dtype) for shape in shapes]

    def _compute(
        self,
        operations: Sequence[Operation],
        own: dict[int, Any],
        replica: Any = None,
    ) -> None:
        """Adds the results of operations to what is known inside of a loop."""
        rule = bound
        if replica is not None:
            rule = own_index.with_index(jnp.int32(replica))
        for op in operations:
            results = rule(op.eqn, [self._read(number, own) for number in op.inputs])
            own.update(zip(op.outputs, results, strict=True))

    def _read(self, number: int, own: dict[int, Any]) -> Any:
        """A value inside of a loop, made there if it can be anywhere."""
        if number in self._levels.constants:
            return self._levels.constants[number]
        if number not in own:
            light = self._levels.light[number]
            own[number] = light.made([self._read(n, own) for n in light.inputs])
        return own[number]


def _nothing(aval: Any) -> Any:
    """What something may be added to without a change. Only zero with a sign keeps the
    signs of other zeros.
    """
    return jnp.full(aval.size, -0.0, aval.dtype)


def _in_pairs(
    turn: Callable[[Any, list[Any]], tuple[list[Any], list[Any]]],
    count: int,
    zero: Any,
    stacks: list[Any],
    summands: Sequence[Any],
    begin: Any = 0,
) -> tuple[list[Any], list[Any]]:
    """The turns of `count` replicas, and the sums of what they return along one binary
    tree: those of two, of two such pairs, and so on. Only one turn is compiled, and of
    each round of the tree one sum is in memory.

    Args:
        turn: From the number of a replica of the device, and what replicas before it
            made, to that with what it makes, and what it adds to the sums.
        count: A power of two.
        summands: Shapes and dtypes of what is added up, flat.
        begin: The number of the first replica.
    """

    def one(j: Any, carry: tuple[list[Any], list[Any]]) -> tuple[list[Any], list[Any]]:
        stacks, sums = carry
        if count <= 2:
            stacks, own = turn(begin + j, stacks)
        else:
            half = count // 2
            first = begin + j * half
            stacks, own = _in_pairs(turn, half, zero, stacks, summands, first)
        return stacks, list(map(added, sums, own))

    nothing = [_nothing(aval) for aval in summands]
    return lax.fori_loop(0, min(count, 2) + zero, one, (stacks, nothing))
