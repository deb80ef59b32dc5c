"""How the training step of a model is made, and why: every condition on it is here.

The fast step computes the gradients of each replica's rows by themselves, and sums them
once. Steps become that when they are traced (`by_rows.py`): whether an operation mixes
rows is then seen in the program.

Conditions on a batch (rows that do not divide over the replicas) are checked while the
step is traced.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from keras_distribute._compat import optimizer as compat_optimizer
from keras_distribute.devices.by_rows.program import MixedRows
from keras_distribute.strategies.base import Strategy
from keras_distribute.variables import SyncOnReadVariable

_MIXED = "_keras_distribute_mixed_rows"
_TO_PYTHON = re.compile("the operation `(debug_print|(debug|io|pure)_callback)`")
_UNLESS = ", unless an operation mixes rows, which the first batch shows"


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """How a training step is made.

    Args:
        is_local: Whether each replica computes the gradients of its own rows.
        accumulates: Whether each replica adds its gradients up between the updates.
        accumulators: Where the accumulators are then among the optimizer's variables,
            once it is built.
        mixed: What mixes rows in the traced step, which therefore runs over the global
            batch; `None` before it is traced.
        in_series: Whether it has the same bits on any number of devices.
        shards: Whether weights are divided over the replicas.
    """

    is_local: bool
    accumulates: bool = False
    accumulators: tuple[int, ...] = ()
    mixed: str | None = ""
    in_series: bool = False
    shards: bool = False

    def __str__(self) -> str:
        if not self.is_local:
            return "The training step is that of one device."
        faster = "Faster"
        if self.in_series:
            same = "has the same bits on any number of devices"
            mixing = f"is computed whole on each device, and {same}"
            text = "computes the gradients of one replica's rows after the other's, "
            text += f"and {same}"
        elif self.shards:
            text = "gathers divided weights where a layer needs them, and each replica "
            text += "keeps its part of the gradients' sum"
            mixing = f"{text}, as XLA divides the program over the global batch"
            faster = "Known to sum each gradient in parts"
        else:
            mixing = "runs over the global batch"
            text = "computes the gradients of each replica's rows, and sums them once"
            if self.accumulates:
                text = "adds up the gradients of each replica's rows on the replica, "
                text += "and sums them over the replicas where the optimizer updates"
        if self.mixed:
            mixes, instead = "mixes rows", "operations on each row alone"
            if _TO_PYTHON.match(self.mixed):
                mixes, instead = "shows Python the rows of all", "a step without it"
            text = f"{mixing}, because {self.mixed} {mixes}. {faster}: {instead}"
        elif self.mixed is None:
            text += _UNLESS
        return f"The training step {text}."


def plan_of(trainer: Any, strategy: Strategy) -> StepPlan:
    """How the training step of `trainer` is made on `strategy`.

    Args:
        trainer: A compiled model; what is said of one that is not built yet may change.
    """
    mixed = getattr(trainer, _MIXED, None)
    if strategy.placement.shard_variables and strategy.num_replicas_in_sync > 1:
        return StepPlan(True, mixed=mixed, shards=True)
    accumulators: tuple[int, ...] = ()
    optimizer, accumulates = trainer.optimizer, False
    if optimizer is not None:
        accumulators = _accumulators(optimizer)
        will_have = not optimizer.built and compat_optimizer.accumulates(optimizer)
        accumulates = bool(accumulators) or will_have
    in_series = strategy.replica_mesh.series is not None
    if strategy.num_replicas_in_sync == 1 and not in_series:
        return StepPlan(False, False, accumulators)
    return StepPlan(True, accumulates, accumulators, mixed, in_series)


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
