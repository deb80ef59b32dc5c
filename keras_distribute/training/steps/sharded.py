"""Steps on weights that are divided over the replicas (`shard_variables=True`).

Layers read whole weights: a read in the program gathers them, in the dtype that the
layer computes with, and the gradient comes back in parts. `devices/where_used.py` sees
to it that a weight is gathered before the operation that takes it, in the forward and
again in the backward pass, and is not kept in between. The optimizer updates each
replica's part.

Any step, Keras's or the user's own, becomes one over the global batch like that.
`sharded_local.py` has the faster one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from keras_distribute import context
from keras_distribute.devices import where_used
from keras_distribute.devices.mesh import ReplicaMesh
from keras_distribute.strategies.base import Strategy
from keras_distribute.training.steps import state_shardings
from keras_distribute.training.steps.gather import Gather, whole_in_batch
from keras_distribute.training.steps.step_programs import Step

_OF_MODEL = (0, 1)  # The groups of a state that a forward pass takes.


def sharded_step(
    strategy: Strategy, step: Step, groups: Sequence[Sequence[Any]]
) -> Step:
    """A step over the global batch that has no more than a few weights whole at a time.

    Args:
        step: Keras's step, or the user's own.
        groups: The variables behind its state.
    """
    places = set(state_shardings.divided_places(groups))
    late = [
        (g, i) in places and g in _OF_MODEL
        for g, group in enumerate(groups)
        for i in range(len(group))
    ]
    tie = tie_of(strategy.replica_mesh)

    def on_shards(state: Any, data: Any) -> Any:
        leaves, structure = jax.tree.flatten((state, data))
        frame = dataclasses.replace(context.frame(), gather=Gather(whole_in_batch))
        found: dict[str, Any] = {}

        def on_leaves(*leaves: Any) -> list[Any]:
            with context.entered(frame):
                results = step(*jax.tree.unflatten(structure, leaves))
            outputs, found["structure"] = jax.tree.flatten(results)
            return outputs

        program = jax.make_jaxpr(on_leaves)(*leaves)
        is_late = [*late, *[False] * (len(leaves) - len(late))]
        inputs = [
            where_used.Input(leaf) if waits else leaf
            for leaf, waits in zip(leaves, is_late, strict=True)
        ]
        outputs = map(where_used.now, where_used.outputs(program, inputs, tie))
        return jax.tree.unflatten(found["structure"], outputs)

    return on_shards


def tie_of(mesh: ReplicaMesh) -> where_used.Tie:
    """How a gather is kept from being done before the layers that come before."""
    on_cpu = mesh.devices[0].platform == "cpu"
    return where_used.tied_by_select if on_cpu else where_used.tied_by_barrier
