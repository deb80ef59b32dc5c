"""A training step traced for devices that need not be there: the program that `fit`
compiles, from shapes alone.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from keras_distribute import context
from keras_distribute._compat import building
from keras_distribute._compat.trainer import TrainState
from keras_distribute.context import Frame, Mode
from keras_distribute.devices.mesh import ReplicaMesh
from keras_distribute.strategies.base import Strategy
from keras_distribute.training.batches import Placed, placed_form
from keras_distribute.training.steps.choose import compiled_step


class Plan(NamedTuple):
    """A training step, traced.

    Args:
        traced: The `jax.stages.Traced` of the program that `fit` would call.
        num_steps: How many steps one call of it runs.
        state: Each array as a `jax.ShapeDtypeStruct` with its sharding.
        batch: The batch on the devices, likewise.
    """

    traced: Any
    num_steps: int
    state: TrainState
    batch: Placed


def build(trainer: Any, strategy: Strategy, batch: Any) -> None:
    """Creates the variables that `fit` would create for the first batch."""
    with context.entered(Frame(strategy, Mode.CROSS)):
        building.build(trainer, batch)


def training_step(
    trainer: Any, strategy: Strategy, mesh: ReplicaMesh, batch: Any
) -> Plan:
    """Traces the training step of `trainer` for the devices of `mesh`.

    Args:
        batch: The global batch that a step takes: arrays, or `jax.ShapeDtypeStruct`s.
    """
    placement = dataclasses.replace(strategy.placement, mesh=mesh)
    with context.entered(Frame(strategy, Mode.CROSS, placement=placement)):
        step = compiled_step(strategy, trainer, "train").programs
        state = step.form_of_groups(mesh)
        placed = placed_form(batch, mesh)
        with building.seen_as(mesh.devices):
            traced, num_steps = step.traced(state, placed, trainer.steps_per_execution)
    return Plan(traced, num_steps, TrainState(*state), placed)
