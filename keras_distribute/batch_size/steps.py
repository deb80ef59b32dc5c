"""The training step of `fit` for batches of one size: compiled, then run."""

from __future__ import annotations

from typing import Any, Protocol

import jax

from keras_distribute import config
from keras_distribute._compat import trainer as compat
from keras_distribute.dry_run import memory
from keras_distribute.strategies.base import Strategy
from keras_distribute.training import batches
from keras_distribute.training.steps.choose import compiled_step
from keras_distribute.training.steps.state import StateGroup
from keras_distribute.training.steps.step_programs import form_of_array


class Steps(Protocol):
    """The training step of a model, compiled for one size of batch.

    Attributes:
        needed: The bytes that it takes of each device, with the batches that `fit` has
            ready.
        weights: Those of the weights that are trained, which an accumulator for each
            of their gradients takes, too.
    """

    needed: int
    weights: int

    def run(self, batch: Any, count: int) -> None:
        """Runs so many of them; afterwards the variables have no value."""
        ...


class StrategySteps:
    """Those of a model of a strategy, for batches of a form."""

    def __init__(self, trainer: Any, strategy: Strategy, form: Any) -> None:
        self._mesh = strategy.replica_mesh
        self._groups = compat.state_variables(trainer, "train")
        self._step = compiled_step(strategy, trainer, "train")
        programs, placed = self._step.programs, batches.placed_form(form, self._mesh)
        self._size = trainer.steps_per_execution
        if self._size > 1 and not programs.can_scan([placed] * self._size):
            self._size = 1
        compiled = programs.executable(placed, self._size).compile()
        self._ahead = config.prefetch_steps()
        in_one = memory.bytes_per_device(jax.tree.leaves(placed.data))
        platform = self._mesh.platform
        self.needed = memory.needed_by(compiled, platform) + self._ahead * in_one
        weights = programs.form_of_groups(self._mesh)[0]
        self.weights = memory.bytes_per_device(weights)

    def run(self, batch: Any, count: int) -> None:
        state: Any = tuple(StateGroup(list(group)) for group in self._groups)
        try:
            ready = self._placed(batch, self._ahead)
            for _ in range(-(-count // self._size)):
                group = self._placed(batch, self._size)
                logs, _ = self._step.several(state, group, self._size)
                jax.block_until_ready(logs)
            del ready
        finally:
            self._step.delete_state()

    def _placed(self, batch: Any, count: int) -> list[batches.Placed]:
        placed = [batches.place(batch, self._mesh) for _ in range(count)]
        jax.block_until_ready([each.data for each in placed])
        return placed


class PlainSteps:
    """Those of a model without a strategy, likewise."""

    def __init__(self, trainer: Any, form: Any) -> None:
        self._groups = compat.state_variables(trainer, "train")
        state = tuple([form_of_array(v.value) for v in g] for g in self._groups)
        program = jax.jit(trainer.train_step, donate_argnums=0)
        self._program = program.lower(state, form).compile()
        self.weights = memory.bytes_per_device(state[0])
        self.needed = memory.needed_by(self._program, jax.default_backend())

    def run(self, batch: Any, count: int) -> None:
        state: Any = tuple([v.value for v in group] for group in self._groups)
        try:
            for _ in range(count):
                logs, state = self._program(state, batch)
                jax.block_until_ready((logs, state))
        finally:
            for array in jax.tree.leaves(state):
                array.delete()
