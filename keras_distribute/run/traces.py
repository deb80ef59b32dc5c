"""A traced function, and the traces for replicas of several shapes as one: their
results are of one kind, and each assigns what any of them does. The programs are joined
by `uneven.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend import core

from keras_distribute.devices.jaxprs import ORIGIN
from keras_distribute.errors import ValueStructureError
from keras_distribute.run import uneven
from keras_distribute.run.arguments import Static, Variant


@dataclasses.dataclass
class Trace:
    """One traced function: its program, from variables and arrays to results and
    assigned values, and what it returned.

    Args:
        structure: The structure of the results.
        leaves: Its leaves: `None` for an array, and other objects as they are.
        written: The variables that it assigns, in the order of its last outputs.
        variant: The shapes that it was traced with, and their replicas.
        shapes: For each result that is an array, the shapes on all replicas where they
            differ, else `None`.
        folded: The numbers whose `psum` JAX computed while tracing, in order; in a
            ragged program.
    """

    program: core.ClosedJaxpr
    structure: Any
    leaves: list[Any]
    written: list[Any]
    variant: Variant
    shapes: list[tuple[tuple[int, ...], ...] | None]
    folded: list[Any]


def joined(traces: Sequence[Trace], variables: Sequence[Any]) -> Trace:
    """One trace from one for each variant."""
    _check_results(traces)
    written = list({id(v): v for trace in traces for v in trace.written}.values())
    programs = [_assigning(trace, written, variables) for trace in traces]
    variant_of = {
        replica: i
        for i, trace in enumerate(traces)
        for replica in trace.variant.replicas
    }
    replicas = sorted(variant_of)
    shapes: list[Any] = []
    for k in range(len(traces[0].shapes)):
        of_variants = [program.jaxpr.outvars[k].aval.shape for program in programs]
        differ = len(set(of_variants)) > 1
        shapes.append(
            tuple(of_variants[variant_of[replica]] for replica in replicas)
            if differ
            else None
        )
    program = uneven.joined(programs, [variant_of[replica] for replica in replicas])
    return dataclasses.replace(
        traces[0], program=program, written=written, shapes=shapes
    )


def _assigning(
    trace: Trace, written: Sequence[Any], variables: Sequence[Any]
) -> core.ClosedJaxpr:
    """The trace's program, which assigns all of `written`: to some their own value,
    which this variant leaves alone.
    """
    jaxpr = trace.program.jaxpr
    inputs = {id(v): var for v, var in zip(variables, jaxpr.invars, strict=False)}
    results, new = (
        jaxpr.outvars[: len(trace.shapes)],
        jaxpr.outvars[len(trace.shapes) :],
    )
    own = dict(zip(map(id, trace.written), new, strict=True))
    outvars = [*results, *(own.get(id(v), inputs[id(v)]) for v in written)]
    same = core.Jaxpr(
        jaxpr.constvars, jaxpr.invars, outvars, jaxpr.eqns, jaxpr.effects, ORIGIN
    )
    return core.ClosedJaxpr(same, trace.program.consts)


def _check_results(traces: Sequence[Trace]) -> None:
    """Raises where the variants' results are not of one kind."""
    first = traces[0]
    for trace in traces[1:]:
        replicas = first.variant.replicas[0], trace.variant.replicas[0]
        folded = [_folded(t) for t in (first, trace)]
        if len(folded[0]) != len(folded[1]) or not all(map(np.array_equal, *folded)):
            raise ValueStructureError(
                "jax.lax.psum of a number that is known while tracing multiplies it by "
                "the number of replicas; here it differs per replica.",
                received=f"{_numbers(folded[0])} on replica {replicas[0]}, "
                f"{_numbers(folded[1])} on {replicas[1]}.",
                fix='kd.get_replica_context().all_reduce("SUM", x.shape[0]), which '
                "sums the replicas' own numbers.",
            )
        if trace.structure != first.structure:
            raise _result_error(
                replicas, first.structure, trace.structure, "structures"
            )
        forms = list(zip(_forms(first), _forms(trace), strict=True))
        differing = next(
            ((theirs, ours) for theirs, ours in forms if theirs != ours), None
        )
        if differing is not None:
            theirs, ours = (
                form.value if isinstance(form, Static) else form for form in differing
            )
            raise _result_error(replicas, theirs, ours, "results")


def _forms(trace: Trace) -> list[Any]:
    """What must be the same for all variants: the kinds of arrays, and objects."""
    arrays = (
        f"{v.aval.dtype} array of {v.aval.ndim} dimension(s)"
        for v in trace.program.jaxpr.outvars
    )
    return [next(arrays) if leaf is None else leaf for leaf in trace.leaves]


def _folded(trace: Trace) -> list[np.ndarray[Any, Any]]:
    """What was multiplied, but for ones: so replicas are counted."""
    return [array for array in map(np.asarray, trace.folded) if not np.all(array == 1)]


def _numbers(values: Sequence[np.ndarray[Any, Any]]) -> str:
    return ", ".join(str(value) for value in values) or "1"


def _result_error(
    replicas: tuple[int, int], theirs: Any, ours: Any, what: str
) -> ValueStructureError:
    return ValueStructureError(
        f"Replicas with different numbers of rows returned different {what}.",
        received=f"{theirs} from replica {replicas[0]}, {ours} from replica "
        f"{replicas[1]}.",
        fix="return the same from every replica; a number that differs as an array, "
        "keras.ops.convert_to_tensor(x.shape[0]).",
    )
