"""How the training step of a model is made, and why: every condition on it is here.

The fast step computes the gradients of each replica's rows by themselves, and sums them
once. Steps become that when they are traced (`by_rows.py`): whether an operation mixes
rows is then seen in the program.

Conditions on a batch (rows that do not divide over the replicas) are checked while the
step is traced.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from keras_distribute._compat import optimizer as compat_optimizer
from keras_distribute._compat import train_step as compat
from keras_distribute.devices.by_rows.program import MixedRows
from keras_distribute.strategies.base import Strategy
from keras_distribute.variables import SyncOnReadVariable

_MIXED = "_keras_distribute_mixed_rows"
_UNLESS = ", unless an operation mixes rows, which the first batch shows"


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """How a training step is made.

    Args:
        is_local: Whether each replica computes the gradients of its own rows.
        is_keras_step: Whether the step is Keras's own, not the user's.
        accumulates: Whether each replica adds its gradients up between the updates.
        accumulators: Where the accumulators are then among the optimizer's variables,
            once it is built.
        mixed: What mixes rows in the traced step, which therefore runs over the global
            batch; `None` before it is traced.
        in_series: Whether it has the same bits on any number of devices.
        shards: Whether weights are divided over the replicas.
    """

    is_local: bool
    is_keras_step: bool
    accumulates: bool = False
    accumulators: tuple[int, ...] = ()
    mixed: str | None = ""
    in_series: bool = False
    shards: bool = False

    def __str__(self) -> str:
        if self.in_series:
            return self._text_in_series()
        if self.shards:
            return self._text_of_shards()
        if self.is_local and self.mixed:
            return (
                f"The training step runs over the global batch, because {self.mixed} "
                "mixes rows. Faster: operations on each row alone."
            )
        if self.is_local:
            unless = "" if self.mixed == "" else _UNLESS
            if self.accumulates:
                return (
                    "The training step adds up the gradients of each replica's rows on "
                    "the replica, and sums them over the replicas where the optimizer "
                    f"updates{unless}."
                )
            return (
                "The training step computes the gradients of each replica's rows, and "
                f"sums them once{unless}."
            )
        return "The training step is that of one device."

    def _text_of_shards(self) -> str:
        text = (
            "The training step gathers divided weights where a layer needs them, and "
            "each replica keeps its part of the gradients' sum"
        )
        if self.mixed:
            return (
                f"{text}, as XLA divides the program over the global batch, because "
                f"{self.mixed} mixes rows. Known to sum each gradient in parts: "
                "operations on each row alone."
            )
        return f"{text}{'' if self.mixed == '' else _UNLESS}."

    def _text_in_series(self) -> str:
        same = "has the same bits on any number of devices"
        if self.mixed:
            return (
                f"The training step is computed whole on each device, and {same}, "
                f"because {self.mixed} mixes rows. Faster: operations on each row "
                "alone."
            )
        return (
            "The training step computes the gradients of one replica's rows after the "
            f"other's, and {same}{'' if self.mixed == '' else _UNLESS}."
        )


def plan_of(trainer: Any, strategy: Strategy) -> StepPlan:
    """How the training step of `trainer` is made on `strategy`.

    Args:
        trainer: A compiled model; what is said of one that is not built yet may change.
    """
    is_keras_step = compat.has_keras_step(trainer)
    mixed = getattr(trainer, _MIXED, None)
    if strategy.placement.shard_variables and strategy.num_replicas_in_sync > 1:
        return StepPlan(True, is_keras_step, mixed=mixed, shards=True)
    accumulators: tuple[int, ...] = ()
    accumulates = False
    if trainer.optimizer is not None:
        optimizer = trainer.optimizer
        accumulators = _accumulators(optimizer)
        will_have = not optimizer.built and compat_optimizer.accumulates(optimizer)
        accumulates = bool(accumulators) or will_have
    in_series = strategy.replica_mesh.series is not None
    if strategy.num_replicas_in_sync == 1 and not in_series:
        return StepPlan(False, is_keras_step, False, accumulators)
    return StepPlan(
        True, is_keras_step, accumulates, accumulators, mixed, in_series=in_series
    )


def note_mixed(trainer: Any, mixed: MixedRows | None) -> None:
    """Notes what mixes rows in the step of a trainer that has been traced."""
    text = ""
    if mixed is not None:
        text = f"the operation `{mixed.operation}`"
        if mixed.layer:
            text += f" in `{mixed.layer}`"
    setattr(trainer, _MIXED, text)


def forget_mixed(trainer: Any) -> None:
    """Forgets it, of a trainer whose step will be made anew."""
    vars(trainer).pop(_MIXED, None)


def _accumulators(optimizer: Any) -> tuple[int, ...]:
    accumulation = compat_optimizer.accumulation(optimizer) if optimizer.built else None
    if accumulation is None:
        return ()
    own = {
        id(variable)
        for variable in accumulation[2]
        if isinstance(variable, SyncOnReadVariable)
    }
    variables = enumerate(optimizer.variables)
    return tuple(i for i, variable in variables if id(variable) in own)
