"""Tools for traced functions: what an operation calls, a function without calls, and
the part of a function that makes some of its values.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax import lax
from jax.extend import core

# JAX wants to know where a program is from.
ORIGIN = core.DebugInfo("keras_distribute", "a part of a function", None, None)

CALLS = {
    "jit",
    "pjit",
    "closed_call",
    "core_call",
    "custom_jvp_call",
    "custom_vjp_call",
    "custom_vjp_call_jaxpr",
    "eval_jaxpr",
}
"""Operations that call a function once, with their own arguments."""

RECOMPUTED = {"checkpoint", "remat", "remat2"}
"""Those that do, and save memory where they are kept whole."""


def called(eqn: Any) -> core.ClosedJaxpr | None:
    """The function that an operation calls; `None` for one that does not only that."""
    if eqn.primitive.name not in CALLS | RECOMPUTED:
        return None
    for value in eqn.params.values():
        if isinstance(value, core.ClosedJaxpr):
            return value
        if isinstance(value, core.Jaxpr):
            return core.ClosedJaxpr(value, [])
    return None


def has(
    program: Any, is_wanted: Callable[[Any], bool], but_in: Collection[str] = ()
) -> bool:
    """Whether an operation of a traced program, or of one inside it, is wanted.

    Args:
        but_in: Names of operations whose programs are not looked at.
    """
    for eqn in getattr(program, "jaxpr", program).eqns:
        if is_wanted(eqn):
            return True
        inside = core.jaxprs_in_params(eqn.params)
        if eqn.primitive.name not in but_in and any(
            has(inner, is_wanted, but_in) for inner in inside
        ):
            return True
    return False


def scan_counts(eqn: Any) -> tuple[int, int]:
    """How many constants a `lax.scan` has, and how many values it carries.

    They are told from what it takes apart and stacks up by their dimensions, which are
    as many inside as outside: JAX 0.12 has other names for it than JAX 0.11.
    """
    body = eqn.params["jaxpr"].jaxpr

    def whole(outer: Sequence[Any], inner: Sequence[Any]) -> int:
        pairs = zip(outer, inner, strict=True)
        return sum(o.aval.ndim == i.aval.ndim for o, i in pairs)

    num_carry = whole(eqn.outvars, body.outvars)
    return whole(eqn.invars, body.invars) - num_carry, num_carry


def with_one_test(eqn: Any, given: Sequence[Any]) -> tuple[Any, list[Any]]:
    """A loop of unknown length, and its operands, with one test for all that it goes
    through: `jax.vmap` leaves it with a test of each, whose values then stay.
    """
    test, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
    if test.out_avals[0].shape == ():
        return eqn, list(given)
    tested = eqn.params["cond_nconsts"]
    fixed = tested + eqn.params["body_nconsts"]

    def goes_on(*inputs: Any) -> Any:
        return jnp.any(evaluated(test, inputs)[0])

    def step(*inputs: Any) -> list[Any]:
        before = inputs[fixed:]
        goes = evaluated(test, [*inputs[:tested], *before])[0]
        return [
            lax.select(lax.broadcast_in_dim(goes, a.shape, range(goes.ndim)), a, b)
            for a, b in zip(evaluated(body, inputs[tested:]), before, strict=True)
        ]

    shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
    params = {
        **eqn.params,
        "cond_jaxpr": jax.make_jaxpr(goes_on)(*shapes[:tested], *shapes[fixed:]),
        "body_jaxpr": jax.make_jaxpr(step)(*shapes),
        "body_nconsts": fixed,
    }
    invars = [*eqn.invars[:tested], *eqn.invars]
    return eqn.replace(invars=invars, params=params), [*given[:tested], *given]


def bound(eqn: Any, given: Sequence[Any]) -> list[Any]:
    """The results of an operation for other operands."""
    invars = [core.Var(atom.aval) for atom in eqn.invars]
    outvars = [core.Var(var.aval) for var in eqn.outvars]
    eqn = eqn.replace(invars=invars, outvars=outvars)
    alone = core.Jaxpr((), invars, outvars, [eqn], eqn.effects, ORIGIN)
    return core.jaxpr_as_fun(core.ClosedJaxpr(alone, ()))(*given)


def evaluated(
    program: core.ClosedJaxpr,
    inputs: Sequence[Any],
    rule: Callable[[Any, list[Any]], list[Any]] = bound,
    literal: Callable[[core.Literal], Any] = lambda atom: atom.val,
) -> list[Any]:
    """The outputs for some inputs.

    Args:
        inputs: Anything that `rule` understands.
        rule: From an operation and its operands to its results.
        literal: From a number that stands in the program to such an operand.
    """
    jaxpr = program.jaxpr
    known = dict(zip(jaxpr.constvars, program.consts, strict=True))
    known |= dict(zip(jaxpr.invars, inputs, strict=True))

    def value_of(atom: Any) -> Any:
        return literal(atom) if isinstance(atom, core.Literal) else known[atom]

    for eqn in jaxpr.eqns:
        results = rule(eqn, list(map(value_of, eqn.invars)))
        known.update(zip(eqn.outvars, results, strict=True))
    return list(map(value_of, jaxpr.outvars))


def with_programs(
    eqn: Any, change: Callable[[core.ClosedJaxpr], core.ClosedJaxpr]
) -> Any:
    """An operation with others in the place of the programs that it holds. Those that
    combine two numbers, as in a reduction, are left alone.
    """

    def is_program(value: Any) -> bool:
        return isinstance(value, core.ClosedJaxpr)

    def holds(value: Any) -> bool:
        several = value if isinstance(value, tuple) else (value,)
        return any(map(is_program, several))

    def changed(value: Any) -> Any:
        return change(value) if is_program(value) else value

    found = {
        name: jax.tree.map(changed, value, is_leaf=is_program)
        for name, value in eqn.params.items()
        if holds(value)
    }
    again = called(eqn) if eqn.primitive.name in RECOMPUTED else None
    if again is not None:
        found["jaxpr"] = change(again).jaxpr
    return eqn.replace(params={**eqn.params, **found}) if found else eqn


def traced_again(
    program: core.ClosedJaxpr, change: Callable[[Any], Any]
) -> core.ClosedJaxpr:
    """A program of changed operations, as it is traced where this is called."""

    def rule(eqn: Any, given: list[Any]) -> list[Any]:
        return bound(change(eqn), given)

    return retraced(program, rule)


def retraced(
    program: core.ClosedJaxpr, rule: Callable[[Any, list[Any]], list[Any]]
) -> core.ClosedJaxpr:
    """What `evaluated` computes, as a program."""

    def outputs(*inputs: Any) -> list[Any]:
        return evaluated(program, inputs, rule)

    return jax.make_jaxpr(outputs)(*_shapes(program.in_avals))


def with_replaced(
    program: core.ClosedJaxpr,
    change: Callable[[Any], Any],
    axes: Sequence[tuple[str, int]] = (),
) -> core.ClosedJaxpr:
    """A program with some of its operations replaced. The others are not traced again.

    Args:
        change: From an operation to the one that it is to be, or to a function from
            its operands to its results.
        axes: Those over which it communicates, with their lengths.
    """
    jaxpr = program.jaxpr
    constants = dict(zip(jaxpr.constvars, program.consts, strict=True))
    eqns: list[Any] = []

    def kept(eqn: Any, given: list[Any]) -> list[Any]:
        eqns.append(eqn.replace(invars=given))
        return eqn.outvars

    def results(eqn: Any, given: list[Any]) -> list[Any]:
        new = change(eqn)
        if not callable(new):
            return kept(new, given)
        variables = [atom for atom in given if not isinstance(atom, core.Literal)]

        def outputs(*values: Any) -> Any:
            left = iter(values)
            return new(
                *(a.val if isinstance(a, core.Literal) else next(left) for a in given)
            )

        traced = jax.make_jaxpr(outputs, axis_env=list(axes))(
            *_shapes([variable.aval for variable in variables])
        )
        constants.update(zip(traced.jaxpr.constvars, traced.consts, strict=True))
        return in_variables(traced.jaxpr, traced.jaxpr.constvars, variables, kept)

    outvars = in_variables(jaxpr, jaxpr.constvars, jaxpr.invars, results)
    made = core.Jaxpr(
        list(constants), jaxpr.invars, outvars, eqns, jaxpr.effects, jaxpr.debug_info
    )
    return core.ClosedJaxpr(made, list(constants.values()))


def in_variables(
    jaxpr: core.Jaxpr,
    constants: Sequence[Any],
    inputs: Sequence[Any],
    rule: Callable[[Any, list[Any]], list[Any]],
) -> list[Any]:
    """The variables of a program's outputs, for those of its constants and inputs.

    Args:
        rule: From an operation and the variables of its operands to those of its
            results.
    """
    program = core.ClosedJaxpr(jaxpr, constants)
    return evaluated(program, inputs, rule, lambda atom: atom)


def _shapes(avals: Sequence[Any]) -> list[Any]:
    return [
        jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in avals
    ]


def by_changed_program(
    function: Callable[..., Any], change: Callable[[Any], core.ClosedJaxpr]
) -> Callable[..., Any]:
    """The same function by another program.

    Args:
        change: From the program of the function to that.
    """

    def called_again(*args: Any) -> Any:
        program, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        results = core.jaxpr_as_fun(change(program))(*jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return called_again


def inlined(program: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """The same function without calls."""

    def rule(eqn: Any, given: list[Any]) -> list[Any]:
        inner = called(eqn)
        return bound(eqn, given) if inner is None else evaluated(inner, given, rule)

    return retraced(program, rule)


def part_of(
    program: core.ClosedJaxpr, outputs: Sequence[Any]
) -> tuple[core.ClosedJaxpr, list[int]]:
    """The function of the inputs that makes some variables inside of a program.

    Returns:
        The function, of all inputs, and the indices of those that it needs.
    """
    jaxpr = program.jaxpr
    needed = {v for v in outputs if not isinstance(v, core.Literal)}
    eqns: list[Any] = []
    for eqn in reversed(jaxpr.eqns):
        if needed.intersection(eqn.outvars):
            eqns.append(eqn)
            needed |= {v for v in eqn.invars if not isinstance(v, core.Literal)}
    alone = core.Jaxpr(
        jaxpr.constvars, jaxpr.invars, list(outputs), eqns[::-1], debug_info=ORIGIN
    )
    taken = [i for i, v in enumerate(jaxpr.invars) if v in needed]
    return core.ClosedJaxpr(alone, program.consts), taken


def between(
    program: core.ClosedJaxpr, given: Sequence[Any], outputs: Sequence[Any]
) -> core.ClosedJaxpr | None:
    """The function that makes some variables inside of a program from others of them;
    `None` where it needs more than those, and numbers.

    Args:
        given: What it takes.
        outputs: What it makes.
    """
    jaxpr = program.jaxpr
    known = {v for v in given if not isinstance(v, core.Literal)}
    needed = {v for v in outputs if not isinstance(v, core.Literal)} - known
    eqns: list[Any] = []
    for eqn in reversed(jaxpr.eqns):
        if needed.intersection(eqn.outvars):
            made = [core.Var(v.aval) if v in known else v for v in eqn.outvars]
            eqns.append(eqn.replace(outvars=made))
            taken = {v for v in eqn.invars if not isinstance(v, core.Literal)}
            needed |= taken - known
    constants = dict(zip(jaxpr.constvars, program.consts, strict=True))
    used = {v: value for v, value in constants.items() if v in needed}
    is_traced = any(isinstance(value, jax.core.Tracer) for value in used.values())
    if is_traced or needed.intersection(jaxpr.invars):
        return None
    left = set(known)
    invars: list[Any] = []
    for v in given:  # Of what is given twice, or a number, the first counts.
        is_new = not isinstance(v, core.Literal) and v in left
        invars.append(v if is_new else core.Var(v.aval))
        if is_new:
            left.remove(v)
    alone = core.Jaxpr(list(used), invars, list(outputs), eqns[::-1], debug_info=ORIGIN)
    return core.ClosedJaxpr(alone, list(used.values()))


def with_constants_given(jaxpr: core.Jaxpr) -> core.Jaxpr:
    """The same function, of its inputs and then its constants."""
    return core.Jaxpr(
        (),
        [*jaxpr.invars, *jaxpr.constvars],
        jaxpr.outvars,
        jaxpr.eqns,
        jaxpr.effects,
        jaxpr.debug_info,
    )
