"""Collectives of CPUs before and after a loop or a condition that holds some. Knows no
Keras.

XLA on CPUs begins a collective when what holds others before it has begun, and not when
that has ended; those of one device then meet the others of another device (JAX 0.10.2:
"Check failed: id < num_threads", they wait for ever, or exchange the wrong arrays). It
chooses the order of what needs nothing of each other, another one than the program's.
So whatever communicates later takes something of the results of the loop, or of the
condition, and that something of the results of what communicated before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from keras_distribute._compat.jax_internals import without_unused
from keras_distribute.devices import jaxprs, unknown
from keras_distribute.devices.communication import HOLDING
from keras_distribute.devices.flat_arrays import is_key
from keras_distribute.devices.replication_proof import communicates
from keras_distribute.devices.rewriting import Rewriting, all_rewritten


def in_turn(
    body: Callable[..., Any], rewritings: Sequence[Rewriting] = ()
) -> Callable[..., Any]:
    """The program of one device, whose collectives wait for loops and conditions.

    Args:
        rewritings: What else is written otherwise, before.
    """

    def change(program: core.ClosedJaxpr) -> core.ClosedJaxpr:
        # What waits for a result would keep what nothing else needs.
        return _written(without_unused(all_rewritten(program, rewritings)))

    return jaxprs.by_changed_program(body, change)


def _written(program: core.ClosedJaxpr) -> core.ClosedJaxpr:
    if not jaxprs.has(program, _holds_collectives):
        return program

    def results(*inputs: Any) -> list[Any]:
        return _Turns(inputs).evaluated(program, inputs)

    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in program.in_avals]
    return jax.make_jaxpr(results)(*shapes)


def _holds_collectives(eqn: Any) -> bool:
    return eqn.primitive.name in HOLDING and communicates(eqn)


class _Turns:
    """The operations of one program, one after the other.

    Args:
        inputs: Of the program.
    """

    def __init__(self, inputs: Sequence[Any]) -> None:
        self._zero = unknown.zero(inputs)
        self._follows = False  # Whether the zero comes after a loop or a condition.
        self._before: list[Any] = []  # What collectives gave since then.

    def evaluated(self, program: core.ClosedJaxpr, inputs: Sequence[Any]) -> list[Any]:
        """The program's outputs."""
        return jaxprs.evaluated(program, inputs, self._results)

    def _results(self, eqn: Any, given: list[Any]) -> list[Any]:
        if not communicates(eqn):
            return jaxprs.bound(eqn, given)
        inner = jaxprs.called(eqn)
        if inner is not None and jaxprs.has(inner, _holds_collectives):
            return self.evaluated(inner, given)
        holds = _holds_collectives(eqn)
        if holds and self._before:
            self._go_on_after(self._before)
        if self._follows:
            # Of a condition, what it chooses by: the rest is not copied.
            waiting = 1 if eqn.primitive.name == "cond" else len(given)
            dtypes = [var.aval.dtype for var in eqn.invars[:waiting]]
            given = [*map(self._after, given, dtypes), *given[waiting:]]
        results = jaxprs.bound(jaxprs.with_programs(eqn, _written), given)
        if holds:
            self._go_on_after(results)
        else:
            self._before += results
        return results

    def _go_on_after(self, results: Sequence[Any]) -> None:
        """Lets what communicates from now on wait for these."""
        self._zero = unknown.zero_after(results, self._zero)
        self._follows, self._before = True, []

    def _after(self, array: Any, dtype: Any) -> Any:
        """An array that is not known before the zero is."""
        if is_key(array):
            return array
        array = jnp.asarray(array, dtype)
        return lax.select(self._zero == 0, array, jnp.zeros_like(array))
