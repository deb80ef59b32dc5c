"""Programs whose equal operations are one, and whose operands are as large as their
results. Knows no Keras.

For several devices, XLA merges what is equal before it simplifies a program, for one
device after (JAX 0.10). And it simplifies a value by what else takes it: a division by
what is broadcast for it alone becomes a product. So all that is equal is merged
beforehand, in loops and conditions, too; the broadcasts that JAX adds by itself when it
compiles are written down for that. Constants are left to XLA: with them come those that
JAX adds.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend import core

from keras_distribute.devices import jaxprs, replication_proof
from keras_distribute.devices.by_rows import elementwise


def merged(program: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """The same function: without calls, but for what is computed again to save memory
    and does not communicate.
    """
    return _Merging().merged(program)


class _Merging:
    """The operations of one program, each once."""

    def __init__(self) -> None:
        self._eqns: list[Any] = []
        self._seen: dict[Hashable, list[Any]] = {}
        self._constants: list[tuple[core.Var, Any]] = []
        self._broadcast = functools.cache(_broadcast)

    def merged(self, program: core.ClosedJaxpr) -> core.ClosedJaxpr:
        """The program, made anew."""
        inputs = [core.Var(v.aval) for v in program.jaxpr.invars]
        outputs = self._opened(program, inputs)
        jaxpr = core.Jaxpr(
            [var for var, _ in self._constants],
            inputs,
            outputs,
            self._eqns,
            program.jaxpr.effects,
            jaxprs.ORIGIN,
        )
        return core.ClosedJaxpr(jaxpr, [value for _, value in self._constants])

    def _opened(self, program: core.ClosedJaxpr, inputs: Sequence[Any]) -> list[Any]:
        """The variables of a program's outputs, for those of its inputs."""
        constants = zip(program.consts, program.jaxpr.constvars, strict=True)
        known = [self._constant(value, var.aval) for value, var in constants]
        return jaxprs.in_variables(program.jaxpr, known, inputs, self._results)

    def _constant(self, value: Any, aval: Any) -> core.Var:
        var = core.Var(aval)
        self._constants.append((var, value))
        return var

    def _results(self, eqn: Any, given: list[Any]) -> list[Any]:
        called = _called(eqn)
        if called is not None:
            return self._opened(called, given)
        if _needs_equal_shapes(eqn):
            shape = eqn.outvars[0].aval.shape
            given = [self._whole(atom, shape) for atom in given]
        key = _key(eqn, given)
        if key is None or key not in self._seen:
            eqn, given = self._inside(eqn, given)
            results = [core.Var(var.aval) for var in eqn.outvars]
            self._eqns.append(eqn.replace(invars=given, outvars=results))
            if key is None:
                return results
            self._seen[key] = results
        return self._seen[key]

    def _whole(self, atom: Any, shape: tuple[int, ...]) -> Any:
        """An operand in the shape of the result."""
        own = atom.aval.shape
        if own == shape:
            return atom
        return self._opened(self._broadcast(own, atom.aval.dtype, shape), [atom])[0]

    def _inside(self, eqn: Any, given: list[Any]) -> tuple[Any, list[Any]]:
        """An operation whose own programs are merged, and its operands."""
        again = jaxprs.called(eqn)
        if again is None:
            return jaxprs.with_programs(eqn, merged), given
        inner = merged(again)
        constants = [
            self._constant(value, var.aval)
            for var, value in zip(inner.jaxpr.constvars, inner.consts, strict=True)
        ]
        jaxpr = jaxprs.with_constants_given(inner.jaxpr)
        return eqn.replace(params={**eqn.params, "jaxpr": jaxpr}), given + constants


def _needs_equal_shapes(eqn: Any) -> bool:
    """Whether JAX makes the operands as large as the result. A choice may be made by a
    single number.
    """
    name = eqn.primitive.name
    return name in elementwise.NAMES and name != "select_n" and len(eqn.invars) > 1


def _called(eqn: Any) -> core.ClosedJaxpr | None:
    """The function that an operation calls, unless it is kept whole."""
    is_kept = eqn.primitive.name in jaxprs.RECOMPUTED
    is_kept = is_kept and not replication_proof.communicates(eqn)
    return None if is_kept else jaxprs.called(eqn)


def _broadcast(
    own: tuple[int, ...], dtype: Any, shape: tuple[int, ...]
) -> core.ClosedJaxpr:
    return jax.make_jaxpr(lambda a: lax.broadcast_in_dim(a, shape, range(len(own))))(
        jax.ShapeDtypeStruct(own, dtype)
    )


def _key(eqn: Any, inputs: Sequence[Any]) -> Hashable | None:
    """What is equal for two operations that give the same; `None`: nothing."""
    if replication_proof.is_stateful(eqn) or replication_proof.communicates(eqn):
        return None
    operands = tuple(map(_operand_key, inputs))
    key = eqn.primitive, operands, tuple(sorted(eqn.params.items()))
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _operand_key(atom: Any) -> Hashable:
    if isinstance(atom, core.Literal):
        return str(atom.aval), np.asarray(atom.val).tobytes()
    return atom
