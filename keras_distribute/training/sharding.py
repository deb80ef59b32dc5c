"""Optimizer state divided among the replicas: each keeps, and updates, its part of the slots.

Known as stage 1 of ZeRO (Rajbhandari et al., 2020, https://arxiv.org/abs/1910.02054) and as weight-update sharding (Xu
et al., 2020, https://arxiv.org/abs/2004.13336). The step says where its slots are, and XLA divides the update
accordingly; each number is computed as it was.
"""

from __future__ import annotations

from typing import Any

from keras_distribute._compat import trainer as compat
from keras_distribute.strategies.base import Strategy
from keras_distribute.training.packing import Packing, Place
from keras_distribute.variables import MirroredVariable


def slot_created(variable: Any) -> None:
    """Divides a new slot, if its strategy says so."""
    if isinstance(variable, MirroredVariable) and variable.distribute_strategy.shards_optimizer_state:
        variable.divide()


def divided_places(trainer: Any, strategy: Strategy) -> list[Place]:
    """The places (group, index) of divided variables in the state of a training step."""
    replicated = strategy.replica_mesh.replicated
    return [
        (g, i)
        for g, group in enumerate(compat.state_variables(trainer, "train"))
        for i, variable in enumerate(group)
        if isinstance(variable, MirroredVariable) and variable.sharding != replicated
    ]


def of_state(trainer: Any, strategy: Strategy, packing: Packing | None) -> Any:
    """Where the parts of a training step's state are, in the form in which it is carried."""
    mesh = strategy.replica_mesh
    groups = tuple(
        [variable.sharding if isinstance(variable, MirroredVariable) else mesh.replicated for variable in group]
        for group in compat.state_variables(trainer, "train")
    )
    if packing is None:
        return groups
    return packing.shardings(groups)
