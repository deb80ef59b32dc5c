"""A traced program whose large inputs are made whole where they are used, each time.

Weights that are divided over the replicas are gathered in the program. Written down
plainly, all of them are gathered before the first layer, and kept for the backward
pass: the whole model on every device. Here what depends on such inputs alone (the
gather, a cast, a transposition, what LoRA adds) is not computed where the program
says, but before each operation that takes other values, too, and not before those
others are known. So one layer's weights are whole at a time, in the forward and, once
more, in the backward pass; and those of the next one, where the devices can gather
while they compute.

Known as stage 3 of ZeRO (Rajbhandari et al., 2020, https://arxiv.org/abs/1910.02054)
and as fully sharded data parallel (Zhao et al., 2023,
https://arxiv.org/abs/2304.11277).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend import core

from keras_distribute._compat.jax_internals import is_key
from keras_distribute.devices import jaxprs

Tie = Callable[[Any, Sequence[Any]], Any]


class Input:
    """An input that is late: what is computed from it waits until it is used."""

    def __init__(self, array: Any) -> None:
        self.array = array


@dataclasses.dataclass(frozen=True, eq=False)
class _Fixed:
    """A value that depends on no input that changes from batch to batch."""

    array: Any


@dataclasses.dataclass(frozen=True, eq=False)
class _Operation:
    """An operation that waits."""

    eqn: Any
    operands: list[Any]


@dataclasses.dataclass(frozen=True, eq=False)
class _Result:
    """A result of an operation that waits."""

    of: _Operation
    index: int


def outputs(
    program: core.ClosedJaxpr, inputs: Sequence[Any], tie: Tie, *, one_ahead: bool
) -> list[Any]:
    """The outputs of a program, each an array.

    Args:
        program: Traced, with `jax.make_jaxpr`.
        inputs: Arrays, `Input`s, or `fixed` values.
        tie: From a late input and values to an array like the input that there is not
            before any of the values, and of which the compiler does not know that it is
            equal.
        one_ahead: Whether an operation's late inputs may be there as soon as what the
            operation before it takes that has late inputs, too: they can be gathered
            while that one is computed, and are whole at the same time.
    """
    before: list[Any] = []

    def rule(eqn: Any, operands: list[Any]) -> list[Any]:
        inner = jaxprs.called(eqn)
        if inner is not None:
            is_again = eqn.params.get("prevent_cse") and eqn.params["differentiated"]
            return run(inner, _apart(operands, tie) if is_again else operands)
        if all(isinstance(value, _Fixed) for value in operands):
            results = jaxprs.bound(eqn, [value.array for value in operands])
            return list(map(_Fixed, results))
        known = [value for value in operands if not _waits(value)]
        if all(isinstance(value, _Fixed) for value in known):
            waiting = _Operation(eqn, operands)
            return [_Result(waiting, i) for i in range(len(eqn.outvars))]
        after = _all_known(operands)
        if one_ahead and any(map(_waits, operands)):
            after, before[:] = list(before) or after, after
        arrays = _together(operands, tie, after)
        if eqn.primitive.name == "optimization_barrier":
            # The first one is not to be there before the others.
            return [tie(arrays[0], arrays[1:]), *arrays[1:]]
        return jaxprs.bound(eqn, arrays)

    def run(called: core.ClosedJaxpr, given: Sequence[Any]) -> list[Any]:
        consts = [c if isinstance(c, _Fixed) else _Fixed(c) for c in called.consts]
        closed = core.ClosedJaxpr(called.jaxpr, consts)
        return jaxprs.evaluated(closed, given, rule, lambda atom: _Fixed(atom.val))

    return list(map(_now, run(program, inputs)))


def fixed(array: Any) -> Any:
    """An input that is the same for all batches, and small: what is computed from it
    and from late ones waits, too.
    """
    return _Fixed(array)


def tied_by_select(array: Any, values: Sequence[Any]) -> Any:
    """A `tie` for compilers that drop barriers (XLA for CPUs): an element of a value is
    never 1 and 2, which XLA does not find out.
    """
    never: Any = False
    for value in values:
        first = lax.slice(jnp.ravel(value), (0,), (1,))[0]
        never |= (first == 1) & (first == 2)
    return jnp.where(never, jnp.zeros((), array.dtype), array)


def tied_by_barrier(array: Any, values: Sequence[Any]) -> Any:
    """A `tie` for all others."""
    return lax.optimization_barrier((array, *values))[0]


def _waits(value: Any) -> bool:
    return isinstance(value, Input | _Result)


def _is_known(value: Any) -> bool:
    """Whether a value depends on more than late and fixed inputs."""
    return not (_waits(value) or isinstance(value, _Fixed))


def _now(value: Any) -> Any:
    """A value as an array; a late one is computed."""
    return _computed(value, {}, lambda array: array)


def _apart(operands: Sequence[Any], tie: Tie) -> list[Any]:
    """What a forward pass is computed from again, for the backward pass: not before its
    gradients are there, and not taken for the first time that it was computed.
    """
    after = _all_known(operands)
    return [
        tie(value, after) if _is_known(value) and _can_tie(value) else value
        for value in operands
    ]


def _all_known(operands: Sequence[Any]) -> list[Any]:
    """All of them: what computes a forward pass again takes early ones, too."""
    return [value for value in operands if _is_known(value) and _can_tie(value)]


def _together(operands: Sequence[Any], tie: Tie, after: Sequence[Any]) -> list[Any]:
    """The operands of an operation, with those that waited computed for it, when the
    values of `after` are there.
    """
    made: dict[Any, Any] = {}

    def leaf(array: Any) -> Any:
        return tie(array, after) if after else array

    return [
        value.array if isinstance(value, Input) else _computed(value, made, leaf)
        for value in operands
    ]


def _can_tie(value: Any) -> bool:
    return jnp.size(value) > 0 and not is_key(value)


def _computed(value: Any, made: dict[Any, Any], leaf: Callable[[Any], Any]) -> Any:
    if isinstance(value, _Fixed):
        return value.array
    if isinstance(value, Input):
        if value not in made:
            made[value] = leaf(value.array)
        return made[value]
    if isinstance(value, _Result):
        if value.of not in made:
            operands = [_computed(each, made, leaf) for each in value.of.operands]
            made[value.of] = jaxprs.bound(value.of.eqn, operands)
        return made[value.of][value.index]
    return value
