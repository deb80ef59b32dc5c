"""Numbers the values of several traced programs: equal expressions of equal inputs get
one number. Knows no Keras.

A number stands for how a value is computed (its operation, parameters and operands'
numbers), not for what it is: what has one number in two programs is the same value
wherever the inputs are the same. Calls (`jit`, functions with gradients of their own)
are opened. Results of operations over the replicas are leaves, known by their place in
the order of such operations; what has effects or calls back into Python equals nothing
else.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core

from keras_distribute._compat.jax_internals import is_key
from keras_distribute.devices import replication_proof
from keras_distribute.devices.jaxprs import (
    CALLS,
    RECOMPUTED,
    bound,
    called,
    evaluated,
)
from keras_distribute.values import reductions


@dataclasses.dataclass(eq=False)
class Node:
    """An operation on numbered values; a pure one is one object in all programs that
    compute it.

    Args:
        equation: Any one of the equations that it stands for.
        inputs: The numbers of its operands.
        outputs: The numbers of its results.
        pure: Whether it is nothing but its results.
        key: What it does, without its operands.
    """

    equation: Any
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    pure: bool
    key: Hashable

    @property
    def name(self) -> str:
        """What it is called where the user reads of it."""
        if _joins(self.equation):
            return "a joining all_gather"
        return self.equation.primitive.name

    def __call__(self, *operands: Any) -> list[Any]:
        """Its results, while a program is traced."""
        return bound(self.equation, operands)

    def __repr__(self) -> str:
        operands = ", ".join(
            f"{atom.aval.dtype}{list(atom.aval.shape)}" for atom in self.equation.invars
        )
        return f"{self.name} of {operands}"


@dataclasses.dataclass
class Listing:
    """One program: its operations in order, those over the replicas among them, and the
    numbers of its outputs.
    """

    nodes: list[Node]
    collectives: list[Node]
    outputs: list[int]


class Numbering:
    """The numbers of several programs with the same inputs.

    Attributes:
        inputs: The number of each input.
        constants: The values of the numbers that are constants.
        avals: The abstract value of each number.
    """

    def __init__(self, avals: Sequence[Any]) -> None:
        self._known: dict[Hashable, Any] = {}
        # What is known by its identity must live as long as its number.
        self._kept: list[Any] = []
        self.avals: list[Any] = []
        self.constants: dict[int, Any] = {}
        self.inputs = [self._new(aval) for aval in avals]

    def listing(self, program: core.ClosedJaxpr) -> Listing:
        """The program in numbers."""
        listed = Listing([], [], [])
        self._seen: set[Node] = set()
        listed.outputs = self._walk(program, self.inputs, listed)
        return listed

    def _walk(
        self, program: core.ClosedJaxpr, inputs: Sequence[int], listed: Listing
    ) -> list[int]:
        constants = zip(program.consts, program.jaxpr.constvars, strict=True)
        numbers = [self._constant(value, var.aval) for value, var in constants]

        def outputs(equation: Any, operands: list[int]) -> list[int]:
            body = _opened(equation)
            if body is not None:
                return self._walk(body, operands, listed)
            return list(self._node(equation, tuple(operands), listed).outputs)

        return evaluated(
            core.ClosedJaxpr(program.jaxpr, numbers),
            inputs,
            outputs,
            lambda atom: self._constant(atom.val, atom.aval),
        )

    def _node(self, equation: Any, operands: tuple[int, ...], listed: Listing) -> Node:
        key = self._equation_key(equation)
        if replication_proof.communicates(equation):
            place = (
                "collective",
                len(listed.collectives),
                tuple(v.aval for v in equation.outvars),
            )
            outputs = self._known.setdefault(place, None) or tuple(
                self._new(v.aval) for v in equation.outvars
            )
            self._known[place] = outputs
            node = Node(equation, operands, outputs, False, key)
            listed.collectives.append(node)
            listed.nodes.append(node)
            return node
        pure = not replication_proof.is_stateful(equation)
        node = self._known.get((key, operands)) if pure else None
        if node is None:
            outputs = tuple(self._new(v.aval) for v in equation.outvars)
            node = Node(equation, operands, outputs, pure, key)
            if pure:
                self._known[key, operands] = node
        if node not in self._seen:
            self._seen.add(node)
            listed.nodes.append(node)
        return node

    def _new(self, aval: Any) -> int:
        self.avals.append(aval)
        return len(self.avals) - 1

    def _constant(self, value: Any, aval: Any) -> int:
        key = ("constant", str(aval), self._array_key(value))
        if key not in self._known:
            self._known[key] = self._new(aval)
            self.constants[self._known[key]] = value
        return self._known[key]

    def _array_key(self, value: Any) -> Hashable:
        special = isinstance(value, jax.Array) and (
            is_key(value) or not value.is_fully_addressable
        )
        if special:
            self._kept.append(value)
            return id(value)
        array = np.asarray(value)
        return str(array.dtype), array.shape, hashlib.blake2b(array.tobytes()).digest()

    def _equation_key(self, equation: Any) -> int:
        """What the equation does to its operands, as a number of its own."""
        body = called(equation) if equation.primitive.name in CALLS else None
        params = body if body is not None else equation.params
        return self._interned((equation.primitive, self._key(params)))

    def _interned(self, key: Hashable) -> int:
        return self._known.setdefault(("key", key), len(self._known))

    def _key(self, value: Any) -> Hashable:
        if hasattr(value, "eqns"):
            return self._jaxpr_key(value)
        if hasattr(value, "jaxpr"):
            consts = [
                self._constant(c, jax.typeof(c)) for c in getattr(value, "consts", ())
            ]
            return self._jaxpr_key(value.jaxpr), tuple(consts)
        if isinstance(value, dict):
            return tuple(
                (name, self._key(item))
                for name, item in sorted(value.items(), key=lambda pair: str(pair[0]))
            )
        if isinstance(value, tuple | list):
            return type(value).__name__, tuple(self._key(item) for item in value)
        if isinstance(value, np.ndarray | np.generic | jax.Array):
            return self._array_key(value)
        try:
            hash(value)
        except TypeError:
            value = (self._kept.append(value), id(value))
        return type(value), repr(value) if isinstance(value, float) else value

    def _jaxpr_key(self, jaxpr: Any) -> int:
        identity = ("jaxpr", id(jaxpr))
        if identity in self._known:
            return self._known[identity]
        self._kept.append(jaxpr)
        names: dict[Any, int] = {}
        for var in (*jaxpr.constvars, *jaxpr.invars):
            names[var] = len(names)

        def read(atom: Any) -> Hashable:
            if isinstance(atom, core.Literal):
                return "literal", self._constant(atom.val, atom.aval)
            return names[atom]

        lines: list[Hashable] = [tuple(str(var.aval) for var in names)]
        for equation in jaxpr.eqns:
            operands = tuple(read(atom) for atom in equation.invars)
            for var in equation.outvars:
                names[var] = len(names)
            results = tuple(str(v.aval) for v in equation.outvars)
            lines.append((self._equation_key(equation), operands, results))
        key = self._interned(
            (tuple(lines), tuple(read(atom) for atom in jaxpr.outvars))
        )
        self._known[identity] = key
        return key


def _joins(equation: Any) -> bool:
    """Whether it joins values of different sizes, in one operation that knows all."""
    return equation.params.get("name") == reductions.JOINING


def _opened(equation: Any) -> Any:
    """A call's body, whose equations may stand in its place; `None` for others."""
    is_again = equation.primitive.name in RECOMPUTED
    # What is recomputed is opened only where replicas communicate in it.
    if _joins(equation) or (is_again and not replication_proof.communicates(equation)):
        return None
    return called(equation)
