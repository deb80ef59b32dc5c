"""Calls a compiled step over a global batch, or several of them in one dispatch, with
the state that it takes and leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax

from keras_distribute.cluster import liveness
from keras_distribute.cluster.same_programs import check_same_program
from keras_distribute.devices import timing
from keras_distribute.devices.launches import Executable, launches
from keras_distribute.errors import ValueStructureError
from keras_distribute.strategies.base import Strategy
from keras_distribute.training import batches, calls
from keras_distribute.training.steps.packed_state import State, form_of
from keras_distribute.training.steps.state import ArrayState, StepState, ids_of, is_held
from keras_distribute.training.steps.step_programs import (
    CarriedStep,
    Step,
    StepPrograms,
    alike,
)

_PLACE = "in fit, evaluate or predict"
_FIX = (
    "the same model and the same compile(...) in every process, with no number or "
    "Python `if` of one process in a layer, a loss or a step."
)


class CompiledStep:
    """A step compiled for the global batch, once for each form of a batch.

    Args:
        groups: The variables behind the state.
        plain: The step on Keras's groups of values; `None` if `carried` is that.
        anew: Makes the step for the variables that the model has now, which may have
            been frozen since; `None` for one that goes on with the same.
    """

    def __init__(
        self,
        strategy: Strategy,
        carried: CarriedStep,
        groups: Sequence[list[Any]],
        plain: Step | None = None,
        anew: Callable[[], CompiledStep] | None = None,
    ) -> None:
        self._mesh, self._strategy = strategy.replica_mesh, strategy
        self._carried, self._plain = carried, plain or carried.step
        self._anew, self._on_arrays = anew, None
        self._seen: tuple[State | None, StepState | None] = (None, None)
        self._unchanged: list[Any] | None = None
        self.programs = StepPrograms(strategy, carried, groups)
        self._known = {ids_of(groups): (carried, self.programs)}
        self._groups = groups

    @property
    def unchanged(self) -> list[Any]:
        """The variables that no step changes, by a trace. None before a first step."""
        if self._unchanged is None and self.programs.latest is not None:
            self._unchanged = self.programs.unchanged(self._plain)
        return self._unchanged or []

    def __call__(self, state: State, data: Any) -> tuple[Any, State]:
        """Runs one step.

        Args:
            state: What `StrategyTrainer._get_jax_state` gave Keras; or groups of
                arrays, from a model that keeps its state by itself.
            data: A batch, placed or not.

        Returns:
            The logs, and `state`, which shows the new values; or the new arrays.
        """
        placed = batches.place_whole(data, self._mesh)
        calls.step_begins([placed])
        if not is_held(state):
            return self._one_on_arrays(state, placed)
        return self._one(self._holder(state), placed), state

    def several(
        self, state: State, data: Sequence[Any], size: int
    ) -> tuple[Any, State]:
        """Runs a step for each batch: `size` of one form in one dispatch, where that is
        no slower.

        Returns:
            The logs of the last one, and `state`.
        """
        logs: Any = None
        if not is_held(state):
            for batch in data:
                logs, state = self(state, batch)
            return logs, state
        holder = self._holder(state)
        left = [batches.place_whole(batch, self._mesh) for batch in data]
        calls.step_begins(left[:])
        while left:
            group = left[:size]
            if (
                1 < size == len(group)
                and alike(group)
                and self.programs.can_scan(group)
            ):
                logs = self._fused(holder, group)
                del left[:size]
            else:
                logs = self._one(holder, left.pop(0))
        return logs, state

    def executable(self, placed: batches.Placed, size: int = 1) -> Executable:
        """The program for a batch of this form, or for `size` of them at once."""
        return self.programs.executable(placed, size)

    def arrays_of(self, state: State) -> list[jax.Array]:
        """What the step takes for a state that Keras has; its call ends them."""
        with launches.lock:
            return list(self._holder(state).take())

    def delete_state(self) -> None:
        """Frees what the last call has left: the variables of the state have no value
        before they are assigned.
        """
        _, holder = self._seen
        if holder is not None:
            holder.delete()

    def _one(self, holder: StepState | ArrayState, placed: batches.Placed) -> Any:
        return self._launch(holder, self.executable(placed), placed.data)

    def _one_on_arrays(self, state: State, placed: batches.Placed) -> tuple[Any, State]:
        step, form = self._on_arrays, [list(group) for group in form_of(state)]
        if step is None or form_of(step._groups) != form_of(form):
            step = CompiledStep(self._strategy, CarriedStep(self._plain), form)
            self._on_arrays = step
        holder = ArrayState(state, self._mesh)
        return step._one(holder, placed), holder.groups()

    def _fused(self, holder: StepState, group: list[batches.Placed]) -> Any:
        program = self.executable(group[0], len(group))
        return self._launch(holder, program, [each.data for each in group])

    def _launch(
        self, holder: StepState | ArrayState, program: Executable, data: Any
    ) -> Any:
        """The logs of a step; its state lands with the holder."""
        if program.traced is not None:
            check_same_program(_PLACE, program.traced, self._mesh.num_processes, _FIX)
        program.compile()  # Before `lock` is taken: others may run steps meanwhile.
        with timing.of("dispatch"), launches.lock:
            state = holder.take()
            liveness.current.begin_step(_PLACE, self._mesh.num_processes)
            program.launch(holder.landing, state, data)
            return jax.tree.unflatten(program.logs, holder.landed())

    def _holder(self, state: State) -> StepState:
        """What has the values of the variables behind a state of Keras's."""
        seen, holder = self._seen
        if state is not seen:  # Keras hands over what it got from the last step.
            with launches.lock:
                groups = [group.variables for group in state]
                if holder is None or not holder.is_of(groups):
                    self._turn_to(groups)
                    own = self._carried
                    holder = StepState(
                        groups, own.packing, own.components, self._strategy.placement
                    )
                self._seen = state, holder
        assert holder is not None
        return holder

    def _turn_to(self, groups: Sequence[list[Any]]) -> None:
        """Has the programs for these variables: a layer may have been frozen since."""
        key = ids_of(groups)
        if key not in self._known:
            if self._anew is not None:
                made = self._anew()
                self._known |= made._known
            else:
                programs = StepPrograms(self._strategy, self._carried, groups)
                self._known[key] = self._carried, programs
        self._carried, self.programs = self._known[key]
        self._groups, self._unchanged = groups, None


def refuse_changed(
    groups: Sequence[Sequence[Any]], before: Sequence[Sequence[Any]]
) -> NoReturn:
    """Raises for a model whose variables are others than those of its step."""
    counts = [[len(group) for group in each] for each in (groups, before)]
    raise ValueStructureError(
        "The variables of the model have changed since its step was compiled.",
        received=f"groups of {counts[0]} variables, after {counts[1]}.",
        fix="call model.compile(...) again after freezing or adding layers.",
    )
