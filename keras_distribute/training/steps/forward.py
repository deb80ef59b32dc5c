"""The forward pass of a training step, and its gradients: over the global batch, or of
one replica's rows.

The second needs a forward pass that treats each row by itself (`_compat.rows`), and
rows that divide. What to sum over the replicas, and when, is left to the caller.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from keras_distribute import context
from keras_distribute._compat import rows as compat
from keras_distribute._compat.trainer import TrainState
from keras_distribute.context import Frame, Mode
from keras_distribute.devices import replication_proof
from keras_distribute.devices.mesh import REPLICA_AXIS
from keras_distribute.strategies.base import Strategy
from keras_distribute.training import batch_normalization

Forward = Callable[[list[Any], list[Any], Any], tuple[Any, list[Any], list[Any]]]
Restore = Callable[[list[Any]], list[Any]]


def over_all(trainer: Any, restore: Restore) -> Forward:
    """The forward pass over the global batch: from weights, other variables and inputs
    to predictions, others, losses.

    Args:
        restore: From weights as they are carried to the values of the trainable
            variables.
    """

    def forward(weights: list[Any], others: list[Any], x: Any) -> Any:
        return compat.forward(trainer, restore(weights), others, x, training=True)

    return forward


@dataclasses.dataclass(frozen=True)
class OneReplica:
    """The traced forward pass of one replica's rows.

    Args:
        program: From weights, other variables and inputs to predictions, their masks,
            other variables and losses.
        sizes: How many of each it returns.
        structure: Of the predictions.
        masked: Which of them have masks.
    """

    program: core.ClosedJaxpr
    sizes: tuple[int, int, int, int]
    structure: Any
    masked: tuple[bool, ...]

    def __call__(
        self, weights: Sequence[Any], others: Sequence[Any], x: Any
    ) -> tuple[list[Any], ...]:
        """Predictions, masks, other variables, losses."""
        evaluate = core.jaxpr_as_fun(self.program)
        results = evaluate(*weights, *others, *jax.tree.leaves(x))
        ends = list(itertools.accumulate(self.sizes))
        parts = itertools.pairwise([0, *ends])
        results = list(map(jnp.asarray, results))
        return tuple(results[begin:end] for begin, end in parts)

    def predictions(self, outputs: Sequence[Any], masks: Sequence[Any]) -> Any:
        """The predictions in their structure, with their masks."""
        left = iter(masks)
        for output, masked in zip(outputs, self.masked, strict=True):
            if masked:
                compat.set_keras_mask(output, next(left))
        return jax.tree.unflatten(self.structure, outputs)


def one_replica(
    trainer: Any,
    strategy: Strategy,
    restore: Restore,
    weights: list[Any],
    others: list[Any],
    x: Any,
    *,
    training: bool = True,
) -> OneReplica | None:
    """The forward pass of one replica; `None` where those of all do not make up
    the whole.

    Args:
        restore: From weights as they are carried to the values of the trainable
            variables.
        weights: Examples of what the result will be called with.
        others: Likewise.
        x: The inputs of all replicas.
        training: Whether for a training step.
    """
    replicas = strategy.num_replicas_in_sync
    leaves = jax.tree.leaves(x)
    rows = leaves[0].shape[0]
    if any(leaf.ndim == 0 or leaf.shape[0] != rows for leaf in leaves):
        return None
    kinds: dict[str, Any] = {}
    function = _of_one_replica(trainer, strategy, restore, kinds, training)
    arguments = _shapes_of_one(replicas, weights, others, x)
    with strategy.replica_mesh.tracing():
        program, (outputs, masks, new, losses) = jax.make_jaxpr(
            function, axis_env=[(REPLICA_AXIS, replicas)], return_shape=True
        )(*arguments)
    same = [True] * (len(weights) + len(others)) + [False] * len(leaves)
    num_split = len(outputs) + len(masks)
    equal = replication_proof.equal_on_all_replicas(program, same)[num_split:]
    each = rows // replicas
    of_rows = all(o.ndim > 0 and o.shape[0] == each for o in [*outputs, *masks])
    if not all(equal) or not of_rows:
        return None
    sizes = (len(outputs), len(masks), len(new), len(losses))
    return OneReplica(program, sizes, kinds["structure"], tuple(kinds["masked"]))


def _of_one_replica(
    trainer: Any,
    strategy: Strategy,
    restore: Restore,
    kinds: dict[str, Any],
    training: bool,
) -> Callable[..., Any]:
    """The forward pass of one replica's rows: from weights, other variables and inputs
    to predictions, their masks, others, losses.

    Args:
        kinds: Gets the structure of the predictions, and which have masks.
    """
    kept = trainer.non_trainable_variables

    def one_replica(weights: list[Any], others: list[Any], x: Any) -> Any:
        replica = strategy.make_replica_context()
        frame = Frame(strategy, Mode.REPLICA, replica, per_replica=True)
        with context.entered(frame):
            predictions, others, losses = compat.forward(
                trainer, restore(weights), others, x, training=training
            )
        outputs, kinds["structure"] = jax.tree.flatten(predictions)
        masks = [compat.get_keras_mask(output) for output in outputs]
        kinds["masked"] = [mask is not None for mask in masks]
        if training:
            others = batch_normalization.mean_of_moving_statistics(kept, others)
        own_masks = [mask for mask in masks if mask is not None]
        return outputs, own_masks, list(others), list(losses)

    return one_replica


def _shapes_of_one(
    replicas: int, weights: list[Any], others: list[Any], x: Any
) -> tuple[Any, ...]:
    """What the forward pass of one replica takes, as shapes."""

    def shape(value: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(value.shape, value.dtype)

    def rows(leaf: Any) -> jax.ShapeDtypeStruct:
        each = leaf.shape[0] // replicas
        return jax.ShapeDtypeStruct((each, *leaf.shape[1:]), leaf.dtype)

    return list(map(shape, weights)), list(map(shape, others)), jax.tree.map(rows, x)


def loss_and_gradients(
    trainer: Any,
    forward: Forward,
    restore: Restore,
    state: TrainState,
    data: Any,
) -> tuple[Any, list[Any], TrainState]:
    """Runs `forward`, computes the loss of all rows, and the gradients with respect to
    what `forward` took.

    Args:
        restore: From weights as they are carried to the values of the trainable
            variables.
        state: With its weights as they are carried: a loss may look at them.

    Returns:
        The logs, the gradients, and the state with new `others` and `metrics`.
    """
    x, y, weight = compat.unpack_x_y_sample_weight(data)

    def loss_of(weights: list[Any]) -> Any:
        predictions, others, losses = forward(weights, state.others, x)
        loss, (_, others, metrics) = compat.stateless_loss(
            trainer,
            losses,
            (restore(state.weights), others, state.metrics),
            x=x,
            y=y,
            y_pred=predictions,
            sample_weight=weight,
            training=True,
        )
        scaled = trainer.optimizer.scale_loss(loss)
        return scaled, (loss, predictions, others, metrics)

    (_, (loss, predictions, others, metrics)), grads = jax.value_and_grad(
        loss_of, has_aux=True
    )(state.weights)
    logs, metrics = compat.update_metrics(
        trainer, metrics, loss, x, y, predictions, weight
    )
    return logs, grads, state._replace(others=others, metrics=metrics)


def updated(optimizer: Any, state: TrainState, grads: list[Any]) -> TrainState:
    """The state after the optimizer's step."""
    weights, slots = optimizer.stateless_apply(state.slots, grads, state.weights)
    return state._replace(weights=weights, slots=slots)
