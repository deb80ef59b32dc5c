"""The training step of a model with small weights: they are one long weight to the
optimizer.

Most optimizers treat each element of a weight by itself, so it makes no difference to
them how elements are grouped into weights; to the program it does: one update in place
of hundreds, and one reduction over the replicas. Weights and slots stay in their
buffers from step to step, and only the forward pass takes the weights apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from keras_distribute import checks, context
from keras_distribute._compat import optimizer as compat_optimizer
from keras_distribute._compat.train_step import has_keras_step
from keras_distribute._compat.trainer import TrainState
from keras_distribute.strategies.base import Strategy
from keras_distribute.training.steps import buffer_slices, forward, packed_state
from keras_distribute.training.steps.packed_state import Packed, Packing, Place

# Where these groups are in the state.
_WEIGHTS, _SLOTS = map(TrainState._fields.index, ("weights", "slots"))


class FlatStep:
    """A training step on packed state, for `strategy`.

    Args:
        small: Which trainable variables are parts of the long weight.
        places: Those in it that are divided among the replicas.
    """

    def __init__(
        self,
        trainer: Any,
        strategy: Strategy,
        small: list[int],
        state: TrainState,
        places: Sequence[Place],
    ) -> None:
        self._trainer, self._small, count = trainer, small, len(state.weights)
        self._large = [i for i in range(count) if i not in set(small)]
        ones, own = compat_optimizer.slot_places(trainer.optimizer)
        slots = [[(_SLOTS, own[i][j]) for i in small] for j in range(len(own[0]))]
        self._num_buffers = 1 + len(slots)
        self._size = sum(state.weights[i].size for i in small)
        long = self._size + -self._size % strategy.num_replicas_in_sync
        dtype = state.weights[small[0]].dtype.name
        large = [state.weights[i] for i in self._large]
        with context.entered(context.default_strategy().top_frame):
            self._optimizer = compat_optimizer.same_for(
                trainer.optimizer,
                [((long,), dtype), *((w.shape, w.dtype.name) for w in large)],
            )
        # Of what is carried: the slots of the long weight; of all others the places.
        new_ones, (self._long, *new_own) = compat_optimizer.slot_places(self._optimizer)
        self._others = list(zip(new_ones, ones, strict=True))
        for new, i in zip(new_own, self._large, strict=True):
            self._others += zip(new, own[i], strict=True)
        divided = [False] + [strategy.placement.shard_optimizer_state] * len(slots)
        self.packing = Packing(
            state,
            strategy.replica_mesh,
            [[(_WEIGHTS, i) for i in small], *slots],
            divided,
            single=places,
            rest=strategy.placement,
        )

    @staticmethod
    def of(
        trainer: Any, strategy: Strategy, state: TrainState, places: Sequence[Place]
    ) -> FlatStep | None:
        """The step, for a model with many small weights and an optimizer that allows
        it; otherwise `None`.
        """
        weights = state.weights
        if not has_keras_step(trainer):
            return None
        mesh = strategy.replica_mesh
        in_series = mesh.series is not None  # The same on any number of processes.
        several = mesh.num_processes > 1 or in_series
        if strategy.placement.shard_optimizer_state and several:
            # To take divided buffers apart needs all processes, and one that fails is
            # alone.
            return None
        divided = {i for group, i in places if group == _WEIGHTS}
        small = [
            i
            for i, w in enumerate(weights)
            if packed_state.is_small(w)
            and w.dtype == weights[0].dtype
            and i not in divided
        ]
        if len(small) < packed_state.many_weights(mesh):
            return None
        optimizer, variables = trainer.optimizer, trainer.trainable_variables
        alone = compat_optimizer.takes_elements_alone(optimizer, variables)
        if not alone or not _slots_match(optimizer, weights, state.slots):
            return None
        return FlatStep(trainer, strategy, small, state, places)

    def __call__(self, packed: Packed, data: Any) -> tuple[Any, Packed]:
        """The logs and the new state."""
        buffers = packed.buffers
        state = TrainState(*self.packing.unpack(packed, self._num_buffers))
        carried = state._replace(
            weights=[buffers[0], *(state.weights[i] for i in self._large)],
            slots=self._carried_slots(buffers, state.slots),
        )
        logs, grads, carried = forward.loss_and_gradients(
            self._trainer, self._restored, carried, data
        )
        carried = forward.updated(self._optimizer, carried, grads)
        return logs, self._packed(carried, state)

    def place_of(self, path: str) -> tuple[int, int] | None:
        """The number of the gradient that has this variable's, and where it begins in
        it; `None` for another variable.
        """
        paths = [variable.path for variable in self._trainer.trainable_variables]
        if path not in paths:
            return None
        index = paths.index(path)
        if index in self._large:
            return 1 + self._large.index(index), 0
        parts = self.packing.parts_of_buffers()[0]
        return 0, next(start for (_, i), start, _ in parts if i == index)

    def name_of(self, number: int) -> str:
        """What a gradient is of, in words."""
        if number == 0:
            paths = [self._trainer.trainable_variables[i].path for i in self._small]
            return f"{len(paths)} small weights together ({checks.listed(paths)})"
        return self._trainer.trainable_variables[self._large[number - 1]].path

    def _restored(self, weights: list[Any]) -> list[Any]:
        """The values of the trainable variables."""
        places = [*self._small, *self._large]
        values = [*self.packing.parts(0, weights[0]), *weights[1:]]
        by_place = dict(zip(places, values, strict=True))
        return [by_place[i] for i in range(len(places))]

    def _carried_slots(self, buffers: list[Any], slots: list[Any]) -> list[Any]:
        carried: list[Any] = [None] * (len(self._long) + len(self._others))
        for new, buffer in zip(self._long, buffers[1 : self._num_buffers], strict=True):
            carried[new] = buffer
        for new, old in self._others:
            carried[new] = slots[old]
        return carried

    def _packed(self, carried: TrainState, before: TrainState) -> Packed:
        """What the next step gets: the carried state in its buffers and places."""
        weights, slots = list(before.weights), list(before.slots)
        for i, value in zip(self._large, carried.weights[1:], strict=True):
            weights[i] = value
        for place, i in self._others:
            slots[i] = carried.slots[place]
        new = carried._replace(weights=weights, slots=slots)
        flat = [carried.weights[0], *(carried.slots[place] for place in self._long)]
        flat = [buffer_slices.filled_up(buffer, self._size) for buffer in flat]
        rest = [
            self.packing.joined(new, i)
            for i in range(self._num_buffers, len(self.packing.buffers))
        ]
        return Packed([*flat, *rest], self.packing.without_packed(new))


def _slots_match(optimizer: Any, weights: list[Any], slots: list[Any]) -> bool:
    """Whether all weights have slots like themselves, of the same dtypes."""
    _, own = compat_optimizer.slot_places(optimizer)
    dtypes = [[slots[place].dtype for place in places] for places in own]
    return all(dtype == dtypes[0] for dtype in dtypes) and all(
        slots[place].shape == weight.shape
        for weight, places in zip(weights, own, strict=True)
        for place in places
    )
