"""What a traced function does to the values it assigns: adds to them, moves them, sets
them, or something else.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from keras_distribute.devices.jaxprs import called, evaluated, part_of


class Change(enum.Enum):
    """How a new value comes from the old one."""

    SET = "set"  # Without it.
    SAME = "same"  # It is the old one.
    ADDED = "added"  # The old one, and something that does not depend on it.
    MOVED = "moved"  # The same of a multiple of the old one, as of a moving average.
    OTHER = "other"


_SAME_VALUE = ("copy", "copy_p", "optimization_barrier", "stop_gradient")
_LINEAR = ("add", "add_any", "sub", "neg", "reshape", "broadcast_in_dim", "squeeze")


def changes_of(
    program: core.ClosedJaxpr, inputs: Sequence[int], outputs: Sequence[int]
) -> list[Change]:
    """How each of some outputs comes from one of the inputs.

    Args:
        program: The traced function.
        inputs: The index of the old value among the inputs, for each output.
        outputs: The indices of the new values among the outputs.
    """
    jaxpr = program.jaxpr
    found: list[Change] = []
    for old, new in zip(inputs, outputs, strict=True):
        kinds = [Change.SET] * len(jaxpr.invars)
        kinds[old] = Change.SAME
        found.append(_through(jaxpr, kinds)[new])
    return found


def _through(jaxpr: core.Jaxpr, kinds: Sequence[Change]) -> list[Change]:
    """The kinds of the outputs, from those of the inputs."""
    known = dict(zip(jaxpr.invars, kinds, strict=True))

    def kind_of(atom: Any) -> Change:
        is_literal = isinstance(atom, core.Literal)
        return Change.SET if is_literal else known.get(atom, Change.SET)

    for eqn in jaxpr.eqns:
        given = list(map(kind_of, eqn.invars))
        if all(kind is Change.SET for kind in given):
            continue
        inner = called(eqn)
        if inner is not None:
            results = _through(inner.jaxpr, given)
        else:
            results = [_after(eqn, given)] * len(eqn.outvars)
        known.update(zip(eqn.outvars, results, strict=True))
    return list(map(kind_of, jaxpr.outvars))


def _after(eqn: Any, given: Sequence[Change]) -> Change:
    name, own = eqn.primitive.name, eqn.invars[0].aval
    out = eqn.outvars[0].aval
    if name in _SAME_VALUE or (
        name in ("convert_element_type", "reshape", "broadcast_in_dim")
        and (own.shape, own.dtype) == (out.shape, out.dtype)
    ):
        return given[0]
    added = (Change.SAME, Change.ADDED)
    if name in ("add", "add_any") and len(given) == 2:
        old = [kind for kind in given if kind in added]
        if len(old) == 1 and Change.SET in given:
            return Change.ADDED
    old_first = given[0] in added and all(kind is Change.SET for kind in given[1:])
    if old_first and name in ("sub", "scatter-add"):
        return Change.ADDED
    return Change.MOVED if _is_moved(name, eqn, given) else Change.OTHER


def _is_moved(name: str, eqn: Any, given: Sequence[Change]) -> bool:
    """Whether each element of the result is a multiple of the old one, and something;
    also where some of them are replaced.
    """
    if Change.OTHER in given:
        return False
    if name in ("scatter", "dynamic_update_slice"):
        return all(kind is Change.SET for kind in given[1:])
    if name == "mul":
        return Change.SET in given
    if name == "div":
        return given[1] is Change.SET
    if name == "select_n":
        return given[0] is Change.SET
    if name == "convert_element_type":
        return jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.inexact)
    return name in _LINEAR


def added_constant(program: core.ClosedJaxpr, old: int, new: int) -> Any:
    """What is added to an old value, where that depends on no input; `None` where it
    does.

    Args:
        program: The traced function.
        old: The index of the old value among the inputs.
        new: The index of the new one among the outputs, which is `Change.ADDED`.
    """
    jaxpr = program.jaxpr
    alone, needed = part_of(program, [jaxpr.outvars[new]])
    if set(needed) - {old}:
        return None
    aval = jaxpr.invars[old].aval
    with jax.ensure_compile_time_eval():
        zero = jnp.zeros(aval.shape, aval.dtype)
        inputs = [zero if i == old else None for i in range(len(jaxpr.invars))]
        return np.asarray(evaluated(alone, inputs)[0])
