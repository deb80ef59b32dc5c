"""Steps that give the same bits on any number of devices (`deterministic=True`).

Each replica computes predictions and gradients of its own rows, in a program of its own
(`devices/in_series.py`). The predictions of all are gathered, so that loss, metrics and
the optimizer's update are computed on each device as on a single one: any loss, mask or
weight means what it means there. Rows that do not divide are filled up with copies of
the last one, whose predictions are cut off before the loss: nothing depends on them.

What is not known to treat each row alone is computed whole on every device: as exact,
and no faster than one. `plan.py` says which, and why.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from keras_distribute._compat import rows as compat
from keras_distribute._compat.trainer import PredictState, TestState, TrainState
from keras_distribute.devices.mesh import REPLICA_AXIS
from keras_distribute.devices.over_replicas import over_replicas
from keras_distribute.strategies.base import Strategy
from keras_distribute.training.steps import accumulating, forward
from keras_distribute.training.steps.forward import OneReplica
from keras_distribute.training.steps.step_programs import Step
from keras_distribute.values import reductions
from keras_distribute.variables.components import of_first

_SPLIT, _SAME = PartitionSpec(REPLICA_AXIS), PartitionSpec()
_STATES = {"train": TrainState, "test": TestState, "predict": PredictState}


def step_in_series(
    trainer: Any,
    strategy: Strategy,
    kind: str,
    plain: Step,
    *,
    is_whole: bool,
    accumulators: Sequence[int] = (),
) -> Step:
    """A step on the global batch and the state, of which gradient accumulators have an
    axis for the replicas.

    Args:
        kind: `"train"`, `"test"` or `"predict"`.
        plain: Keras's step, or the user's own.
        is_whole: Whether each device computes all rows.
        accumulators: Where they are among the slots.
    """
    of_kind: type[Any] = _STATES[kind]
    mesh = strategy.replica_mesh
    whole = _Whole(plain, accumulators)

    def step(state: Any, data: Any) -> Any:
        state = of_kind(*map(list, state))
        places = _state_specs(state, accumulators)
        own = None if is_whole else _Batch.of(trainer, strategy, kind, state, data)
        if own is None:
            program = over_replicas(mesh, whole, (places, _SAME), (_SAME, places))
            return program(state, data)
        body = _BODIES[kind](trainer, strategy, own, accumulators)
        logs = _SPLIT if kind == "predict" else _SAME
        program = over_replicas(mesh, body, (places, _SPLIT, _SAME), (logs, places))
        outputs, new = program(state, own.x, data)
        if kind == "predict":
            cut = [output[: own.rows] for output in outputs]
            outputs = jax.tree.unflatten(own.forward.structure, cut)
        return outputs, new

    return step


def _state_specs(state: Any, accumulators: Sequence[int]) -> Any:
    """Which of the state's arrays have an axis for the replicas."""
    places = jax.tree.map(lambda _: _SAME, state)
    for i in accumulators:
        places.slots[i] = _SPLIT
    return places


class _Batch:
    """A global batch, as its replicas take it.

    Args:
        forward: The forward pass of one replica.
        x: The inputs, filled up so that their rows divide.
        rows: Of the batch.
        each: Rows of a replica.
    """

    def __init__(self, forward: OneReplica, x: Any, rows: int, each: int) -> None:
        self.forward, self.x, self.rows, self.each = forward, x, rows, each

    @staticmethod
    def of(
        trainer: Any, strategy: Strategy, kind: str, state: Any, data: Any
    ) -> _Batch | None:
        """`None` where the batch must be computed whole."""
        x = compat.unpack_x_y_sample_weight(data)[0]
        leaves = jax.tree.leaves(x)
        rows = leaves[0].shape[0] if leaves and leaves[0].ndim else 0
        if not rows or any(a.ndim == 0 or a.shape[0] != rows for a in leaves):
            return None
        count, is_training = strategy.num_replicas_in_sync, kind == "train"
        if rows % count and is_training and compat.normalizes_batches(trainer):
            return None  # Statistics are of true rows alone.
        split = strategy.replica_mesh.split
        x = jax.tree.map(
            lambda leaf: lax.with_sharding_constraint(_filled(leaf, count), split), x
        )
        own = forward.one_replica(
            trainer,
            strategy,
            list,
            state.weights,
            state.others,
            x,
            training=is_training,
        )
        return None if own is None else _Batch(own, x, rows, -(-rows // count))

    def gathered(self, values: Sequence[Any]) -> list[Any]:
        """The true rows of all replicas, from each one's own."""
        return [
            lax.all_gather(value, REPLICA_AXIS, axis=0, tiled=True)[: self.rows]
            for value in values
        ]

    def own_rows(self, of_all: Any) -> Any:
        """This replica's part of gradients with respect to what was gathered."""
        shape = (self.each, *of_all.shape[1:])
        if of_all.dtype == jax.dtypes.float0:
            return np.zeros(shape, of_all.dtype)
        count = lax.axis_size(REPLICA_AXIS) * self.each
        none = jnp.zeros((count - self.rows, *of_all.shape[1:]), of_all.dtype)
        return lax.dynamic_slice_in_dim(
            jnp.concatenate([of_all, none]),
            lax.axis_index(REPLICA_AXIS) * self.each,
            self.each,
        )


def _filled(leaf: Any, count: int) -> Any:
    """The rows, and copies of the last one, so that their number divides."""
    missing = -leaf.shape[0] % count
    if not missing:
        return leaf
    return jnp.concatenate([leaf, jnp.repeat(leaf[-1:], missing, axis=0)])


class _Whole:
    """A step that each device does alone, on all rows."""

    def __init__(self, plain: Step, accumulators: Sequence[int]) -> None:
        self._plain, self._accumulators = plain, accumulators

    def __call__(self, state: Any, data: Any) -> Any:
        if not self._accumulators:
            logs, new = self._plain(state, data)
            return logs, type(state)(*map(list, new))
        sums = {
            i: lax.psum(state.slots[i][0], REPLICA_AXIS) for i in self._accumulators
        }
        before = accumulating.with_changed(state.slots, sums)
        logs, new = self._plain(state._replace(slots=before), data)
        new = TrainState(*map(list, new))
        first = {i: of_first(new.slots[i])[None] for i in self._accumulators}
        return logs, new._replace(slots=accumulating.with_changed(new.slots, first))


def _loss(
    trainer: Any,
    state: TrainState | TestState,
    data: Any,
    predictions: Any,
    others: list[Any],
    losses: list[Any],
    *,
    training: bool,
) -> Any:
    """The loss of all rows, and the values of weights, others and metrics after it."""
    x, y, weight = compat.unpack_x_y_sample_weight(data)
    return compat.stateless_loss(
        trainer,
        losses,
        (state.weights, others, state.metrics),
        x=x,
        y=y,
        y_pred=predictions,
        sample_weight=weight,
        training=training,
    )


def _train(
    trainer: Any, strategy: Strategy, batch: _Batch, accumulators: Sequence[int]
) -> Callable[..., Any]:
    ops = strategy.extended.cross_device_ops
    dtype = strategy.placement.communication_dtype

    def summed(gradients: list[Any]) -> list[Any]:
        return reductions.sum_gradients(ops, gradients, dtype)

    def one_replica(state: TrainState, own_x: Any, data: Any) -> Any:
        x, y, weight = compat.unpack_x_y_sample_weight(data)

        def predicted(weights: list[Any]) -> Any:
            outputs, masks, others, losses = batch.forward(weights, state.others, own_x)
            return (outputs, losses), (masks, others)

        (outputs, losses), pull, (own_masks, others) = jax.vjp(
            predicted, state.weights, has_aux=True
        )
        masks = batch.gathered(own_masks)

        def loss_of(outputs: list[Any], losses: list[Any]) -> Any:
            predictions = batch.forward.predictions(outputs, masks)
            loss, (_, new, metrics) = _loss(
                trainer, state, data, predictions, others, losses, training=True
            )
            scaled = compat.scaled_loss(trainer, loss, state.slots)
            return scaled, (loss, predictions, new, metrics)

        whole = batch.gathered(outputs)
        (of_outputs, of_losses), (loss, predictions, others, metrics) = jax.grad(
            loss_of, argnums=(0, 1), has_aux=True, allow_int=True
        )(whole, losses)
        count = lax.axis_size(REPLICA_AXIS)
        own = list(map(batch.own_rows, of_outputs))
        (gradients,) = pull((own, [gradient / count for gradient in of_losses]))
        logs, metrics = compat.update_metrics(
            trainer, metrics, loss, x, y, predictions, weight
        )
        new = state._replace(others=list(others), metrics=list(metrics))
        if accumulators:
            slots = {i: new.slots[i][0] for i in accumulators}
            new = new._replace(slots=accumulating.with_changed(new.slots, slots))
            new = accumulating.updated(trainer.optimizer, new, gradients, summed)
            slots = {i: new.slots[i][None] for i in accumulators}
            new = new._replace(slots=accumulating.with_changed(new.slots, slots))
        else:
            new = forward.updated(trainer.optimizer, new, summed(gradients))
        return logs, TrainState(*map(list, new))

    return one_replica


def _test(
    trainer: Any, strategy: Strategy, batch: _Batch, _: Sequence[int]
) -> Callable[..., Any]:
    def one_replica(state: TestState, own_x: Any, data: Any) -> Any:
        x, y, weight = compat.unpack_x_y_sample_weight(data)
        outputs, masks, others, losses = batch.forward(
            state.weights, state.others, own_x
        )
        predictions = batch.forward.predictions(
            batch.gathered(outputs), batch.gathered(masks)
        )
        loss, (_, others, metrics) = _loss(
            trainer, state, data, predictions, others, losses, training=False
        )
        logs, metrics = compat.update_metrics(
            trainer, metrics, loss, x, y, predictions, weight
        )
        return logs, state._replace(others=list(others), metrics=list(metrics))

    return one_replica


def _predict(
    trainer: Any, strategy: Strategy, batch: _Batch, _: Sequence[int]
) -> Callable[..., Any]:
    def one_replica(state: PredictState, own_x: Any, data: Any) -> Any:
        outputs, _, others, _ = batch.forward(state.weights, state.others, own_x)
        return outputs, state._replace(others=others)

    return one_replica


_BODIES: dict[str, Callable[..., Callable[..., Any]]] = {
    "train": _train,
    "test": _test,
    "predict": _predict,
}
