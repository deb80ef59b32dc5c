"""One replica's program in two parts: what has to do with rows, and sums over the
replicas; and what follows from the sums, the same for all replicas, which is outside.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.sharding import PartitionSpec

from keras_distribute.devices import jaxprs
from keras_distribute.devices.axes import REPLICA_AXIS
from keras_distribute.devices.by_rows.program import OneReplica
from keras_distribute.devices.mesh import ReplicaMesh
from keras_distribute.devices.over_replicas import over_replicas
from keras_distribute.devices.replication_proof import communicates, equal_results

Evaluated = Callable[[core.ClosedJaxpr, Sequence[Any]], list[Any]]


@dataclasses.dataclass(frozen=True)
class Parts:
    """A program of one replica in two parts.

    Args:
        inside: Of what a replica has, to be run on each.
        taken: Which inputs of the whole program it takes.
        outside: Of values that are the same for all replicas, from the inputs of the
            whole program and then the results of `inside`.
        inner: How many results of `inside` are for `outside`: the first ones, the same
            for all replicas. Those of the whole program follow.
        made: For each result of the whole program, whether it is from `inside`.
    """

    inside: core.ClosedJaxpr
    taken: Sequence[int]
    outside: core.ClosedJaxpr
    inner: int
    made: Sequence[bool]


def results_of(
    mesh: ReplicaMesh,
    own: OneReplica,
    rows: Sequence[int | None],
    arrays: Sequence[Any],
    evaluated: Evaluated | None = None,
) -> list[Any]:
    """The results of the program over all rows that one replica's stands for.

    Args:
        rows: Of each input the dimension that is divided over the replicas, or `None`.
        evaluated: From a program and its inputs to its results, if not by itself.

    Nothing is outside then; nor where each device runs several replicas, since
    `in_series.py` divides the whole program itself.
    """
    arrays = [_filled(a, dim, mesh) for a, dim in zip(arrays, rows, strict=True)]
    if evaluated is None and mesh.series is not None:
        evaluated = _by_itself
    if evaluated is not None:
        results = over_replicas(
            mesh,
            lambda *given: evaluated(own.program, given),
            in_specs=tuple(map(_spec, rows)),
            out_specs=list(map(_spec, own.rows)),
        )(*arrays)
        return list(map(_true, results, own.rows, own.sizes))
    both = parts(own.program, [dim is None for dim in rows])
    direct = [dim for dim, made in zip(own.rows, both.made, strict=True) if made]
    results = over_replicas(
        mesh,
        core.jaxpr_as_fun(both.inside),
        in_specs=tuple(_spec(rows[i]) for i in both.taken),
        out_specs=[*[PartitionSpec()] * both.inner, *map(_spec, direct)],
    )(*(arrays[i] for i in both.taken))
    others = iter(core.jaxpr_as_fun(both.outside)(*arrays, *results[: both.inner]))
    inside = iter(results[both.inner :])
    found = [next(inside if made else others) for made in both.made]
    return list(map(_true, found, own.rows, own.sizes))


def parts(program: core.ClosedJaxpr, equal: Sequence[bool]) -> Parts:
    """The two parts of a program.

    Args:
        equal: For each of its inputs, whether it is the same on every replica.
    """
    jaxpr = program.jaxpr
    same = dict(zip(jaxpr.invars, equal, strict=True))
    same |= dict.fromkeys(jaxpr.constvars, True)
    is_inside = []
    for eqn in jaxpr.eqns:
        results = equal_results(
            eqn, [isinstance(v, core.Literal) or same[v] for v in eqn.invars]
        )
        same.update(zip(eqn.outvars, results, strict=True))
        is_inside.append(communicates(eqn) or not all(results))
    results_of = [v for v in jaxpr.outvars if not isinstance(v, core.Literal)]
    used = set(results_of)
    needed: set[Any] = set()  # By what is inside.
    inner_eqns, outer_eqns = [], []
    for eqn, inside in zip(reversed(jaxpr.eqns), reversed(is_inside), strict=True):
        if not used.intersection(eqn.outvars) and not eqn.effects:
            continue
        inputs = {v for v in eqn.invars if not isinstance(v, core.Literal)}
        used |= inputs
        if inside or needed.intersection(eqn.outvars):
            needed |= inputs
            inner_eqns.append(eqn)
        else:
            outer_eqns.append(eqn)
    inner_eqns, outer_eqns = inner_eqns[::-1], outer_eqns[::-1]
    made = {v for eqn in inner_eqns for v in eqn.outvars}
    is_made = [v in made for v in map(_key, jaxpr.outvars)]
    wanted = [v for eqn in outer_eqns for v in eqn.invars if _key(v) in made]
    wanted = list(dict.fromkeys(wanted))
    direct = [v for v, own in zip(jaxpr.outvars, is_made, strict=True) if own]
    taken = [i for i, v in enumerate(jaxpr.invars) if v in needed]
    inside = core.Jaxpr(
        jaxpr.constvars,
        [jaxpr.invars[i] for i in taken],
        [*wanted, *direct],
        inner_eqns,
        debug_info=jaxprs.ORIGIN,
    )
    others = [v for v, own in zip(jaxpr.outvars, is_made, strict=True) if not own]
    outside = core.Jaxpr(
        jaxpr.constvars,
        [*jaxpr.invars, *wanted],
        others,
        outer_eqns,
        debug_info=jaxprs.ORIGIN,
    )
    return Parts(
        core.ClosedJaxpr(inside, program.consts),
        taken,
        core.ClosedJaxpr(outside, program.consts),
        len(wanted),
        is_made,
    )


def _by_itself(program: core.ClosedJaxpr, arrays: Sequence[Any]) -> list[Any]:
    return core.jaxpr_as_fun(program)(*arrays)


def _filled(array: Any, dim: int | None, mesh: ReplicaMesh) -> Any:
    """An array with copies of its last row, so that replicas have equally many."""
    if dim is None or array.shape[dim] % mesh.num_replicas == 0:
        return array
    missing = -array.shape[dim] % mesh.num_replicas
    last = lax.slice_in_dim(array, array.shape[dim] - 1, None, axis=dim)
    return jnp.concatenate([array, *[last] * missing], axis=dim)


def _true(array: Any, dim: int | None, size: int | None) -> Any:
    """A result, without what is behind its true rows."""
    if dim is None or array.shape[dim] == size:
        return array
    return lax.slice_in_dim(array, 0, size, axis=dim)


def _spec(dim: int | None) -> PartitionSpec:
    return PartitionSpec(*([None] * (dim or 0)), *([REPLICA_AXIS] * (dim is not None)))


def _key(atom: Any) -> Any:
    return None if isinstance(atom, core.Literal) else atom
