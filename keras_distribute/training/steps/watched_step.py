"""The training step of a model, of which one call may be watched, or disturbed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from keras_distribute.devices import bit_flips
from keras_distribute.devices.bit_flips import BitFlip
from keras_distribute.strategies.base import Strategy
from keras_distribute.training import adoption, batches, calls
from keras_distribute.training.steps.by_rows import Watched
from keras_distribute.training.steps.choose import compiled_step
from keras_distribute.training.steps.compiled_step import CompiledStep
from keras_distribute.training.steps.own_gradients import OwnGradients
from keras_distribute.training.steps.packed_state import State
from keras_distribute.training.steps.state import is_held

Watcher = Callable[["SeenStep", State, Any, Any], tuple[Any, State]]


class SeenStep(NamedTuple):
    """A step whose program also says what each replica gave to each gradient.

    Args:
        step: With `Watched` in the place of logs, where each replica has its own.
        disturbed: The same, with the bits flipped that are to flip now.
        gradients: What sees them.
    """

    step: CompiledStep
    disturbed: CompiledStep
    gradients: OwnGradients


class WatchedStep:
    """Runs a training step: as it is, or once, if that was asked for, watched by
    somebody (`calls.watch_next_step`) or with flipped bits (`bit_flips.ask`).
    """

    def __init__(self, trainer: Any, step: CompiledStep) -> None:
        self._trainer, self._step = trainer, step
        calls.set_training_step(trainer, step)
        self._seen: tuple[CompiledStep, OwnGradients] | None = None

    def __call__(self, state: State, data: Any) -> tuple[Any, State]:
        """Runs one step; see `CompiledStep`."""
        flips = bit_flips.asked(self._trainer)
        watcher: Watcher | None = calls.asked_watcher(self._trainer)
        if not flips and (watcher is None or not is_held(state)):
            return self._step(state, data)
        return self._run(state, data, flips, watcher)

    def several(
        self, state: State, data: Sequence[Any], size: int
    ) -> tuple[Any, State]:
        """Runs a step for each batch; the first one by itself, if it is watched."""
        if not bit_flips.is_asked(self._trainer) and not calls.is_watched(
            self._trainer
        ):
            return self._step.several(state, data, size)
        logs, state = self(state, data[0])
        if len(data) > 1:
            logs, state = self._step.several(state, data[1:], size)
        return logs, state

    def _run(
        self, state: State, data: Any, flips: Sequence[BitFlip], watcher: Watcher | None
    ) -> tuple[Any, State]:
        strategy = adoption.strategy_of(self._trainer)
        assert isinstance(strategy, Strategy)
        placed = given = batches.place_whole(data, strategy.replica_mesh)
        for flip in flips:
            if flip.what == "batch":
                given = _flipped(given, flip, strategy)
        of_gradients = [flip for flip in flips if flip.what == "gradient"]
        is_noted, disturbed = watcher is not None, None
        if of_gradients:
            watch = OwnGradients(of_gradients, is_noted)
            disturbed = compiled_step(strategy, self._trainer, "train", watch)
        if watcher is None:
            logs, state = (disturbed or self._step)(state, given)
        else:
            if self._seen is None:
                watch = OwnGradients(is_noted=True)
                made = compiled_step(strategy, self._trainer, "train", watch)
                self._seen = made, watch
            step, gradients = self._seen
            own = SeenStep(step, disturbed or step, gradients)
            logs, state = watcher(own, state, given, placed)
        if of_gradients and not isinstance(logs, Watched):
            raise bit_flips.refused(
                "A bit flips in what a replica gives to a gradient, before the sum.",
                "a step over the global batch, which has no such parts: of a single "
                "replica, of rows that do not divide, or for the reason that "
                "strategy.summary(model) tells; or one of deterministic=True, whose "
                "sums are no single operation.",
            )
        return (logs.logs if isinstance(logs, Watched) else logs), state


def _flipped(
    placed: batches.Placed, flip: BitFlip, strategy: Strategy
) -> batches.Placed:
    leaves, structure = jax.tree.flatten(placed.data)
    where = flip.replica, flip.element, flip.bit
    leaves[0] = bit_flips.in_copy(leaves[0], strategy.replica_mesh, *where)
    return placed._replace(data=jax.tree.unflatten(structure, leaves))
