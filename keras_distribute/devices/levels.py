"""A replica's program, taken apart into numbered operations: which are done once on a
device, which for each of its replicas, which together; after how many rounds of
communication; and which of their values others need.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Literal

import numpy as np
from jax.extend import core

from keras_distribute.devices import replication_proof
from keras_distribute.devices.communication import is_sum
from keras_distribute.devices.flat_arrays import is_key
from keras_distribute.devices.jaxprs import bound, evaluated

# What is done again wherever a constant, or something larger, is needed in such a form.
_LIGHT = {"broadcast_in_dim", "convert_element_type", "iota", "reshape", "squeeze"}


Kind = Literal["once", "each", "sum", "together"]
_Group = tuple[Kind, int]


@dataclasses.dataclass
class Operation:
    """An operation on numbered values.

    Args:
        kind: Whether it is done once on a device, since it is the same on every
            replica, for each of its replicas, or together: as a sum over the replicas,
            or in another way.
        level: How many rounds of communication come before it.
    """

    eqn: Any
    inputs: list[int]
    outputs: list[int]
    kind: Kind = "once"
    level: int = 0


@dataclasses.dataclass
class Light:
    """A value that is made of others wherever it is needed.

    Args:
        made: The value, from those.
    """

    inputs: list[int]
    made: Callable[[list[Any]], Any]


class Levels:
    """A program, taken apart.

    Args:
        program: As `merging` leaves it.
        equal: Which of its inputs are the same on every replica.

    Attributes:
        inputs, outputs: The numbers of what the program takes and returns.
        avals: The shape and dtype of each value, by its number.
        constants: Scalars and keys, which are known wherever they are needed.
        arrays: Constants in more dimensions.
        light: What is made of others wherever it is needed.
        count: Of the levels: one more than there are rounds of communication.
        replaced: For an output, the input whose memory it may take, as JAX pairs them
            where the caller gives inputs away: the first of a form with the first.
    """

    def __init__(self, program: core.ClosedJaxpr, equal: Sequence[bool]) -> None:
        self.avals: list[Any] = []
        self.constants: dict[int, Any] = {}
        self.arrays: dict[int, Any] = {}
        self.light: dict[int, Light] = {}
        self._groups = defaultdict[_Group, list[Operation]](list)
        self._readers = defaultdict[int, set[_Group | None]](set)  # None: the caller.
        self._scalars: dict[Hashable, int] = {}
        self.inputs = [self.number(var.aval) for var in program.jaxpr.invars]
        operations: list[Operation] = []
        self.outputs = self._listed(program, operations)
        self._group(self._sort(operations, equal))
        self.count = 1 + max((level for _, level in self._groups), default=0)
        self.replaced = self._pairs()

    def number(self, aval: Any) -> int:
        """The number of one value more."""
        self.avals.append(aval)
        return len(self.avals) - 1

    def at(self, kind: Kind, level: int) -> tuple[list[Operation], list[int]]:
        """The operations of one kind and level, and the values of them that others, or
        the caller, need.
        """
        here, own = self._groups[kind, level][::-1], {(kind, level)}
        return here, [n for op in here for n in op.outputs if self._readers[n] - own]

    def taken(self, operations: Sequence[Operation]) -> list[int]:
        """What operations need from outside of them."""
        made = {number for op in operations for number in op.outputs}
        taken = dict.fromkeys(n for op in operations for n in self.needs(op.inputs))
        return [number for number in taken if number not in made]

    def needs(self, numbers: Iterable[int]) -> list[int]:
        """What must be there to make values wherever they are needed: themselves, or
        what they are made of.
        """
        found: list[int] = []
        for number in numbers:
            if number in self.light:
                found += self.needs(self.light[number].inputs)
            elif number not in self.constants:
                found.append(number)
        return found

    def summed(self, level: int) -> list[int]:
        """What replicas make at a level and sums over them take there."""
        made = self.at("each", level)[1]
        return [number for number in made if ("sum", level) in self._readers[number]]

    def kept(self, level: int) -> list[int]:
        """What replicas make at a level and something else than such sums needs."""
        here = {("each", level), ("sum", level)}
        made = self.at("each", level)[1]
        return [number for number in made if not self._readers[number] <= here]

    def part(self, whole: int, begin: int, number: int) -> Light:
        """A value of the form of another, as a part of a flat array."""
        shape = self.avals[number].shape
        return Light([whole], functools.partial(_part, begin, shape))

    def _pairs(self) -> dict[int, int]:
        free: dict[Hashable, list[int]] = {}
        for number in reversed(self.inputs):
            free.setdefault(self._form(number), []).append(number)
        outputs = dict.fromkeys(self.outputs)
        return {n: same.pop() for n in outputs if (same := free.get(self._form(n)))}

    def _form(self, number: int) -> Hashable:
        aval = self.avals[number]
        return aval.shape, aval.dtype

    def _listed(
        self, program: core.ClosedJaxpr, operations: list[Operation]
    ) -> list[int]:
        """Lists the operations of a program; the numbers of its outputs."""

        def rule(eqn: Any, given: list[int]) -> list[int]:
            results = [self.number(var.aval) for var in eqn.outvars]
            operations.append(Operation(eqn, given, results))
            return results

        constants = zip(program.consts, program.jaxpr.constvars, strict=True)
        numbers = [self._constant(value, var.aval) for value, var in constants]
        closed = core.ClosedJaxpr(program.jaxpr, numbers)
        return evaluated(
            closed, self.inputs, rule, lambda atom: self._constant(atom.val, atom.aval)
        )

    def _constant(self, value: Any, aval: Any) -> int:
        key: Hashable | None = None
        if not aval.shape and isinstance(value, (np.generic, np.ndarray, float, int)):
            key = str(aval), np.asarray(value).tobytes()
        if key is not None and key in self._scalars:
            return self._scalars[key]
        number = self.number(aval)
        of_its_kind = (
            self.arrays if aval.shape and not is_key(value) else self.constants
        )
        of_its_kind[number] = value
        if key is not None:
            self._scalars[key] = number
        return number

    def _sort(
        self, operations: list[Operation], inputs: Sequence[bool]
    ) -> list[Operation]:
        """Says of each operation whether it is done once, for each replica, or
        together, and at which level; all but what is done wherever it is needed.
        """
        equal = dict(zip(self.inputs, inputs, strict=True))
        equal.update(dict.fromkeys([*self.constants, *self.arrays], True))
        levels = dict.fromkeys(equal, 0)
        kept: list[Operation] = []
        for op in operations:
            op.level = level = max((levels[number] for number in op.inputs), default=0)
            alike = [equal[number] for number in op.inputs]
            if replication_proof.communicates(op.eqn):
                op.kind = "sum" if is_sum(op.eqn) else "together"
                flags, level = replication_proof.equal_results(op.eqn, alike), level + 1
            else:
                once = all(alike) and not replication_proof.differs(op.eqn)
                op.kind, flags = "once" if once else "each", [once] * len(op.outputs)
            if op.kind == "once" and self._is_light(op):
                light = Light(op.inputs, functools.partial(_only, op.eqn))
                self.light.update(dict.fromkeys(op.outputs, light))
            else:
                kept.append(op)
            equal.update(zip(op.outputs, flags, strict=True))
            levels.update(dict.fromkeys(op.outputs, level))
        return kept

    def _group(self, operations: Sequence[Operation]) -> None:
        """Notes which operations there are of each kind and level, from the last to the
        first, and which of them need which values. What nobody needs is left out, and
        what is done once waits for what needs it.
        """
        for number in self.needs(self.outputs):
            self._readers[number].add(None)
        for op in reversed(operations):
            readers = set().union(*(self._readers[number] for number in op.outputs))
            stateful = replication_proof.is_stateful(op.eqn)
            if not readers and not stateful:
                continue
            if op.kind == "once" and not stateful:
                op.level = min((r[1] for r in readers if r), default=op.level)
            group = op.kind, op.level
            self._groups[group].append(op)
            for number in self.needs(op.inputs):
                self._readers[number].add(group)

    def _is_light(self, op: Operation) -> bool:
        if op.eqn.primitive.name not in _LIGHT:
            return False
        if all(n in self.constants or n in self.light for n in op.inputs):
            return True
        size = max(self.avals[number].size for number in op.inputs)
        return self.avals[op.outputs[0]].size > size


def _only(eqn: Any, given: Sequence[Any]) -> Any:
    (result,) = bound(eqn, given)
    return result


def _part(begin: int, shape: tuple[int, ...], given: Sequence[Any]) -> Any:
    return given[0][begin : begin + math.prod(shape)].reshape(shape)
