"""Programs of more replicas than devices: each device runs its replicas one after the
other. Knows no Keras.

The traced program of one replica is cut where the replicas communicate. What is the
same on every replica is computed once on each device; everything else between two
communications is the body of a loop over the device's replicas, whose values that are
needed later are stacked. So a replica's part is compiled as one computation of its own
shapes, with nothing around it that depends on the number of devices, and sums over the
replicas follow one binary tree (`collectives.py`): the results have the same bits on
any number of devices.

What is computed once is a branch of a condition: XLA compiles each body of a loop, and
each branch, by itself. It must know neither the length of a loop nor the condition, or
it would take apart a loop of a single turn, or the condition, and fuse what is in it
with what is around it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from keras_distribute.devices import own_index, replication_proof, unknown
from keras_distribute.devices.communication import Communication
from keras_distribute.devices.flat_arrays import (
    Form,
    entering,
    flattened,
    form_of,
    formed,
    is_key,
    of_several,
)
from keras_distribute.devices.jaxprs import bound, evaluated
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
    part = _Part(series, program, inputs, zero)
    for level in range(part.num_levels):
        part.compute_equal(level)
        part.loop(level)
        part.communicate(level)
    return part.outputs()


# What is done again wherever a constant is needed in such a form.
_LIGHT = {"broadcast_in_dim", "convert_element_type", "iota", "reshape", "squeeze"}


@dataclasses.dataclass
class _Operation:
    """An operation on numbered values.

    Args:
        level: How many rounds of communication come before it.
    """

    eqn: Any
    inputs: list[int]
    outputs: list[int]
    level: int = 0


class _Part:
    """A program, taken apart: which of its operations are done once, which for each
    replica, and when.
    """

    def __init__(
        self,
        series: Series,
        program: core.ClosedJaxpr,
        inputs: Sequence[Value],
        zero: Any,
    ) -> None:
        self._series, self._zero = series, zero
        self._known: dict[int, Value] = {}
        self._constants: dict[int, Any] = {}
        self._avals: list[Any] = []
        self._stacks: dict[int, Any] = {}
        self._scalars: dict[Hashable, int] = {}
        numbers = [self._number(v.aval) for v in program.jaxpr.invars]
        self._known.update(zip(numbers, inputs, strict=True))
        operations: list[_Operation] = []
        self._outputs = self._listed(program, numbers, operations)
        self._anywhere: dict[int, _Operation] = {}
        self._once: list[_Operation] = []
        self._each: list[_Operation] = []
        self._together: list[_Operation] = []
        self._sort(operations)
        everything = [*self._once, *self._each, *self._together]
        self.num_levels = 1 + max((op.level for op in everything), default=0)

    def outputs(self) -> list[Value]:
        """What the program returns, once all levels are done."""
        return list(map(self._value, self._outputs))

    def compute_equal(self, level: int) -> None:
        """Does what is the same on every replica, once."""
        leaving = self._leaving(self._once, level)
        operations = _needed(_at(self._once, level), leaving)
        if not operations:
            return
        taken = self._taken(operations)

        given = [self._known[number].array for number in taken]
        flat, forms = list(map(entering, given)), dict[int, Any]()

        def computed(flat: Any) -> list[Any]:
            own = dict(zip(taken, map(formed, flat, map(form_of, given)), strict=True))
            self._compute(operations, own)
            forms.update((number, form_of(own[number])) for number in leaving)
            return [flattened(own[number]) for number in leaving]

        results = lax.cond(
            self._zero == 0, computed, lambda _: self._zeros(leaving), flat
        )
        for number, array in zip(leaving, results, strict=True):
            self._known[number] = Value(formed(array, forms[number]), True)

    def loop(self, level: int) -> None:
        """Does what is each replica's own, one replica after the other."""
        leaving = self._leaving(self._each, level)
        operations = _needed(_at(self._each, level), leaving)
        if not operations:
            return
        taken = self._taken(operations)
        first, each = self._series.first, self._series.each
        given = [self._known[number] for number in taken]
        stacks = [
            entering(value.array) if value.is_equal else self._stack(number)
            for number, value in zip(taken, given, strict=True)
        ]
        forms: dict[int, Form] = {}

        def turn(j: Any, results: list[Any]) -> list[Any]:
            own: dict[int, Any] = {}
            for number, value, flat in zip(taken, given, stacks, strict=True):
                form = form_of(value.array)
                if not value.is_equal:
                    form = dataclasses.replace(form, shape=form.shape[1:])
                    size = (flat.size - 1) // each
                    flat = lax.dynamic_slice(flat, (j * size,), (size,))
                own[number] = formed(flat, form)
            self._compute(operations, own, first + j)
            forms.update((number, form_of(own[number])) for number in leaving)
            left = [flattened(own[number]) for number in leaving]
            return [
                lax.dynamic_update_slice(stack, flat, (j * flat.size,))
                for stack, flat in zip(results, left, strict=True)
            ]

        none = [of_several(jnp.tile(z, each)) for z in self._zeros(leaving)]
        results = lax.fori_loop(0, each + self._zero, turn, none)
        for number, flat in zip(leaving, results, strict=True):
            form = forms[number]
            form = dataclasses.replace(form, shape=(each, *form.shape))
            self._stacks[number] = flat
            self._known[number] = Value(formed(flat[:-1], form), False)

    def _stack(self, number: int) -> Any:
        """The values of the device's replicas as a loop takes them."""
        if number not in self._stacks:
            self._stacks[number] = of_several(flattened(self._known[number].array))
        return self._stacks[number]

    def _zeros(self, numbers: Sequence[int]) -> list[Any]:
        avals = [self._avals[number] for number in numbers]
        shapes = [jax.eval_shape(flattened, aval) for aval in avals]
        return [jnp.zeros(shape.shape, shape.dtype) for shape in shapes]

    def communicate(self, level: int) -> None:
        """Does what the replicas do together, and what holds it."""
        together = Communication(
            self._series,
            lambda program, inputs: run(self._series, program, inputs, self._zero),
        )
        operations = list(_at(self._together, level))
        given = [list(map(self._value, op.inputs)) for op in operations]
        all_results = together([op.eqn for op in operations], given)
        for op, results in zip(operations, all_results, strict=True):
            self._known.update(zip(op.outputs, results, strict=True))

    def _compute(
        self,
        operations: Sequence[_Operation],
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
        if number in self._constants:
            return self._constants[number]
        if number not in own:
            op = self._anywhere[number]
            given = [self._read(operand, own) for operand in op.inputs]
            own.update(zip(op.outputs, bound(op.eqn, given), strict=True))
        return own[number]

    def _value(self, number: int) -> Value:
        if number not in self._known:
            self._known[number] = Value(self._read(number, {}), True)
        return self._known[number]

    def _number(self, aval: Any) -> int:
        self._avals.append(aval)
        return len(self._avals) - 1

    def _listed(
        self,
        program: core.ClosedJaxpr,
        inputs: Sequence[int],
        operations: list[_Operation],
    ) -> list[int]:
        """Lists the operations of a program; the numbers of its outputs."""

        def rule(eqn: Any, given: list[int]) -> list[int]:
            results = [self._number(var.aval) for var in eqn.outvars]
            operations.append(_Operation(eqn, given, results))
            return results

        constants = zip(program.consts, program.jaxpr.constvars, strict=True)
        numbers = [self._constant(value, var.aval) for value, var in constants]
        closed = core.ClosedJaxpr(program.jaxpr, numbers)
        return evaluated(
            closed, inputs, rule, lambda atom: self._constant(atom.val, atom.aval)
        )

    def _constant(self, value: Any, aval: Any) -> int:
        key: Hashable | None = None
        if not aval.shape and isinstance(value, (np.generic, np.ndarray, float, int)):
            key = str(aval), np.asarray(value).tobytes()
        if key is not None and key in self._scalars:
            return self._scalars[key]
        number = self._number(aval)
        if aval.shape and not is_key(value):
            self._known[number] = Value(unknown.array(value, self._zero), True)
        else:
            self._constants[number] = value
        if key is not None:
            self._scalars[key] = number
        return number

    def _sort(self, operations: list[_Operation]) -> None:
        """Says of each operation whether it is done once, for each replica, together,
        or wherever it is needed; and at which level.
        """
        equal = {number: value.is_equal for number, value in self._known.items()}
        equal.update(dict.fromkeys(self._constants, True))
        levels = dict.fromkeys(equal, 0)
        for op in operations:
            op.level = level = max((levels[number] for number in op.inputs), default=0)
            alike = [equal[number] for number in op.inputs]
            if replication_proof.communicates(op.eqn):
                self._together.append(op)
                flags, level = replication_proof.equal_results(op.eqn, alike), level + 1
            else:
                once = all(alike) and not replication_proof.differs(op.eqn)
                flags = [once] * len(op.outputs)
                if op.eqn.primitive.name in _LIGHT and all(
                    map(self._is_free, op.inputs)
                ):
                    self._anywhere.update(dict.fromkeys(op.outputs, op))
                else:
                    (self._once if once else self._each).append(op)
            equal.update(zip(op.outputs, flags, strict=True))
            levels.update(dict.fromkeys(op.outputs, level))

    def _is_free(self, number: int) -> bool:
        return number in self._constants or number in self._anywhere

    def _taken(self, operations: Sequence[_Operation]) -> list[int]:
        """What operations need from outside of them."""
        made = {number for op in operations for number in op.outputs}
        taken = dict.fromkeys(number for op in operations for number in op.inputs)
        return [n for n in taken if n not in made and not self._is_free(n)]

    def _leaving(self, operations: Sequence[_Operation], level: int) -> list[int]:
        """What operations of one level make that others, or the caller, need."""
        own = {id(op) for op in _at(operations, level)}
        made = {number for op in _at(operations, level) for number in op.outputs}
        others = itertools.chain(self._once, self._each, self._together)
        wanted = (n for op in others if id(op) not in own for n in op.inputs)
        needed = dict.fromkeys(itertools.chain(self._outputs, wanted))
        return [number for number in needed if number in made]


def _at(operations: Sequence[_Operation], level: int) -> Iterator[_Operation]:
    return (op for op in operations if op.level == level)


def _needed(
    operations: Iterable[_Operation], leaving: Sequence[int]
) -> list[_Operation]:
    """Those that something that leaves needs, or that do more than give results."""
    wanted, needed = set(leaving), list[_Operation]()
    for op in reversed(list(operations)):
        if replication_proof.is_stateful(op.eqn) or not wanted.isdisjoint(op.outputs):
            needed.append(op)
            wanted.update(op.inputs)
    return needed[::-1]
