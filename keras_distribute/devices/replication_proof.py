"""Proves which values of a traced program are the same on every replica. Knows no
Keras.

`shard_map` without its own checks lets an array that differs per device pass as
replicated, silently; with them, common programs (a Keras LSTM) are refused and
gradients change meaning. This analysis is one-sided: a value that it calls equal is
equal, by this rule: an operation whose inputs are equal on every replica gives equal
outputs; so does one that combines all replicas (`psum`, `all_gather`, ...). Any other
operation over the replicas (`axis_index`, `ppermute`, `psum_scatter`, ...) and any call
back into Python counts as different.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend import core

from keras_distribute.devices import jaxprs
from keras_distribute.devices.axes import REPLICA_AXIS
from keras_distribute.errors import ContextError

_COMBINING = {
    "psum",
    "psum_invariant",
    "pmax",
    "pmin",
    "all_gather",
    "all_gather_invariant",
    "pbroadcast",
}


def equal_on_all_replicas(
    program: core.ClosedJaxpr, inputs: Sequence[bool]
) -> list[bool]:
    """Which outputs of `program` are the same on every replica.

    Args:
        inputs: For each of its inputs, whether it is the same on every replica.
    """
    return _outputs(program.jaxpr, list(inputs))


def _outputs(jaxpr: Any, inputs: Sequence[bool]) -> list[bool]:
    program = core.ClosedJaxpr(jaxpr, [True] * len(jaxpr.constvars))
    return jaxprs.evaluated(program, inputs, equal_results, lambda _: True)


def equal_results(eqn: Any, inputs: list[bool]) -> list[bool]:
    """Which results of an operation are the same on every replica.

    Args:
        inputs: For each of its operands, whether it is the same on every replica.
    """
    name, count = eqn.primitive.name, len(eqn.outvars)
    if name in _COMBINING and eqn.params.get("axis_index_groups") is None:
        return [True] * count
    params = eqn.params
    if name == "cond":
        index, operands = inputs[0], inputs[1:]
        if not index:
            _refuse_collectives(
                [branch.jaxpr for branch in params["branches"]], "a condition"
            )
        branches = [_outputs(branch.jaxpr, operands) for branch in params["branches"]]
        return [index and all(results) for results in zip(*branches, strict=True)]
    if name == "while":
        return _while(params, inputs)
    if name == "scan":
        return _scan(eqn, inputs)
    has_body = any(map(_holds_jaxpr, params.values()))
    if not has_body and _differs_by_itself(eqn):
        return [False] * count
    inner = _called(params, len(inputs), count)
    if inner is not None:
        return _outputs(inner, inputs)
    if has_body:
        # An operation with a body that this analysis does not know: equal inputs still
        # give equal outputs, unless something in the body differs by itself.
        return [all(inputs) and not _holds_difference(eqn)] * count
    return [all(inputs)] * count


def _while(params: Any, inputs: list[bool]) -> list[bool]:
    cond_n, body_n = params["cond_nconsts"], params["body_nconsts"]
    cond_consts, body_consts = inputs[:cond_n], inputs[cond_n : cond_n + body_n]
    carry = inputs[cond_n + body_n :]
    while True:
        runs_alike = _outputs(params["cond_jaxpr"].jaxpr, [*cond_consts, *carry])[0]
        after = _outputs(params["body_jaxpr"].jaxpr, [*body_consts, *carry])
        if not runs_alike:
            _refuse_collectives(
                [params["cond_jaxpr"].jaxpr, params["body_jaxpr"].jaxpr],
                "the length of a loop",
            )
        new = [
            runs_alike and before and result
            for before, result in zip(carry, after, strict=True)
        ]
        if new == carry:
            return carry
        carry = new


def _scan(eqn: Any, inputs: list[bool]) -> list[bool]:
    body = eqn.params["jaxpr"].jaxpr
    consts_n, carry_n = jaxprs.scan_counts(eqn)
    consts, carry = inputs[:consts_n], inputs[consts_n : consts_n + carry_n]
    xs = inputs[consts_n + carry_n :]
    while True:
        outputs = _outputs(body, [*consts, *carry, *xs])
        new = [
            before and result
            for before, result in zip(carry, outputs[:carry_n], strict=True)
        ]
        if new == carry:
            return [*carry, *outputs[carry_n:]]
        carry = new


def _called(params: Any, num_inputs: int, num_outputs: int) -> Any:
    """The body of an operation that only calls it (`jit`, `remat`, ...), or `None`."""
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        body = params.get(key)
        jaxpr = getattr(body, "jaxpr", body)
        if jaxpr is not None and hasattr(jaxpr, "eqns"):
            fits = len(jaxpr.invars) == num_inputs and len(jaxpr.outvars) == num_outputs
            return jaxpr if fits else None
    return None


def _holds_jaxpr(value: Any) -> bool:
    return hasattr(value, "eqns") or hasattr(value, "jaxpr")


def _refuse_collectives(bodies: Sequence[Any], what: str) -> None:
    """Raises where only some replicas would reach a collective, and wait forever."""
    if any(communicates(eqn) for body in bodies for eqn in body.eqns):
        raise ContextError(
            f"Replicas would wait for each other forever: {what} differs by replica, "
            "and inside it they communicate.",
            received="a collective (all_reduce, all_gather, an aggregated assignment, "
            "...) under lax.cond or a loop.",
            fix="communicate outside of it, and choose with keras.ops.where; or make "
            "the condition the same on all "
            "replicas: kd.get_replica_context().all_reduce(...).",
        )


def _over_replicas(eqn: Any) -> bool:
    axes = [eqn.params.get("axis_name", ()), eqn.params.get("axes", ())]
    return any(
        REPLICA_AXIS in (names if isinstance(names, tuple | list) else [names])
        for names in axes
    )


def communicates(eqn: Any) -> bool:
    """Whether an operation, or one inside it, needs the other replicas."""
    if _over_replicas(eqn) and eqn.primitive.name != "axis_index":
        return True
    return any(communicates(inner) for body in _bodies(eqn) for inner in body.eqns)


def _bodies(eqn: Any) -> list[Any]:
    values = [
        item
        for value in eqn.params.values()
        for item in (value if isinstance(value, tuple | list) else [value])
    ]
    return [getattr(item, "jaxpr", item) for item in values if _holds_jaxpr(item)]


def is_stateful(eqn: Any) -> bool:
    """Whether an operation may give another result each time, or has side effects."""
    return (
        bool(eqn.effects)
        or "callback" in eqn.primitive.name
        or eqn.primitive.name == "rng_uniform"
    )


def _differs_by_itself(eqn: Any) -> bool:
    """Whether an operation may differ on each replica for the same inputs."""
    return _over_replicas(eqn) or is_stateful(eqn)


def differs(eqn: Any) -> bool:
    """The same of an operation and those inside it."""
    return _differs_by_itself(eqn) or _holds_difference(eqn)


def _holds_difference(eqn: Any) -> bool:
    return any(
        _differs_by_itself(inner) or _holds_difference(inner)
        for body in _bodies(eqn)
        for inner in body.eqns
    )
