"""Wires Keras's trainer to a strategy: each of its steps becomes one program over the
global batch.

The step that Keras or the user wrote (`train_step`, `test_step`, `predict_step`) is
compiled as it is, on the whole batch; the batch is split over the replicas, the state
is on each, and XLA inserts the communication. So any loss, mask, weight, metric or
custom step means what it means on one device. What is meant to differ per replica is
said in `training/replica_rules.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from keras_distribute import checks, context
from keras_distribute._compat import trainer as compat
from keras_distribute._compat.trainer import PredictState, TrainState
from keras_distribute.context import Frame, GlobalBatch, Mode
from keras_distribute.devices.by_rows.program import MixedRows
from keras_distribute.devices.launches import launches
from keras_distribute.errors import ContextError, VariableScopeError
from keras_distribute.strategies.base import Strategy
from keras_distribute.training import adoption, batches
from keras_distribute.training.steps import accumulating, state_shardings
from keras_distribute.training.steps.accumulating import SLOTS
from keras_distribute.training.steps.by_rows import step_by_rows
from keras_distribute.training.steps.compiled_step import CompiledStep, refuse_changed
from keras_distribute.training.steps.long_weight import FlatStep
from keras_distribute.training.steps.own_gradients import OwnGradients
from keras_distribute.training.steps.packed_state import Packing, State, form_of
from keras_distribute.training.steps.plan import StepPlan, note_mixed, plan_of
from keras_distribute.training.steps.sharded import DividedState, sharded_step
from keras_distribute.training.steps.state import StepState, ids_of, is_held
from keras_distribute.training.steps.step_programs import CarriedStep, Step
from keras_distribute.variables import DistributedVariable, check_same_values

if TYPE_CHECKING:
    from keras_distribute.training.steps.scheduled import ScheduledStep


def compile_step(
    trainer: Any, kind: str
) -> CompiledStep | EagerStep | ScheduledStep | None:
    """A step that takes Keras's state and a batch of the host; `None` for a trainer
    without a strategy.

    Args:
        kind: `"train"`, `"test"` or `"predict"`.
    """
    strategy = adoption.strategy_of(trainer)
    if strategy is None:
        return None
    groups = compat.state_variables(trainer, kind)
    _check_variables(strategy, groups)
    check_same_values([variable for group in groups for variable in group])
    if strategy.placement.is_on_servers:
        # Few programs have servers; the others start without what it imports.
        from keras_distribute.training.steps.local_rounds import step_on_workers

        return step_on_workers(strategy, trainer, kind)
    if not compat.is_traced(trainer):
        return EagerStep(strategy, _step_of(trainer, kind))
    if kind == "train":
        strategy.placement.check_layouts([variable.path for variable in groups.weights])
        state_shardings.warn_of_whole(strategy, [*groups.weights, *groups.others])
    return compiled_step(strategy, trainer, kind)


def compiled_step(
    strategy: Strategy, trainer: Any, kind: str, watch: OwnGradients | None = None
) -> CompiledStep:
    """The program of a step; making it reads no variable's value.

    Args:
        trainer: The model, whose variables belong to `strategy`.
        kind: `"train"`, `"test"` or `"predict"`.
        watch: Sees what each replica gives to the sums of the gradients.
    """
    groups, plain = compat.state_variables(trainer, kind), _step_of(trainer, kind)
    mesh, step, flat = strategy.replica_mesh, plain, None
    places, told = state_shardings.divided_places(groups), partial(note_mixed, trainer)
    plan = plan_of(trainer, strategy) if kind == "train" else None
    if strategy.placement.shard_variables and mesh.num_replicas > 1:
        divided = DividedState(strategy, groups)
        if plan is None:
            step = sharded_step(plain, divided)
        else:
            step = step_by_rows(strategy, plain, told, divided=divided)
    elif plan is not None:
        if plan.accumulators:
            return _accumulating(strategy, trainer, groups, plan, plain)
        form = TrainState(*map(list, form_of(groups)))
        flat = FlatStep.of(trainer, strategy, form, places)
    carried: Step
    if flat is not None:
        packing, carried = flat.packing, flat
    else:
        packing = Packing(groups, mesh, single=places, rest=strategy.placement)
        carried = packing.around(step) if packing else step
    if plan is not None and plan.is_local and not plan.shards:
        if mesh.series is not None:
            watch = None  # What it looks at, XLA might compile otherwise.
        if watch is not None:
            watch.flat = flat
        carried = step_by_rows(strategy, carried, told, watch)
    elif mesh.series is not None:
        carried = step_by_rows(strategy, carried, _ignored)
    # Where nothing is divided or rests elsewhere, a step of the user's own may return
    # its groups as tuples or lists.
    is_divided = bool(places) or packing.is_divided
    elsewhere = is_divided or strategy.placement.rests_elsewhere
    shardings = state_shardings.of_state(groups, mesh) if elsewhere else None
    if shardings is not None and packing:
        shardings = packing.shardings(shardings)
    packed = CarriedStep(
        carried,
        packing or None,
        shardings,
        is_local=lambda: plan is not None and not plan_of(trainer, strategy).mixed,
    )

    def anew() -> CompiledStep:
        now = compat.state_variables(trainer, kind)
        _check_variables(strategy, now)
        if kind == "train":
            # The optimizer was built for its variables; there may be more metrics.
            *built_for, _ = groups
            if ids_of(now[: len(built_for)]) != ids_of(built_for):
                refuse_changed(now, groups)
        return compiled_step(strategy, trainer, kind)

    return CompiledStep(strategy, packed, groups, plain, anew)


def _accumulating(
    strategy: Strategy,
    trainer: Any,
    groups: Sequence[list[Any]],
    plan: StepPlan,
    step: Step,
) -> CompiledStep:
    """A training step that keeps gradient accumulators per replica between calls."""
    indices = plan.accumulators
    if plan.is_local:
        told = partial(note_mixed, trainer)
        on_own = step_by_rows(strategy, step, told, accumulators=indices)
    else:
        on_own = accumulating.on_sums(step, indices, 1)
    # An accumulator has an axis for the replicas.
    shardings = state_shardings.of_state(groups, strategy.replica_mesh)
    for i in indices:
        shardings[SLOTS][i] = groups[SLOTS][i].sharding
    components = [(SLOTS, i) for i in indices]
    carried = CarriedStep(on_own, shardings=shardings, components=components)
    return CompiledStep(strategy, carried, groups, step)


def _ignored(mixed: MixedRows | None) -> None:
    """What mixes rows in a step of which nobody is told."""


def _step_of(trainer: Any, kind: str) -> Step:
    """Keras's step, or the user's: from state and batch to logs and new state."""
    if kind != "predict":
        return getattr(trainer, f"{kind}_step")

    def predict_step(state: Any, data: Any) -> Any:
        outputs, non_trainable_variables = trainer.predict_step(state, data)
        new = PredictState(*state)._replace(others=non_trainable_variables)
        return outputs, new

    return predict_step


class EagerStep:
    """A step that runs operation by operation.

    Args:
        step: From the state and the global batch to the logs and the new state.

    Raises:
        ContextError: Over several processes.
    """

    def __init__(self, strategy: Strategy, step: Step) -> None:
        mesh = strategy.replica_mesh
        if mesh.num_processes > 1:
            raise ContextError(
                "Steps over several processes are compiled.",
                received="run_eagerly=True, or jit_compile=False, on "
                f"{mesh.num_processes} processes.",
                fix="leave both as they are; run eagerly under kd.MirroredStrategy in "
                "one process.",
            )
        self._strategy, self._step = strategy, step
        self._state: StepState | None = None

    def __call__(self, state: State, data: Any) -> tuple[Any, State]:
        """Runs one step; see `CompiledStep`."""
        placed, _, spread = batches.place(
            data, self._strategy.replica_mesh, traced=False
        )
        batch = GlobalBatch(*spread)
        if self._strategy.replica_mesh.series is not None:
            batch = GlobalBatch(spread[0], replicated=True)
        frame = Frame(self._strategy, Mode.CROSS, batch=batch)
        if not is_held(state):
            with context.entered(frame):
                return self._step(state, placed)
        groups = [group.variables for group in state]
        if self._state is None or not self._state.is_of(groups):
            self._state = StepState(groups, None, (), self._strategy.placement)
        # The step may call what is traced first; whoever traces may ask for `lock`.
        with launches.tracing, launches.lock, context.entered(frame):
            mesh = self._strategy.replica_mesh
            left = map(mesh.brought, self._state.take())
            values = tuple([next(left) for _ in group] for group in groups)
            logs, new = self._step(values, placed)
            self._state.put(new)
        return logs, state


def _check_variables(strategy: Strategy, groups: Sequence[list[Any]]) -> None:
    wrong = [
        variable
        for variable in itertools.chain(*groups)
        if not isinstance(variable, DistributedVariable)
        or variable.distribute_strategy is not strategy
    ]
    if wrong:
        names = checks.listed([f"{v.path} {tuple(v.shape)}" for v in wrong], most=20)
        raise VariableScopeError(
            f"{len(wrong)} variable(s) do not belong to the strategy of "
            f"{strategy.num_replicas_in_sync} replica(s) "
            f"that the model runs on:\n    {names}",
            received=f"{strategy!r}.",
            fix="create the model, its optimizer and its metrics inside `with "
            "strategy.scope():`; call there, too, what adds variables later, such as "
            "layer.enable_lora or model.quantize.",
        )
