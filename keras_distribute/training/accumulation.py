"""Gradient accumulation in `fit` that communicates gradients only when it updates.

In a step over the global batch XLA reduces a gradient where it is computed, at each micro-step. Here the forward pass
runs per replica, with a copy of the weights on each; its outputs are the global predictions, from which loss and
metrics are computed as ever. The gradients with respect to the copies are each replica's own: they are added to its
accumulators, which are summed on the last micro-step only.

This needs a forward pass that treats each row by itself. Where that is not certain (layers or steps of the user's own,
an `add_loss` on activations, rows that do not divide, loss scaling) the step stays the global one: exact, and reducing
at each micro-step.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.sharding import PartitionSpec

from keras_distribute import context, replication
from keras_distribute._compat import optimizer as compat_optimizer
from keras_distribute._compat import rows as compat
from keras_distribute.context import Frame, Mode
from keras_distribute.mesh import REPLICA_AXIS
from keras_distribute.strategies.base import Strategy
from keras_distribute.values import PerReplica
from keras_distribute.variables import SyncOnReadVariable

Step = Callable[[Any, Any], Any]
_SPLIT, _SAME = PartitionSpec(REPLICA_AXIS), PartitionSpec()


def accumulator_indices(trainer: Any) -> list[int]:
    """Where the optimizer's variables are accumulators that a step can keep per replica; empty if it cannot."""
    optimizer = trainer.optimizer
    if optimizer is None or compat_optimizer.is_loss_scaling(optimizer):
        return []
    accumulation = compat_optimizer.accumulation(optimizer)
    if accumulation is None or compat.has_own_step(trainer) or not compat.treats_rows_alone(trainer):
        return []
    own = {id(variable) for variable in accumulation[2] if isinstance(variable, SyncOnReadVariable)}
    return [i for i, variable in enumerate(optimizer.variables) if id(variable) in own]


def unwrapped(state: Any, indices: list[int], spread: Callable[[Any], Any]) -> Any:
    """The state with each accumulator as one array of shape `(num_replicas, *shape)`."""
    trained, others, slots, metrics = state
    slots = list(slots)
    for i in indices:
        slots[i] = slots[i].stacked if isinstance(slots[i], PerReplica) else spread(slots[i])
    return trained, others, slots, metrics


def wrapped(state: Any, indices: list[int]) -> Any:
    """The state with each accumulator as a `PerReplica`, which its variable takes as its components."""
    trained, others, slots, metrics = state
    slots = list(slots)
    for i in indices:
        slots[i] = PerReplica(stacked=slots[i])
    return trained, others, slots, metrics


def accumulating(trainer: Any, strategy: Strategy, indices: list[int], global_step: Step) -> Step:
    """A training step whose state holds the accumulators per replica."""

    def step(state: Any, data: Any) -> Any:
        if context.frame().groups == strategy.num_replicas_in_sync:
            result = _local_step(trainer, strategy, indices, state, data)
            if result is not None:
                return result
        trained, others, slots, metrics = state
        slots = list(slots)
        for i in indices:
            slots[i] = jnp.sum(slots[i], 0)
        logs, (trained, others, slots, metrics) = global_step((trained, others, slots, metrics), data)
        for i in indices:
            slots[i] = jnp.zeros((strategy.num_replicas_in_sync, *slots[i].shape), slots[i].dtype).at[0].set(slots[i])
        return logs, (trained, others, slots, metrics)

    return step


def _local_step(trainer: Any, strategy: Strategy, indices: list[int], state: Any, data: Any) -> Any:
    trained, others, slots, metrics = state
    x, y, weight = compat.unpack_x_y_sample_weight(data)
    forward = _forward(trainer, strategy, trained, others, x)
    if forward is None:
        return None
    replicas, optimizer = strategy.num_replicas_in_sync, trainer.optimizer
    split = strategy.replica_mesh.split
    copies = [
        lax.with_sharding_constraint(jnp.broadcast_to(value, (replicas, *value.shape)), split) for value in trained
    ]

    def loss_of(copies: list[Any]) -> Any:
        predictions, new_others, losses = forward(copies, others, x)
        loss, (_, new_others, new_metrics) = compat.stateless_loss(
            trainer,
            losses,
            (trained, new_others, metrics),
            x=x,
            y=y,
            y_pred=predictions,
            sample_weight=weight,
            training=True,
        )
        return optimizer.scale_loss(loss), (loss, predictions, new_others, new_metrics)

    (_, (loss, predictions, others, metrics)), grads = jax.value_and_grad(loss_of, has_aux=True)(copies)
    trained, slots = _apply(optimizer, indices, trained, slots, grads)
    logs, metrics = compat.update_metrics(trainer, metrics, loss, x, y, predictions, weight)
    return logs, (trained, others, slots, metrics)


def _apply(optimizer: Any, indices: list[int], trained: list[Any], slots: list[Any], grads: list[Any]) -> Any:
    """The optimizer's step on the summed accumulators where it updates; elsewhere it discards what it gets."""
    accumulation = compat_optimizer.accumulation(optimizer)
    assert accumulation is not None
    steps, counter, accumulators = accumulation
    variables = optimizer.variables
    count = slots[next(i for i, variable in enumerate(variables) if variable is counter)]
    updates = (count + 1) % steps == 0
    place = {id(variables[i]): i for i in indices}
    order = [place[id(accumulator)] for accumulator in accumulators]
    totals = [slots[i] + grad for i, grad in zip(order, grads, strict=True)]
    shapes = [total.shape[1:] for total in totals]
    summed = lax.cond(
        updates,
        lambda: [jnp.sum(total, 0) for total in totals],
        lambda: [jnp.zeros(shape, total.dtype) for shape, total in zip(shapes, totals, strict=True)],
    )
    slots = list(slots)
    for i, shape in zip(order, shapes, strict=True):
        slots[i] = jnp.zeros(shape, slots[i].dtype)
    trained, slots = optimizer.stateless_apply(slots, summed, trained)
    for i, total in zip(order, totals, strict=True):
        slots[i] = jnp.where(updates, jnp.zeros_like(total), total)
    return trained, slots


def _forward(trainer: Any, strategy: Strategy, trained: list[Any], others: list[Any], x: Any) -> Any:
    """The forward pass per replica, from copies of the weights; `None` where its parts do not make up the whole."""
    replicas = strategy.num_replicas_in_sync
    leaves = jax.tree.leaves(x)
    rows = leaves[0].shape[0]
    if any(leaf.ndim == 0 or leaf.shape[0] != rows for leaf in leaves):
        return None
    averaged = [isinstance(variable, SyncOnReadVariable) for variable in trainer.non_trainable_variables]
    kinds: dict[str, Any] = {}

    def one_replica(copies: list[Any], others: list[Any], x: Any) -> Any:
        with context.entered(Frame(strategy, Mode.REPLICA, strategy.make_replica_context(), per_replica=True)):
            predictions, others, losses = trainer.stateless_call(copies, others, x, return_losses=True, training=True)
        outputs, kinds["structure"] = jax.tree.flatten(predictions)
        masks = [compat.get_keras_mask(output) for output in outputs]
        kinds["masked"] = [mask is not None for mask in masks]
        others = [
            (lax.psum(value, REPLICA_AXIS) / replicas).astype(value.dtype) if mean else value
            for value, mean in zip(others, averaged, strict=True)
        ]
        return outputs, [mask for mask in masks if mask is not None], others, list(losses)

    def shape(value: Any, divided: bool = False) -> jax.ShapeDtypeStruct:
        own = (value.shape[0] // replicas, *value.shape[1:]) if divided else value.shape
        return jax.ShapeDtypeStruct(own, value.dtype)

    arguments = (list(map(shape, trained)), list(map(shape, others)), jax.tree.map(lambda leaf: shape(leaf, True), x))
    program, (outputs, masks, _, _) = jax.make_jaxpr(
        one_replica, axis_env=[(REPLICA_AXIS, replicas)], return_shape=True
    )(*arguments)
    same = [True] * (len(trained) + len(others)) + [False] * len(leaves)
    equal = replication.equal_on_all_replicas(program, same)[len(outputs) + len(masks) :]
    if not all(equal) or any(o.ndim == 0 or o.shape[0] != rows // replicas for o in [*outputs, *masks]):
        return None

    evaluate = core.jaxpr_as_fun(program)
    sizes = [len(outputs), len(masks), len(others)]

    def body(copies: list[Any], others: list[Any], x: Any) -> Any:
        results = [jnp.asarray(r) for r in evaluate(*[copy[0] for copy in copies], *others, *jax.tree.leaves(x))]
        ends = list(itertools.accumulate(sizes))
        return results[: ends[0]], results[ends[0] : ends[1]], results[ends[1] : ends[2]], results[ends[2] :]

    mapped = jax.shard_map(
        body,
        mesh=strategy.replica_mesh.mesh,
        in_specs=(_SPLIT, _SAME, _SPLIT),
        out_specs=(_SPLIT, _SPLIT, _SAME, _SAME),
        check_vma=False,
    )

    def forward(copies: list[Any], others: list[Any], x: Any) -> Any:
        outputs, masks, others, losses = mapped(copies, others, x)
        left = iter(masks)
        for output, masked in zip(outputs, kinds["masked"], strict=True):
            if masked:
                compat.set_keras_mask(output, next(left))
        return jax.tree.unflatten(kinds["structure"], outputs), others, losses

    return forward
