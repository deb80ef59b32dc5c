"""The training step of a model with many small weights: they are one long weight to the
optimizer.

Most optimizers treat each element of a weight by itself, so it makes no difference to
them how elements are grouped into weights; to the program it does: one update in place
of hundreds, and one reduction over the replicas. Weights and slots stay in their
buffers from step to step, and only the forward pass takes the weights apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from keras_distribute import context
from keras_distribute._compat import optimizer as compat_optimizer
from keras_distribute.strategies.base import Strategy
from keras_distribute.training.steps import forward, local, packed_state
from keras_distribute.training.steps.packed_state import Packed, Packing, Place, State
from keras_distribute.training.steps.plan import StepPlan

_WEIGHTS, _OTHERS, _SLOTS, _METRICS = range(4)


class FlatStep:
    """A training step on packed state, for `strategy`.

    Args:
        trainer: The model.
        strategy: Its strategy.
        optimizer: The optimizer of one long weight and the large ones.
        order: Where the slots of each weight are among an optimizer's variables.
        small: Which trainable variables are parts of the long weight.
        state: The state of the training step.
        places: Those in it that are divided among the replicas.
        is_local: Whether each replica computes the gradients of its own rows.
    """

    def __init__(
        self,
        trainer: Any,
        strategy: Strategy,
        optimizer: Any,
        order: compat_optimizer.SlotOrder,
        small: list[int],
        state: State,
        places: Sequence[Place],
        is_local: bool,
    ) -> None:
        self._trainer, self._strategy, self._optimizer, self._order = (
            trainer,
            strategy,
            optimizer,
            order,
        )
        self._small, count = small, len(state[_WEIGHTS])
        self._large = [i for i in range(count) if i not in set(small)]
        self._ones, self._slots_of = order.places(count)
        slots = [
            [(_SLOTS, self._slots_of[i][j]) for i in small]
            for j in range(len(self._slots_of[0]))
        ]
        self._num_buffers = 1 + len(slots)
        divided = [False] + [strategy.placement.shard_optimizer_state] * len(slots)
        self.packing = Packing(
            state,
            strategy.replica_mesh,
            [[(_WEIGHTS, i) for i in small], *slots],
            divided,
            places,
            strategy.placement,
        )
        self._is_local = is_local

    @staticmethod
    def of(
        trainer: Any,
        strategy: Strategy,
        state: State,
        places: Sequence[Place],
        plan: StepPlan,
    ) -> FlatStep | None:
        """The step, for a model with many small weights and an optimizer that allows
        it; otherwise `None`.
        """
        weights = state[_WEIGHTS]
        if not plan.is_keras_step:
            return None
        if (
            strategy.placement.shard_optimizer_state
            and strategy.replica_mesh.num_processes > 1
        ):
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
        if len(small) < packed_state.MANY:
            return None
        with context.entered(
            context.default_strategy().top_frame
        ):  # It makes small optimizers, to look at them.
            order = compat_optimizer.slots_by_element(
                trainer.optimizer, trainer.trainable_variables
            )
        if order is None or not _slots_match(order, weights, state[_SLOTS]):
            return None
        large = [
            (w.shape, w.dtype.name)
            for i, w in enumerate(weights)
            if i not in set(small)
        ]
        size = sum(weights[i].size for i in small)
        size += -size % strategy.num_replicas_in_sync
        with context.entered(context.default_strategy().top_frame):
            optimizer = compat_optimizer.same_for(
                trainer.optimizer, [((size,), weights[0].dtype.name), *large]
            )
        return FlatStep(
            trainer, strategy, optimizer, order, small, state, places, plan.is_local
        )

    def __call__(self, packed: Packed, data: Any) -> tuple[Any, Packed]:
        """The logs and the new state."""
        buffers, single = packed.buffers, packed.single
        rest = Packed([None] * self._num_buffers + buffers[self._num_buffers :], single)
        state = self._unpacked(rest)
        weights = [buffers[0], *(state[_WEIGHTS][i] for i in self._large)]
        logs, grads, others, metrics = self._gradients(weights, state, data)
        slots = self._carried_slots(buffers, state[_SLOTS])
        weights, slots = self._optimizer.stateless_apply(slots, grads, weights)
        return logs, self._packed(weights, slots, state, others, metrics)

    def _gradients(self, weights: list[Any], state: State, data: Any) -> Any:
        """The logs, the gradients of the carried weights, and the new values of the
        other groups.
        """
        trainer, others, metrics = self._trainer, state[_OTHERS], state[_METRICS]
        if self._is_local:
            result = local.gradients(
                trainer, self._strategy, self._restored, weights, others, metrics, data
            )
            if result is not None:
                return result
        run = forward.over_all(trainer, self._restored)
        return forward.loss_and_gradients(
            trainer, run, self._restored, weights, weights, others, metrics, data
        )

    def _restored(self, weights: list[Any]) -> list[Any]:
        """The values of the trainable variables."""
        values: list[Any] = [None] * (len(self._small) + len(self._large))
        for i, value in zip(
            self._small, self.packing.parts(0, weights[0]), strict=True
        ):
            values[i] = value
        for i, value in zip(self._large, weights[1:], strict=True):
            values[i] = value
        return values

    def _carried_slots(self, buffers: list[Any], slots: list[Any]) -> list[Any]:
        ones, own = self._order.places(1 + len(self._large))
        carried: list[Any] = [None] * (len(ones) + sum(map(len, own)))
        for place, i in zip(ones, self._ones, strict=True):
            carried[place] = slots[i]
        for place, buffer in zip(own[0], buffers[1 : self._num_buffers], strict=True):
            carried[place] = buffer
        for places, i in zip(own[1:], self._large, strict=True):
            for place, j in zip(places, self._slots_of[i], strict=True):
                carried[place] = slots[j]
        return carried

    def _packed(
        self,
        weights: list[Any],
        carried: list[Any],
        state: State,
        others: Any,
        metrics: Any,
    ) -> Packed:
        ones, own = self._order.places(1 + len(self._large))
        values, slots = list(state[_WEIGHTS]), list(state[_SLOTS])
        for i, value in zip(self._large, weights[1:], strict=True):
            values[i] = value
        for place, i in zip(ones, self._ones, strict=True):
            slots[i] = carried[place]
        for places, i in zip(own[1:], self._large, strict=True):
            for place, j in zip(places, self._slots_of[i], strict=True):
                slots[j] = carried[place]
        new = (values, others, slots, metrics)
        flat = [weights[0], *(carried[place] for place in own[0])]
        rest = [
            self.packing.joined(new, i)
            for i in range(self._num_buffers, len(self.packing.buffers))
        ]
        return Packed([*flat, *rest], self.packing.without_packed(new))

    def _unpacked(self, packed: Packed) -> State:
        """The state but for what is in the buffers of weights and slots."""
        state: State = tuple(list(group) for group in packed.single)
        for i in range(self._num_buffers, len(self.packing.buffers)):
            places: list[Place] = self.packing.buffers[i]
            for (group, index), value in zip(
                places, self.packing.parts(i, packed.buffers[i]), strict=True
            ):
                state[group][index] = value
        return state


def _slots_match(
    order: compat_optimizer.SlotOrder, weights: list[Any], slots: list[Any]
) -> bool:
    """Whether the optimizer's variables are what `order` says, each slot like its
    weight.
    """
    ones, own = order.places(len(weights))
    if len(ones) + sum(map(len, own)) != len(slots):
        return False
    dtypes = [[slots[place].dtype for place in places] for places in own]
    return all(dtype == dtypes[0] for dtype in dtypes) and all(
        slots[place].shape == weight.shape
        for weight, places in zip(weights, own, strict=True)
        for place in places
    )
