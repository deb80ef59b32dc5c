"""What Keras's losses, optimizers, batch normalization and random layers mean across
replicas.

In `Strategy.run` (each value is one replica's own):

- gradients given to an optimizer are summed over the replicas once, before clipping,
  weight decay and loss-scale checks; while accumulating over micro-steps, only when it
  updates;
- the mean of a Keras loss is this replica's share of the global mean, so that the
  shares add up to it;
- random layers draw from a stream of their own on each replica;
- `BatchNormalization(synchronized=True)` takes statistics over all replicas.

In a step of `fit` (each value is the global one) only batch normalization knows of
replicas: by default each replica's rows are normalized by their own statistics, and the
moving statistics are averaged.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from keras_distribute import context
from keras_distribute._compat import layers as compat_layers
from keras_distribute._compat import optimizer as compat
from keras_distribute._compat.variables import StatelessScope
from keras_distribute.context import Frame, Mode
from keras_distribute.devices.mesh import REPLICA_AXIS
from keras_distribute.values import reductions
from keras_distribute.values.cross_device_ops import of_this_replica

Apply = Callable[[Any, list[Any], list[Any] | None], None]


def in_replica() -> bool:
    """Whether the code that is being traced is one replica's."""
    current = context.frame()
    return current.per_replica and current.mode is Mode.REPLICA


def apply_gradients(
    optimizer: Any, grads: list[Any], variables: list[Any] | None, original: Apply
) -> None:
    """An optimizer's `apply`: in a replica, on gradients summed over all of them."""
    taker = context.gradients_taker()
    if taker is not None:
        return taker(optimizer, grads, variables)
    if not in_replica():
        return original(optimizer, grads, variables)
    compat.build(optimizer, variables)
    targets = (
        list(variables) if variables is not None else compat.built_variables(optimizer)
    )
    if compat.is_loss_scaling(optimizer):
        if compat.inner_accumulates(
            optimizer
        ):  # The inner optimizer sums, when it updates.
            return _apply_scaled(optimizer, grads, targets)
        grads = _summed(grads)
        with _updating():
            return _apply_scaled(optimizer, grads, targets)
    if compat.accumulation(optimizer) is not None:
        return _accumulate(optimizer, grads, targets, original)
    grads = _summed(grads)
    with _updating():
        return original(optimizer, grads, targets)


def all_replicas_agree(finite: Any) -> Any:
    """Whether a flag is set on every replica."""
    return (
        lax.pmin(finite.astype("int32"), REPLICA_AXIS).astype("bool")
        if in_replica()
        else finite
    )


def global_sum(count: Any) -> Any:
    """The sum over the replicas of a count, or `None` outside a replica."""
    return lax.psum(of_this_replica(count), REPLICA_AXIS) if in_replica() else None


def replica_seed(seed: Any) -> Any:
    """A seed of this replica's own; outside a replica, and with only one, the seed
    itself.
    """
    if in_replica() and lax.axis_size(REPLICA_AXIS) > 1:
        return jax.random.fold_in(seed, lax.axis_index(REPLICA_AXIS))
    return seed


def shapes_differ() -> bool:
    """Whether the replicas of this program have different numbers of rows."""
    return in_replica() and context.in_ragged_program()


def batch_normalization(
    layer: Any, original: Callable[..., Any], inputs: Any, training: Any, mask: Any
) -> Any:
    """`BatchNormalization.call`: in a step of `fit`, each replica's rows by their own
    statistics.
    """
    if (
        in_replica() and inputs.size == 0 and not layer.synchronized
    ):  # No rows, no statistics: the moving ones stay.
        return original(layer, inputs, False, mask)
    batch = context.frame().batch
    groups = 1 if batch is None else batch.shards
    whole = groups == 1 or not training or not layer.trainable or layer.synchronized
    rows = 0 if batch is None else batch.rows
    if (
        whole or inputs.shape[0] != rows or layer.axis % inputs.ndim == 0
    ):  # Not the batch's rows: as they come.
        return original(layer, inputs, training, mask)
    variables = compat_layers.statistics(layer)
    values = [variable.value for variable in variables]

    def one_replica(rows: Any, row_mask: Any) -> Any:
        with StatelessScope(list(zip(variables, values, strict=True))) as scope:
            outputs = original(layer, rows, training, row_mask)
        return outputs, [scope.get_current_value(variable) for variable in variables]

    def split(array: Any) -> Any:
        return array.reshape((groups, array.shape[0] // groups, *array.shape[1:]))

    split_mask = None if mask is None else split(mask)
    outputs, updated = jax.vmap(one_replica, (0, None if mask is None else 0))(
        split(inputs), split_mask
    )
    for variable, per_replica in zip(variables, updated, strict=True):
        variable.assign(jnp.mean(per_replica, 0))
    return outputs.reshape(inputs.shape[:1] + outputs.shape[2:])


def synchronized_moments(
    x: Any, axes: Any, keepdims: bool, local_moments: Callable[..., Any]
) -> Any:
    """Mean and variance over all replicas: of equally many rows a mean of means, else
    sums over the true counts.
    """
    if not in_replica():
        return local_moments(x, axes, keepdims)
    dtype = x.dtype
    wide = x.astype("float32") if dtype in (jnp.float16, jnp.bfloat16) else x
    mean_of_all = _weighted_mean if context.in_ragged_program() else _mean_of_means
    mean = mean_of_all(wide, axes)
    variance = mean_of_all(jnp.square(wide - mean), axes)
    if not keepdims:
        mean, variance = jnp.squeeze(mean, axes), jnp.squeeze(variance, axes)
    return mean.astype(dtype), variance.astype(dtype)


def _mean_of_means(x: Any, axes: Any) -> Any:
    return lax.pmean(jnp.mean(x, axes, keepdims=True), REPLICA_AXIS)


def _weighted_mean(x: Any, axes: Any) -> Any:
    count = reductions.total_count(math.prod(x.shape[axis] for axis in axes))
    return lax.psum(jnp.sum(x, axes, keepdims=True), REPLICA_AXIS) / jnp.asarray(
        count, x.dtype
    )


def _updating() -> Any:
    """The update context: assignments are the same on every replica, and are made as
    they are.
    """
    return context.entered(Frame(context.get_strategy(), Mode.UPDATE, per_replica=True))


def _summed(grads: list[Any]) -> list[Any]:
    present = [i for i, grad in enumerate(grads) if grad is not None]
    summed = _sum([grads[i] for i in present])
    result: list[Any] = [None] * len(grads)
    for i, grad in zip(present, summed, strict=True):
        result[i] = grad
    return result


def _sum(gradients: list[Any]) -> list[Any]:
    strategy = context.get_strategy()
    return reductions.sum_gradients(
        strategy.extended.cross_device_ops,
        gradients,
        strategy.placement.communication_dtype,
    )


def _apply_scaled(optimizer: Any, grads: list[Any], targets: list[Any]) -> None:
    """A loss-scaling optimizer's step. Its stateful form assigns inside a conditional,
    which JAX cannot trace.
    """
    built = compat.built_variables(optimizer)
    by_variable = {
        id(variable): grad for variable, grad in zip(targets, grads, strict=True)
    }
    trained, state = optimizer.stateless_apply(
        [variable.value for variable in optimizer.variables],
        [by_variable.get(id(variable)) for variable in built],
        [variable.value for variable in built],
    )
    with _updating():
        for variable, value in zip(
            [*built, *optimizer.variables], [*trained, *state], strict=True
        ):
            variable.assign(value)


def _accumulate(
    optimizer: Any, grads: list[Any], targets: list[Any], original: Apply
) -> None:
    """Adds gradients to this replica's accumulators; on the last micro-step, sums them
    over the replicas and updates.

    The optimizer's own step runs with empty accumulators, on the sum where it updates
    and on zeros where it discards the update anyway.
    """
    accumulation = compat.accumulation(optimizer)
    assert accumulation is not None
    steps, counter, accumulators = accumulation
    pairs = [(g, v) for g, v in zip(grads, targets, strict=True) if g is not None]
    own = [accumulators[compat.index_of(optimizer, variable)] for _, variable in pairs]
    updates = (counter.value + 1) % steps == 0
    totals = [
        accumulator.value + grad
        for accumulator, (grad, _) in zip(own, pairs, strict=True)
    ]
    zeros = [jnp.zeros_like(total) for total in totals]
    summed = lax.cond(updates, lambda: _sum(totals), lambda: zeros)
    with _updating():
        for accumulator, zero in zip(own, zeros, strict=True):
            accumulator.assign(zero)
        original(optimizer, summed, [variable for _, variable in pairs])
        for accumulator, total, zero in zip(own, totals, zeros, strict=True):
            accumulator.assign(jnp.where(updates, zero, total))
