"""A traced program as lines of text, the same in each process that computes the same:
without addresses, orders of sets, names of functions, and what only prints.
"""

from __future__ import annotations

import dataclasses
import enum
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.core
import numpy as np
from jax.extend import core

from keras_distribute._compat.jax_internals import is_key

_PRINTS = {"debug_callback", "debug_print"}
# What is called otherwise where the same is computed.
_NAMES = {"name", "debug_info"}


class Line(NamedTuple):
    """A line of a program.

    Args:
        text: What is computed.
        layer: Where, as `str` says: layers are numbered by how many the process made.
    """

    text: str
    layer: Any = ""


def listed(program: core.ClosedJaxpr) -> list[Line]:
    """One line for each operation that a result or an effect needs, and for the inputs,
    constants and results.

    Args:
        program: Its constants are whole in this process.
    """
    return list(_lines(program.jaxpr, program.consts))


def _lines(jaxpr: core.Jaxpr, consts: Iterable[Any]) -> Iterator[Line]:
    numbers = {var: i for i, var in enumerate([*jaxpr.constvars, *jaxpr.invars])}

    def operand(atom: Any) -> str:
        if isinstance(atom, core.Literal):
            return f"{_array(atom.val)} {atom.aval}"
        return f"%{numbers.setdefault(atom, len(numbers))}"

    yield Line(f"inputs {', '.join(str(var.aval) for var in jaxpr.invars)}")
    for var, value in zip(jaxpr.constvars, consts, strict=False):
        yield Line(f"a constant {var.aval} {_array(value)}")
    for eqn, inside in _needed(jaxpr):
        taken = ", ".join(map(operand, eqn.invars))
        made = ", ".join(f"{operand(v)} {v.aval}" for v in eqn.outvars)
        params = _value({k: v for k, v in eqn.params.items() if k not in _NAMES})
        text = f"{eqn.primitive.name}{params} of {taken} to {made}"
        yield Line(text, eqn.source_info.name_stack)
        yield from inside
    yield Line(f"results {', '.join(map(operand, jaxpr.outvars))}")


def _needed(jaxpr: core.Jaxpr) -> list[tuple[Any, list[Line]]]:
    """The operations without those for prints alone, and the lines of the programs that
    they hold.
    """
    needed = {v for v in jaxpr.outvars if not isinstance(v, core.Literal)}
    found: list[tuple[Any, list[Line]]] = []
    for eqn in reversed(jaxpr.eqns):
        if not needed.intersection(eqn.outvars) and not _has_effect(eqn):
            continue
        needed |= {v for v in eqn.invars if not isinstance(v, core.Literal)}
        found.append((eqn, list(_lines_inside(eqn.params))))
    return found[::-1]


def _has_effect(eqn: Any) -> bool:
    """Whether it does more than to compute its results, and to print."""
    if eqn.primitive.name in _PRINTS or not eqn.effects:
        return False
    inside = list(core.jaxprs_in_params(eqn.params))
    return not inside or any(_has_effect(each) for j in inside for each in j.eqns)


def _lines_inside(params: Mapping[str, Any]) -> Iterator[Line]:
    for value in jax.tree.leaves(dict(params), is_leaf=_is_program):
        if isinstance(value, core.ClosedJaxpr):
            yield from _lines(value.jaxpr, value.consts)
        elif isinstance(value, core.Jaxpr):
            yield from _lines(value, ())


def _is_program(value: Any) -> bool:
    return isinstance(value, core.Jaxpr | core.ClosedJaxpr)


def _value(value: Any) -> str:
    """A parameter of an operation; of what says nothing alike, its type."""
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return repr(value)
    if isinstance(value, np.dtype | enum.Enum):
        return str(value)
    if isinstance(value, np.ndarray | np.generic):
        return _array(value)
    if isinstance(value, Mapping):
        return f"({', '.join(sorted(f'{k}={_value(v)}' for k, v in value.items()))})"
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(map(_value, value)))}}}"
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_value, value))})"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return _value({name: getattr(value, name) for name in names})
    return type(value).__name__


def _array(value: Any) -> str:
    """A number in words, of an array a checksum."""
    if is_key(value):
        value = jax.random.key_data(value)
    if isinstance(value, jax.core.Tracer):
        return "traced"
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        if not value.is_fully_replicated:
            return "divided"
        value = value.addressable_data(0)
    host = np.ascontiguousarray(value)
    if np.ndim(value) == 0:
        return str(host.item())
    return f"{host.dtype}{list(host.shape)} {zlib.crc32(host.tobytes()):08x}"
