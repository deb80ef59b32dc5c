"""Operations of one replica that ask for its number, also inside of conditions, loops
and what is computed again: a device that has several replicas says which one it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend import core

from keras_distribute.devices.jaxprs import (
    RECOMPUTED,
    bound,
    called,
    evaluated,
    has,
    scan_counts,
    with_constants_given,
    with_one_test,
)
from keras_distribute.errors import ContextError

Rule = Callable[[Any, Sequence[Any]], list[Any]]
"""From an operation and its operands to its results."""


def with_index(replica: Any) -> Rule:
    """What does operations that do not communicate, where the replica's number is
    `replica`, a 32-bit integer.
    """
    holders = {"cond": _cond, "scan": _scan, "while": _while}

    def of_replica(eqn: Any, given: Sequence[Any]) -> list[Any]:
        if eqn.primitive.name == "axis_index":
            return [replica]
        if not _asks(eqn):
            return bound(eqn, given)
        if eqn.primitive.name in holders:
            return list(holders[eqn.primitive.name](eqn, given, of_replica))
        body = called(eqn)
        if body is None:
            raise ContextError(
                "With deterministic=True, a replica's number is not known inside of "
                "every operation.",
                received=f"jax.lax.axis_index inside of {eqn.primitive.name!r}.",
                fix="ask for it outside, and pass it as an argument; or a strategy "
                "without deterministic=True.",
            )
        if eqn.primitive.name in RECOMPUTED:
            return _recomputed(eqn, body, given, replica)
        return evaluated(body, given, of_replica)

    return of_replica


def _asks(eqn: Any) -> bool:
    """Whether there is a question for the replica's number inside."""
    return any(
        has(body, lambda inner: inner.primitive.name == "axis_index")
        for body in core.jaxprs_in_params(eqn.params)
    )


def _function(program: core.ClosedJaxpr, rule: Rule) -> Callable[..., list[Any]]:
    return lambda *inputs: evaluated(program, inputs, rule)


def _cond(eqn: Any, given: Sequence[Any], rule: Rule) -> Sequence[Any]:
    branches = [_function(branch, rule) for branch in eqn.params["branches"]]
    return lax.switch(given[0], branches, *given[1:])


def _scan(eqn: Any, given: Sequence[Any], rule: Rule) -> Sequence[Any]:
    params, body = eqn.params, _function(eqn.params["jaxpr"], rule)
    begin, num_carry = scan_counts(eqn)
    end = begin + num_carry

    def step(carry: Sequence[Any], row: Sequence[Any]) -> Any:
        results = body(*given[:begin], *carry, *row)
        return results[:num_carry], results[num_carry:]

    last, made = lax.scan(
        step,
        list(given[begin:end]),
        list(given[end:]),
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*last, *made]


def _while(eqn: Any, given: Sequence[Any], rule: Rule) -> Sequence[Any]:
    eqn, given = with_one_test(eqn, given)
    params = eqn.params
    goes_on = _function(params["cond_jaxpr"], rule)
    body = _function(params["body_jaxpr"], rule)
    begin = params["cond_nconsts"]
    end = begin + params["body_nconsts"]
    return lax.while_loop(
        lambda carry: goes_on(*given[:begin], *carry)[0],
        lambda carry: body(*given[begin:end], *carry),
        list(given[end:]),
    )


def _recomputed(
    eqn: Any, body: core.ClosedJaxpr, given: Sequence[Any], replica: Any
) -> list[Any]:
    """The operation of a body that takes the number as one more operand."""

    def function(own: Any, *inputs: Any) -> list[Any]:
        return evaluated(body, inputs, with_index(own))

    shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
    own = jax.ShapeDtypeStruct((), "int32")
    program = jax.make_jaxpr(function)(own, *shapes)
    inner = with_constants_given(program.jaxpr)
    key = next(name for name, v in eqn.params.items() if isinstance(v, core.Jaxpr))
    whole = eqn.replace(invars=inner.invars, params={**eqn.params, key: inner})
    return bound(whole, [replica, *given, *program.consts])
