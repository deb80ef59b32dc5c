"""A step over the global batch as one of each replica's rows.

The step, Keras's or the user's own, is traced over all rows as it is, and
`devices/by_rows` makes a program of one replica of it, if no operation mixes rows.
Where one does, the step stays what it is, and XLA divides it; or each device computes
all of it, if it is to have the same bits on any number of devices (`in_series.py`).

Where an optimizer accumulates gradients, each replica adds up its own, and they are
summed over the replicas on the last micro-step only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core

from keras_distribute import context
from keras_distribute.devices import jaxprs
from keras_distribute.devices.by_rows import program, sums
from keras_distribute.devices.memory_order import as_weights
from keras_distribute.strategies.base import Strategy
from keras_distribute.training.replica_rules import GRADIENT
from keras_distribute.training.steps import accumulating
from keras_distribute.training.steps.accumulating import SLOTS
from keras_distribute.training.steps.in_series import whole_on_each
from keras_distribute.training.steps.sharded import DividedState, sharded_step, traced
from keras_distribute.training.steps.step_programs import Step
from keras_distribute.values import reductions
from keras_distribute.values.cross_device_ops import NcclAllReduce

Told = Callable[[program.MixedRows | None], None]


class Watched(NamedTuple):
    """What a step returns in the place of its logs, if it is watched.

    Args:
        own: What the watch returns, of each replica, along axis 0; nothing for a step
            over the global batch.
    """

    logs: Any
    own: list[Any]


def step_by_rows(
    strategy: Strategy,
    step: Step,
    told: Told,
    watch: program.Watch | None = None,
    accumulators: Sequence[int] = (),
    divided: DividedState | None = None,
) -> Step:
    """A step that each replica computes on its own rows.

    Args:
        step: Over the global batch.
        told: Is given what mixes rows, or `None`, each time that a step is traced.
        watch: Sees what each replica gives to the sum of each gradient; the logs are
            `Watched` then.
        accumulators: Where the state has gradient accumulators among its slots, each
            with an axis for the replicas.
        divided: The state, if it has weights that are divided over the replicas.
    """
    mesh, whole = strategy.replica_mesh, step
    if mesh.series is not None:
        whole = whole_on_each(mesh, step, accumulators)
    elif divided is not None:
        whole = sharded_step(step, divided)
    else:
        whole = accumulating.on_sums(step, accumulators, mesh.num_replicas)

    def on_rows(state: Any, data: Any) -> Any:
        batch = context.frame().batch
        replicas = mesh.num_replicas
        if batch is None or batch.replicated:
            return whole(state, data)
        if batch.shards != replicas and mesh.series is None:
            return whole(state, data)
        leaves, structure = jax.tree.flatten((state, data))
        places = jax.tree.unflatten(structure, range(len(leaves)))
        kept = _places(places[0], accumulators)
        num_state = len(jax.tree.leaves(state))
        rows = _axes_of_rows(leaves, num_state, batch.rows)
        if not any(dim == 0 for dim in rows):  # Data that is sparse, and nothing else.
            return whole(state, data)
        frame = dataclasses.replace(context.frame(), accumulates=bool(kept))
        if divided is not None:
            frame, rows = divided.frame(frame), [*divided.axes, *rows[num_state:]]
        found, returned = traced(step, frame, structure, _shapes(leaves, kept))
        # Constants, too, may be on devices of which a replica knows but one.
        consts, count = found.consts, len(found.out_avals)
        leaves, rows = [*leaves, *consts], [*rows, *[None] * len(consts)]
        over_all = core.ClosedJaxpr(jaxprs.with_constants_given(found.jaxpr), ())
        _, new_places = jax.tree.unflatten(returned, range(count))
        sums_kept = program.Kept(kept, _places(new_places, accumulators))
        in_parts = None
        if divided is not None:
            in_parts = divided.in_parts(jax.tree.leaves(new_places))
        own = _of_one_replica(
            strategy, over_all, rows, told, watch, sums_kept, in_parts
        )
        evaluated = None if divided is None else divided.evaluated
        if own is None and mesh.series is not None:
            return whole(state, data)
        if own is None:
            outputs = _over_all_rows(over_all, leaves, sums_kept, replicas, evaluated)
        else:
            split = [0 if i in kept else dim for i, dim in enumerate(rows)]
            outputs = sums.results_of(mesh, own, split, leaves, evaluated)
        logs, new = jax.tree.unflatten(returned, outputs[:count])
        return (logs if watch is None else Watched(logs, outputs[count:])), new

    return on_rows


def _axes_of_rows(
    leaves: Sequence[Any], num_state: int, num_rows: int
) -> list[int | None]:
    """Along which axis each array has the batch's rows; the state, first, has none."""
    return [
        0 if i >= num_state and jnp.shape(leaf)[:1] == (num_rows,) else None
        for i, leaf in enumerate(leaves)
    ]


def _shapes(leaves: Sequence[Any], kept: Container[int]) -> list[Any]:
    """Of each array, as a replica sees it: accumulators without the replicas' axis."""
    return [
        jax.ShapeDtypeStruct(jnp.shape(leaf)[1 if i in kept else 0 :], leaf.dtype)
        for i, leaf in enumerate(leaves)
    ]


def _of_one_replica(
    strategy: Strategy,
    over_all: core.ClosedJaxpr,
    rows: Sequence[int | None],
    told: Told,
    watch: program.Watch | None,
    kept: program.Kept,
    in_parts: program.InParts | None,
) -> program.OneReplica | None:
    """One replica's program of a step; `None` where rows mix."""
    ops, dtype = (
        strategy.extended.cross_device_ops,
        strategy.placement.communication_dtype,
    )

    def sum_of_gradient(own: Any, of_rows: Callable[[], Any] | None) -> Any:
        if of_rows is not None and type(ops) is NcclAllReduce:
            total = of_rows()  # Another one may add as its user wants.
        else:
            total = reductions.sum_gradients(ops, [own], dtype)[0]
        return as_weights(total, mesh) if in_parts is None else total

    mesh, named = strategy.replica_mesh, {GRADIENT: sum_of_gradient}
    try:
        with mesh.tracing():
            own = program.of_one_replica(
                over_all, rows, mesh.num_replicas, named, watch, kept, in_parts, dtype
            )
    except program.MixedRows as mixed:
        told(mixed)
        return None
    told(None)
    return own


def _over_all_rows(
    over_all: core.ClosedJaxpr,
    leaves: Sequence[Any],
    kept: program.Kept,
    replicas: int,
    evaluated: sums.Evaluated | None,
) -> list[Any]:
    """The results of a step whose rows mix."""
    whole = [
        jnp.sum(leaf, 0) if i in kept.inputs else leaf for i, leaf in enumerate(leaves)
    ]
    if evaluated is None:
        results = core.jaxpr_as_fun(over_all)(*whole)
    else:
        results = evaluated(over_all, whole)
    return [
        accumulating.of_first(result, replicas) if i in kept.outputs else result
        for i, result in enumerate(results)
    ]


def _places(groups: Any, accumulators: Sequence[int]) -> list[int]:
    """Of the groups of a state's places, those of the accumulators."""
    return [list(groups)[SLOTS][i] for i in accumulators]
