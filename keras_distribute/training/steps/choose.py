"""Wires Keras's trainer to a strategy: each of its steps becomes one program over the
global batch.

The step that Keras or the user wrote (`train_step`, `test_step`, `predict_step`) is
compiled as it is, on the whole batch; the batch is split over the replicas, the state
is on each, and XLA inserts the communication. So any loss, mask, weight, metric or
custom step means what it means on one device. What is meant to differ per replica is
said in `training/replica_rules.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import keras

from keras_distribute import context
from keras_distribute._compat import trainer as compat
from keras_distribute._compat.epochs import follower_of
from keras_distribute.context import Frame, GlobalBatch, Mode
from keras_distribute.devices import launches
from keras_distribute.errors import (
    ContextError,
    ValueStructureError,
    VariableScopeError,
)
from keras_distribute.strategies.base import (
    Strategy,
    get_strategy,
    refuse_keras_distribution,
)
from keras_distribute.training import batches, feeds
from keras_distribute.training.steps import accumulating, state_shardings
from keras_distribute.training.steps.compiled_step import CompiledStep, Step
from keras_distribute.training.steps.group_size import GroupSize
from keras_distribute.training.steps.local import local_step
from keras_distribute.training.steps.long_weight import FlatStep
from keras_distribute.training.steps.packed_state import Packing, State, form_of
from keras_distribute.training.steps.plan import plan_of
from keras_distribute.training.steps.state import StepState, is_held
from keras_distribute.variables import DistributedVariable, check_same_values

_SLOTS = 2  # In the state of a training step.
_ATTRIBUTE = "_keras_distribute_strategy"


def adopt(trainer: Any) -> None:
    """A trainer created or compiled under a scope remembers its strategy.

    Raises:
        ContextError: In the scope of another strategy than before.
    """
    current, own = _current_strategy(), getattr(trainer, _ATTRIBUTE, None)
    if current is None:
        return
    if own is not None and own is not current:
        raise ContextError(
            "A model belongs to the strategy under whose scope it was created.",
            received=f"a model of {own!r} in the scope of {current!r}.",
            fix="create the model again in this scope, and load its weights: "
            "model.load_weights(path).",
        )
    setattr(trainer, _ATTRIBUTE, current)


def strategy_of(trainer: Any) -> Strategy | None:
    """The strategy that the trainer was created or compiled under, or of the scope
    around, or of its variables.
    """
    return (
        getattr(trainer, _ATTRIBUTE, None)
        or _current_strategy()
        or strategy_of_variables(trainer)
    )


def strategy_of_variables(trainer: Any) -> Strategy | None:
    """The strategy under whose scope the variables of a model were created."""
    variables = [
        *getattr(trainer, "trainable_variables", []),
        *getattr(trainer, "non_trainable_variables", []),
    ]
    return next(
        (
            v.distribute_strategy
            for v in variables
            if isinstance(v, DistributedVariable)
        ),
        None,
    )


def _current_strategy() -> Strategy | None:
    """The strategy whose scope is open; `None` inside a Keras distribution opened in
    its scope.
    """
    if keras.distribution.distribution() is not None:
        return None
    return cast("Strategy | None", context.scope_strategy())


def frame_for(strategy: Strategy | None) -> Frame | None:
    """The context that a public method of a trainer runs in; `None`: the present one.

    Raises:
        ContextError: Inside a replica.
    """
    current = context.frame()
    if strategy is None:
        if current.strategy is context.default_strategy():
            return None
        return (
            context.default_strategy().top_frame
        )  # A plain model, in a callback of another's fit.
    if current.per_replica:
        raise ContextError(
            "A model's fit, evaluate and predict run on all replicas by themselves.",
            received=f"a call inside {context.describe(current)}",
            fix="call them outside strategy.run.",
        )
    refuse_keras_distribution(strategy)
    return Frame(strategy, Mode.CROSS)


def takes_host_batches() -> bool:
    """Whether steps of the current strategy place their batches by themselves."""
    return context.has_strategy() and keras.distribution.distribution() is None


def choose_adapter(
    original: Callable[..., Any], x: Any, arguments: dict[str, Any]
) -> Any:
    """The data adapter for the `x` of `fit`."""
    strategy = get_strategy() if context.has_strategy() else None
    return feeds.choose_adapter(original, x, arguments, strategy)


def feed(trainer: Any, adapter: Any, per_epoch: int | None) -> Any:
    """The batches of one pass, ready for the steps of `trainer`; an iterator with
    `release`.
    """
    strategy = strategy_of(trainer)
    if strategy is None:
        return feeds.host_feed(adapter, per_epoch)
    followed = follower_of(trainer) is not None
    return feeds.feed(
        adapter, strategy.replica_mesh, compat.is_traced(trainer), per_epoch, followed
    )


def refuse_empty() -> None:
    """Raises the error for data without a single batch."""
    raise ValueStructureError(
        "There is nothing to train, evaluate or predict on: the data has no batch.",
        received="arrays without rows, or a dataset that ends at once.",
        fix="pass at least one row; check the paths, filters and `take` of the "
        "dataset.",
    )


def group_sizes(trainer: Any) -> GroupSize | None:
    """What sizes groups of steps by itself, for `steps_per_execution="auto"`."""
    strategy = strategy_of(trainer)
    if strategy is None:
        return None
    # Several processes, which have to run the same programs, would measure different
    # times.
    return (
        GroupSize()
        if strategy.replica_mesh.num_processes == 1
        else GroupSize(sizes=(1,))
    )


def is_quiet() -> bool:
    """Whether another process writes the files and the progress bar of the `fit` that
    begins.
    """
    return (
        context.has_strategy() and context.get_strategy().replica_mesh.process_index > 0
    )


def compile_step(trainer: Any, kind: str) -> CompiledStep | EagerStep | None:
    """A step that takes Keras's state and a batch of the host; `None` for a trainer
    without a strategy.

    Args:
        trainer: The model.
        kind: `"train"`, `"test"` or `"predict"`.
    """
    strategy = strategy_of(trainer)
    if strategy is None:
        return None
    groups = compat.state_variables(trainer, kind)
    _check_variables(strategy, groups)
    check_same_values([variable for group in groups for variable in group])
    if not compat.is_traced(trainer):
        return EagerStep(strategy, _step_of(trainer, kind))
    if kind == "train":
        strategy.placement.check_layouts([variable.path for variable in groups[0]])
    return compiled_step(strategy, trainer, kind)


def compiled_step(strategy: Strategy, trainer: Any, kind: str) -> CompiledStep:
    """The program of a step; making it reads no variable's value.

    Args:
        strategy: Where it runs.
        trainer: The model, whose variables belong to `strategy`.
        kind: `"train"`, `"test"` or `"predict"`.
    """
    groups, plain = compat.state_variables(trainer, kind), _step_of(trainer, kind)
    mesh, step, flat = strategy.replica_mesh, plain, None
    form, places = form_of(groups), state_shardings.divided_places(groups)
    if kind == "train":
        plan = plan_of(trainer, strategy)
        if plan.accumulators:
            return _accumulating(strategy, trainer, groups, plan.accumulators, plain)
        flat = FlatStep.of(trainer, strategy, form, places, plan)
        if plan.is_local:
            step = local_step(trainer, strategy, plain)
    carried: Step
    if flat is not None:
        packing, carried = flat.packing, flat
    else:
        packing = Packing(form, mesh, single=places)
        carried = packing.around(step) if packing else step
    # Where nothing is divided, a step of the user's own may return its groups as tuples
    # or lists.
    shardings = state_shardings.of_state(groups, mesh) if places else None
    if shardings is not None and packing:
        shardings = packing.shardings(shardings)
    return CompiledStep(
        strategy, carried, groups, packing or None, shardings, plain=plain
    )


def _accumulating(
    strategy: Strategy,
    trainer: Any,
    groups: list[list[Any]],
    indices: Sequence[int],
    step: Step,
) -> CompiledStep:
    """A training step that keeps gradient accumulators per replica between calls."""
    shardings = state_shardings.of_state(groups, strategy.replica_mesh)
    for i in indices:
        shardings[_SLOTS][i] = groups[_SLOTS][i].sharding
    step = accumulating.accumulating(trainer, strategy, indices, step)
    components = [(_SLOTS, i) for i in indices]
    return CompiledStep(
        strategy, step, groups, shardings=shardings, components=components
    )


def _step_of(trainer: Any, kind: str) -> Step:
    """Keras's step, or the user's own, from the state and a batch to logs and the new
    state.
    """
    if kind != "predict":
        return getattr(trainer, f"{kind}_step")

    def predict_step(state: Any, data: Any) -> Any:
        outputs, non_trainable_variables = trainer.predict_step(state, data)
        return outputs, (state[0], non_trainable_variables)

    return predict_step


class EagerStep:
    """A step that runs operation by operation.

    Args:
        strategy: Where it runs.
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
        frame = Frame(self._strategy, Mode.CROSS, batch=GlobalBatch(*spread))
        if not is_held(state):
            with context.entered(frame):
                return self._step(state, placed)
        groups = [group.variables for group in state]
        if self._state is None or not self._state.is_of(groups):
            self._state = StepState(groups, None, ())
        with launches.lock, context.entered(frame):
            left = iter(self._state.take())
            values = tuple([next(left) for _ in group] for group in groups)
            logs, new = self._step(values, placed)
            self._state.put(new)
        return logs, state


def _check_variables(strategy: Strategy, groups: list[list[Any]]) -> None:
    wrong = [
        variable
        for group in groups
        for variable in group
        if not (
            isinstance(variable, DistributedVariable)
            and variable.distribute_strategy is strategy
        )
    ]
    if wrong:
        names = ", ".join(f"{v.path} {tuple(v.shape)}" for v in wrong[:20])
        more = f" and {len(wrong) - 20} more" if len(wrong) > 20 else ""
        raise VariableScopeError(
            f"{len(wrong)} variable(s) do not belong to the strategy of "
            f"{strategy.num_replicas_in_sync} replica(s) "
            f"that the model runs on:\n    {names}{more}",
            received=f"{strategy!r}.",
            fix="create the model, its optimizer and its metrics inside `with "
            "strategy.scope():`.",
        )
