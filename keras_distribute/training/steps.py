"""Wires Keras's trainer to a strategy: each of its steps becomes one program over the global batch.

The step that Keras or the user wrote (`train_step`, `test_step`, `predict_step`) is compiled as it is, on the whole
batch; the batch is split over the replicas, the state is on each, and XLA inserts the communication. So any loss,
mask, weight, metric or custom step means what it means on one device. What is meant to differ per replica is said in
`replica_rules.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import keras
import numpy as np

from keras_distribute import context
from keras_distribute._compat import trainer as compat
from keras_distribute._compat.epochs import follower_of
from keras_distribute.context import Frame, Mode
from keras_distribute.errors import ContextError, ValueStructureError, VariableScopeError
from keras_distribute.strategies.base import Strategy, refuse_keras_distribution
from keras_distribute.training import accumulation, batches, feeds, local, sharding
from keras_distribute.training.compiled import CompiledStep, Step
from keras_distribute.training.flat import FlatStep
from keras_distribute.training.grouping import GroupSize
from keras_distribute.training.packing import Packing, State, form_of
from keras_distribute.variables import DistributedVariable, check_same_values, given_away, spread_sum

_SLOTS = 2  # In the state of a training step.
_ATTRIBUTE, _ACCUMULATORS = "_keras_distribute_strategy", "_keras_distribute_accumulators"


class TrainerSeams:
    """What `_compat.trainer` asks: see `_compat.trainer.Seams`."""

    def adopt(self, trainer: Any) -> None:
        """A trainer created or compiled under a scope remembers its strategy."""
        current, own = _current_strategy(), getattr(trainer, _ATTRIBUTE, None)
        if current is None:
            return
        if own is not None and own is not current:
            raise ContextError(
                "A model belongs to the strategy under whose scope it was created.",
                received=f"a model of {own!r} in the scope of {current!r}.",
                fix="create the model again in this scope, and load its weights: model.load_weights(path).",
            )
        setattr(trainer, _ATTRIBUTE, current)

    def entered(self, trainer: Any) -> contextlib.AbstractContextManager[Any]:
        """The trainer's strategy, as the current one in the cross-replica context."""
        strategy = _strategy_of(trainer)
        current = context.frame()
        if strategy is None and current.strategy is context.default_strategy():
            return contextlib.nullcontext()
        if strategy is None:  # A plain model, in a callback of another's fit.
            return context.entered(context.default_strategy().top_frame)
        if current.per_replica:
            raise ContextError(
                "A model's fit, evaluate and predict run on all replicas by themselves.",
                received=f"a call inside {context.describe(current)}",
                fix="call them outside strategy.run.",
            )
        refuse_keras_distribution(strategy)
        return context.entered(Frame(strategy, Mode.CROSS))

    def given_away(self) -> contextlib.AbstractContextManager[Any]:
        """Variables take the arrays of the last step, which nobody else will use."""
        return given_away()

    def takes_host_batches(self) -> bool:
        """Whether steps of the current strategy place their batches by themselves."""
        return context.has_strategy() and keras.distribution.distribution() is None

    def adapter(self, original: Callable[..., Any], x: Any, arguments: dict[str, Any]) -> Any:
        """The data adapter for the `x` of `fit`."""
        strategy = context.get_strategy() if context.has_strategy() else None
        return feeds.choose_adapter(original, x, arguments, strategy)

    def looks(self, adapter: Any) -> bool:
        """Whether the batch that a model is built with comes from `look`."""
        return self.takes_host_batches() or isinstance(adapter, feeds.DatasetAdapter)

    def look(self, adapter: Any) -> Any:
        """An iterator over the first batch, on the host, for a model that is to be built."""
        return feeds.look(adapter)

    def feed(self, trainer: Any, adapter: Any, per_epoch: int | None) -> Any:
        """An iterator over the batches, made ready for the trainer's steps."""
        strategy = _strategy_of(trainer)
        if strategy is None:
            return feeds.host_feed(adapter, per_epoch)
        followed = follower_of(trainer) is not None
        return feeds.feed(adapter, strategy.replica_mesh, compat.is_traced(trainer), per_epoch, followed)

    def read_by_us(self, adapter: Any) -> None:
        """Ends what the adapter's own workers would do for an epoch."""
        feeds.claim(adapter)

    def refuse_empty(self) -> None:
        """Raises the error for data without a single batch."""
        raise ValueStructureError(
            "There is nothing to train, evaluate or predict on: the data has no batch.",
            received="arrays without rows, or a dataset that ends at once.",
            fix="pass at least one row; check the paths, filters and `take` of the dataset.",
        )

    def host_batch(self, data: Any) -> Any:
        """The batch as it is, but for Python numbers, which become arrays: Keras asks the leaves for a shape."""
        return jax.tree.map(lambda leaf: leaf if hasattr(leaf, "shape") else np.asarray(leaf), data)

    def accumulators(self, trainer: Any) -> dict[int, Any]:
        """The accumulators of the training step as their components: their sum would be rounded otherwise."""
        variables = trainer.optimizer.variables
        stored = {i: variables[i].components for i in getattr(trainer, _ACCUMULATORS, [])}
        return {i: value for i, value in stored.items() if value is not None}

    def group_sizes(self, trainer: Any) -> GroupSize | None:
        """What sizes groups of steps by itself, for `steps_per_execution="auto"`."""
        strategy = _strategy_of(trainer)
        if strategy is None:
            return None
        # Several processes, which have to run the same programs, would measure different times.
        return GroupSize() if strategy.replica_mesh.num_processes == 1 else GroupSize(sizes=(1,))

    def compile_step(self, trainer: Any, kind: str, step: Callable[..., Any]) -> Callable[..., Any] | None:
        """`step(state, data)` on the trainer's strategy, taking a host batch."""
        strategy = _strategy_of(trainer)
        if strategy is None:
            return None
        groups = compat.state_variables(trainer, kind)
        _check_variables(strategy, groups)
        check_same_values([variable for group in groups for variable in group])
        if not compat.is_traced(trainer):
            return _eager(strategy, step)
        if kind == "train":
            strategy.check_layouts([variable.path for variable in groups[0]])
            indices = accumulation.accumulator_indices(trainer)
            object.__setattr__(trainer, _ACCUMULATORS, indices)  # Not Keras's, which would track the list.
        return compiled_step(strategy, trainer, kind, step)


def compiled_step(strategy: Strategy, trainer: Any, kind: str, step: Step) -> CompiledStep:
    """The program of a step; making it reads no variable's value.

    Args:
        strategy: Where it runs.
        trainer: The model, whose variables belong to `strategy`.
        kind: `"train"`, `"test"` or `"predict"`.
        step: Keras's or the user's own, over the global batch.
    """
    groups = compat.state_variables(trainer, kind)
    indices = accumulation.accumulator_indices(trainer) if kind == "train" else []
    if indices:
        return _AccumulatingStep(strategy, trainer, indices, step)
    form, flat = form_of(groups), None
    places = sharding.divided_places(groups)
    if kind == "train":
        flat = FlatStep.of(trainer, strategy, form, places)
    if flat is not None:
        packing, carried_step = flat.packing, flat
    else:
        step = local.of(trainer, strategy, step) if kind == "train" else step
        packing = Packing(form, strategy.replica_mesh, single=places)
        carried_step = packing.around(step) if packing else step
    # Where nothing is divided, a step of the user's own may return its groups as tuples or lists.
    shardings = sharding.of_state(groups, strategy.replica_mesh) if places else None
    if shardings is not None and packing:
        shardings = packing.shardings(shardings)
    return CompiledStep(strategy, carried_step, packing or None, shardings)


def is_quiet() -> bool:
    """Whether another process writes the files and the progress bar of the `fit` that begins."""
    return context.has_strategy() and context.get_strategy().replica_mesh.process_index > 0


def _strategy_of(trainer: Any) -> Strategy | None:
    """The strategy that the trainer was created or compiled under, or of the scope around, or of its variables."""
    return getattr(trainer, _ATTRIBUTE, None) or _current_strategy() or strategy_of_variables(trainer)


def strategy_of_variables(trainer: Any) -> Strategy | None:
    """The strategy under whose scope the variables of a model were created."""
    variables = [*getattr(trainer, "trainable_variables", []), *getattr(trainer, "non_trainable_variables", [])]
    return next((v.distribute_strategy for v in variables if isinstance(v, DistributedVariable)), None)


def _current_strategy() -> Strategy | None:
    """The strategy whose scope is open; `None` inside a Keras distribution opened in its scope."""
    return context.scope_strategy() if keras.distribution.distribution() is None else None


class _AccumulatingStep(CompiledStep):
    """A training step that keeps gradient accumulators per replica between calls."""

    def __init__(self, strategy: Strategy, trainer: Any, indices: list[int], step: Step) -> None:
        self._spread, self._indices = spread_sum(strategy.replica_mesh), indices
        groups = compat.state_variables(trainer, "train")
        shardings = sharding.of_state(groups, strategy.replica_mesh)
        for i in indices:
            shardings[_SLOTS][i] = groups[_SLOTS][i].sharding
        super().__init__(strategy, accumulation.accumulating(trainer, strategy, indices, step), shardings=shardings)

    def _of_groups(self, state: State) -> Any:
        return accumulation.unwrapped(state, self._indices, self._spread)

    def _to_groups(self, carried: Any) -> State:
        return accumulation.wrapped(carried, self._indices)

    def _form_taken(self, state: State) -> Any:
        slots, mesh = list(state[_SLOTS]), self._mesh
        for i in self._indices:
            shape = (mesh.num_replicas, *slots[i].shape)
            slots[i] = jax.ShapeDtypeStruct(shape, slots[i].dtype, sharding=mesh.split)
        return *state[:_SLOTS], slots, *state[_SLOTS + 1 :]


def _eager(strategy: Strategy, step: Callable[..., Any]) -> Callable[..., Any]:
    mesh = strategy.replica_mesh
    if mesh.num_processes > 1:
        raise ContextError(
            "Steps over several processes are compiled.",
            received=f"run_eagerly=True, or jit_compile=False, on {mesh.num_processes} processes.",
            fix="leave both as they are; run eagerly under kd.MirroredStrategy in one process.",
        )

    def run(state: Any, data: Any) -> Any:
        placed, _, spread = batches.place(data, mesh, traced=False)
        with context.entered(Frame(strategy, Mode.CROSS, rows=spread[0], groups=spread[1])):
            return step(state, placed)

    return run


def _check_variables(strategy: Strategy, groups: list[list[Any]]) -> None:
    wrong = [
        variable
        for group in groups
        for variable in group
        if not (isinstance(variable, DistributedVariable) and variable.distribute_strategy is strategy)
    ]
    if wrong:
        names = ", ".join(f"{v.path} {tuple(v.shape)}" for v in wrong[:20])
        more = f" and {len(wrong) - 20} more" if len(wrong) > 20 else ""
        raise VariableScopeError(
            f"{len(wrong)} variable(s) do not belong to the strategy of {strategy.num_replicas_in_sync} replica(s) "
            f"that the model runs on:\n    {names}{more}",
            received=f"{strategy!r}.",
            fix="create the model, its optimizer and its metrics inside `with strategy.scope():`.",
        )
