"""State that is not on every device: weights and slots divided over logical devices,
slots divided among the replicas.

Of divided slots each replica keeps, and updates, its part.

Known as stage 1 of ZeRO (Rajbhandari et al., 2020, https://arxiv.org/abs/1910.02054)
and as weight-update sharding (Xu et al., 2020, https://arxiv.org/abs/2004.13336). The
step says where its slots are, and XLA divides the update accordingly; each number is
computed as it was.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from keras_distribute import context
from keras_distribute.checks import bytes_in_words, listed
from keras_distribute.devices.mesh import ReplicaMesh
from keras_distribute.devices.placement import num_bytes
from keras_distribute.errors import VariableScopeError
from keras_distribute.strategies.base import Strategy
from keras_distribute.training.steps.packed_state import Place, State
from keras_distribute.variables import DistributedVariable, MirroredVariable


def check_slot_of(weight: Any) -> None:
    """Raises where an optimizer would have slots outside of its weights' strategy."""
    if isinstance(weight, DistributedVariable) and not context.has_strategy():
        raise VariableScopeError(
            f"The slots of an optimizer are created where its weights are: "
            f"{weight.path!r} belongs to a strategy.",
            received="optimizer.build(...) outside of its scope.",
            fix="with strategy.scope(): optimizer = ...; optimizer.build(variables)",
        )


def slot_created(variable: Any) -> None:
    """Divides a new slot, if its strategy says so."""
    if (
        isinstance(variable, MirroredVariable)
        and variable.distribute_strategy.placement.shard_optimizer_state
    ):
        variable.divide()


def divided_places(groups: Sequence[Sequence[Any]]) -> list[Place]:
    """The places (group, index) of divided variables behind a step's state."""
    return [
        (g, i)
        for g, group in enumerate(groups)
        for i, variable in enumerate(group)
        if isinstance(variable, DistributedVariable)
        and any(axis is not None for axis in variable.value_sharding.spec)
    ]


def warn_of_whole(strategy: Strategy, variables: Sequence[Any]) -> None:
    """Warns of large variables of a model that `shard_variables` does not divide."""
    if not strategy.placement.shard_variables:
        return
    own = [v for v in variables if isinstance(v, MirroredVariable) and v.is_indivisible]
    if not own:
        return
    replicas = strategy.num_replicas_in_sync
    size = sum(num_bytes(v.shape, v.dtype) for v in own)
    named = listed([f"{v.path} {tuple(v.shape)}" for v in own])
    warnings.warn(
        f"{replicas} replicas divide none of the dimensions of {len(own)} large "
        f"variable(s), which shard_variables=True therefore leaves whole on each, as "
        f"their slots and gradients ({bytes_in_words(size)} of weights): "
        f"{named}. Dimensions that are multiples of {replicas} are divided; "
        "those of a layout are not divided twice.",
        stacklevel=2,
    )


def of_state(groups: Sequence[Sequence[Any]], mesh: ReplicaMesh) -> State:
    """Where the values of the groups are."""
    return tuple(
        [
            v.value_sharding if isinstance(v, DistributedVariable) else mesh.replicated
            for v in group
        ]
        for group in groups
    )
