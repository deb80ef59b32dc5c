"""Steps on weights that are divided over the replicas (`shard_variables=True`).

Layers read whole weights: a read in the program gathers them, in the dtype that the
layer computes with, and the gradient comes back in parts. `devices/where_used.py` sees
to it that a weight is gathered before the operation that takes it, in the forward and
again in the backward pass, and is not kept in between. The optimizer updates each
replica's part.

Any step, Keras's or the user's own, is traced over the global batch like that. Where
rows divide `by_rows.py` makes a program of one replica of it, whose collectives are
written down; else XLA decides what is communicated, and may sum whole gradients before
it divides them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend import core

from keras_distribute import context
from keras_distribute.context import Frame
from keras_distribute.devices import where_used
from keras_distribute.devices.by_rows.program import InParts
from keras_distribute.devices.summed_parts import summed_part
from keras_distribute.strategies.base import Strategy
from keras_distribute.training.steps import state_shardings
from keras_distribute.training.steps.gather import Gather, divided_axis
from keras_distribute.training.steps.step_programs import Step

_WEIGHTS, _OTHERS = 0, 1  # The groups of a state that a forward pass takes.


class DividedState:
    """The state of a step, of which each replica has a part.

    Attributes:
        axes: Of each array the dimension that is divided over the replicas, or `None`.
    """

    def __init__(self, strategy: Strategy, groups: Sequence[Sequence[Any]]) -> None:
        self._mesh = strategy.replica_mesh
        places = set(state_shardings.divided_places(groups))
        each = [(g, i) for g, group in enumerate(groups) for i in range(len(group))]
        self.axes = [
            divided_axis(groups[g][i].value_sharding) if (g, i) in places else None
            for g, i in each
        ]
        self._of_model = [*groups[_WEIGHTS], *groups[_OTHERS]]
        self._is_late = [p in places and p[0] in (_WEIGHTS, _OTHERS) for p in each]
        self._is_weight = [g == _WEIGHTS for g, _ in each]

    def frame(self, current: Frame) -> Frame:
        """A frame in which a step is traced."""
        return dataclasses.replace(current, gather=Gather(self._of_model))

    def evaluated(self, program: core.ClosedJaxpr, arrays: Sequence[Any]) -> list[Any]:
        """The results of a traced step, in which few weights are whole at a time.

        Args:
            program: Over the global batch, or of one replica.
            arrays: The inputs, of which the state is the first.
        """
        kinds = zip(arrays, self._is_late, self._is_weight, strict=False)
        inputs = [
            where_used.Input(array)
            if is_late
            else where_used.fixed(array)
            if is_weight
            else array
            for array, is_late, is_weight in kinds
        ]
        given = [*inputs, *arrays[len(inputs) :]]
        # XLA for CPUs gathers or computes, never both.
        if self._mesh.platform == "cpu":
            tie, one_ahead = where_used.tied_by_select, False
        else:
            tie, one_ahead = where_used.tied_by_barrier, True
        return where_used.outputs(program, given, tie, one_ahead=one_ahead)

    def in_parts(self, outputs: Sequence[int]) -> InParts:
        """What a program by rows has to know of it.

        Args:
            outputs: Where the new state is among the results.
        """
        divided = [(i, axis) for i, axis in enumerate(self.axes) if axis is not None]
        return InParts(
            [i for i, _ in divided],
            {outputs[i]: axis for i, axis in divided if i < len(outputs)},
            functools.partial(summed_part, mesh=self._mesh),
        )


def traced(
    step: Step, frame: Frame, structure: Any, leaves: Sequence[Any]
) -> tuple[core.ClosedJaxpr, Any]:
    """A step as a program, and the structure of what it returns.

    Args:
        frame: In which it is traced.
        structure: Of the state and the data.
        leaves: Their arrays, or shapes.
    """
    found: dict[str, Any] = {}

    def on_leaves(*leaves: Any) -> list[Any]:
        with context.entered(frame):
            results = step(*jax.tree.unflatten(structure, leaves))
        outputs, found["structure"] = jax.tree.flatten(results)
        return outputs

    program = jax.make_jaxpr(on_leaves)(*leaves)
    return program, found["structure"]


def sharded_step(step: Step, state: DividedState) -> Step:
    """A step over the global batch, as XLA divides it."""

    def on_shards(values: Any, data: Any) -> Any:
        leaves, structure = jax.tree.flatten((values, data))
        frame = state.frame(context.frame())
        program, returned = traced(step, frame, structure, leaves)
        return jax.tree.unflatten(returned, state.evaluated(program, leaves))

    return on_shards
