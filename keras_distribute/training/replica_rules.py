"""What Keras's losses, optimizers and random layers mean across replicas.

In `Strategy.run` (each value is one replica's own):

- gradients given to an optimizer are summed over the replicas once, before clipping,
  weight decay and loss-scale checks; while accumulating over micro-steps, only when it
  updates;
- the mean of a Keras loss is this replica's share of the global mean, so that the
  shares add up to it;
- random layers draw from a stream of their own on each replica.

In a step of `fit` (each value is the global one) only batch normalization knows of
replicas (`batch_normalization.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from keras_distribute import context
from keras_distribute._compat import optimizer as compat
from keras_distribute._compat.variables import takes_gradient_as_value
from keras_distribute.context import Frame, Mode
from keras_distribute.devices.by_rows.program import ADDEND
from keras_distribute.devices.memory_order import as_weights
from keras_distribute.devices.mesh import REPLICA_AXIS
from keras_distribute.devices.where_used import tied_by_barrier
from keras_distribute.values import reductions
from keras_distribute.values.stacked import of_this_replica
from keras_distribute.variables import SyncOnReadVariable

GRADIENT = "keras_distribute_gradient"
"""How the name of a gradient begins in the program of a step; the path of its variable
follows, after a colon.
"""

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
        # A step of the user's own may have another optimizer beside the model's.
        accumulates = compat.accumulates(optimizer)
        if context.frame().accumulates and accumulates:
            targets = compat.targets_of(optimizer, variables)
            return _accumulate_in_fit(optimizer, grads, targets, original)
        with context.without_gathering(), _in_turn(optimizer):
            return original(optimizer, _named(optimizer, grads, variables), variables)
    compat.build(optimizer, variables)
    targets = compat.targets_of(optimizer, variables)
    if compat.is_loss_scaling(optimizer):
        # The inner optimizer sums, when it updates.
        if compat.accumulates(optimizer.inner_optimizer):
            return _apply_scaled(optimizer, grads, targets)
        grads = _combined(grads, targets)
        with _updating():
            return _apply_scaled(optimizer, grads, targets)
    if compat.accumulates(optimizer):
        return _accumulate(optimizer, grads, targets, original)
    grads = _combined(grads, targets)
    with _updating():
        return original(optimizer, grads, targets)


def _in_turn(optimizer: Any) -> AbstractContextManager[None]:
    """Around the update of divided weights: what takes all of a weight gathers it, and
    XLA would begin with all weights at once.
    """
    current = context.frame()
    strategy = context.get_strategy()
    if (
        current.batch is None
        or not strategy.placement.shard_variables
        or not compat.may_take_whole_weights(optimizer)
    ):
        return nullcontext()
    return compat.updates_in_turn(optimizer, tied_by_barrier)


def _named(optimizer: Any, grads: list[Any], variables: list[Any] | None) -> list[Any]:
    """In the program of a step of `fit`, gradients that `steps/by_rows.py` knows."""
    if context.frame().batch is None:
        return grads
    targets = compat.targets_of(optimizer, variables)
    return [
        None if g is None else checkpoint_name(g, f"{GRADIENT}:{v.path}")
        for g, v in zip(grads, targets, strict=True)
    ]


def all_replicas_agree(finite: Any) -> Any:
    """Whether a flag is set on every replica."""
    if in_replica():
        return lax.pmin(finite.astype("int32"), REPLICA_AXIS).astype("bool")
    return finite


def global_sum(count: Any) -> Any:
    """The sum over the replicas of a count, or `None` outside a replica."""
    if not in_replica():
        return None
    if isinstance(count, int):
        return reductions.total_count(count)
    return lax.psum(of_this_replica(count), REPLICA_AXIS)


def replica_seed(seed: Any) -> Any:
    """This replica's own seed; outside a replica, or of only one, the seed itself."""
    if in_replica() and lax.axis_size(REPLICA_AXIS) > 1:
        return jax.random.fold_in(seed, lax.axis_index(REPLICA_AXIS))
    return seed


def shapes_differ() -> bool:
    """Whether the replicas of this program have different numbers of rows."""
    return in_replica() and context.in_ragged_program()


def _updating() -> Any:
    """The update context: assignments are the same on every replica."""
    return context.entered(Frame(context.get_strategy(), Mode.UPDATE, per_replica=True))


def _combined(grads: list[Any], targets: list[Any]) -> list[Any]:
    """Gradients summed over the replicas; of what takes its gradient as its value (the
    largest magnitudes that float8 is scaled by) the largest.
    """
    own = map(takes_gradient_as_value, targets)
    values = [g if is_value else None for g, is_value in zip(grads, own, strict=True)]
    sums = _summed(
        [g if v is None else None for g, v in zip(grads, values, strict=True)]
    )
    return [
        total if value is None else lax.pmax(value, REPLICA_AXIS)
        for value, total in zip(values, sums, strict=True)
    ]


def _summed(grads: list[Any]) -> list[Any]:
    sums = iter(_sum([grad for grad in grads if grad is not None]))
    return [None if grad is None else next(sums) for grad in grads]


def _sum(gradients: list[Any]) -> list[Any]:
    strategy = context.get_strategy()
    sums = reductions.sum_gradients(
        strategy.extended.cross_device_ops,
        gradients,
        strategy.placement.communication_dtype,
    )
    return [as_weights(total, strategy.replica_mesh) for total in sums]


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
    """An optimizer's step that accumulates gradients until the last micro-step."""
    all_pairs = [(g, v) for g, v in zip(grads, targets, strict=True) if g is not None]
    # The optimizer accumulates by itself what is no sum.
    pairs = [pair for pair in all_pairs if not takes_gradient_as_value(pair[1])]
    others = [pair for pair in all_pairs if takes_gradient_as_value(pair[1])]
    trained = [variable for _, variable in others]
    values = _combined([g for g, _ in others], trained)
    summed_at_update, own = _sum, _accumulators_of(optimizer, pairs)
    if not all(isinstance(each, SyncOnReadVariable) for each in own):
        # Divided ones have the sum of all replicas at each micro-step.
        sums = _summed([g for g, _ in pairs])
        pairs = [(g, v) for g, (_, v) in zip(sums, pairs, strict=True)]
        summed_at_update = list[Any]
    others = list(zip(values, trained, strict=True))
    _add_up(optimizer, pairs, others, summed_at_update, _updating(), original)


def _accumulate_in_fit(
    optimizer: Any, grads: list[Any], targets: list[Any], original: Apply
) -> None:
    """The same in the program of a step of `fit`, which `steps/by_rows.py` makes one of
    each replica's rows: what is added up stays a replica's own until it is named.
    """
    pairs: list[tuple[Any, Any]] = []
    others: list[tuple[Any, Any]] = []  # The optimizer accumulates them by itself.
    for grad, variable in zip(grads, targets, strict=True):
        if grad is None or takes_gradient_as_value(variable):
            others.append((_named(optimizer, [grad], [variable])[0], variable))
        else:
            pairs.append((checkpoint_name(grad, ADDEND), variable))

    def named(totals: list[Any]) -> list[Any]:
        return _named(optimizer, totals, [variable for _, variable in pairs])

    _add_up(optimizer, pairs, others, named, nullcontext(), original)


def _accumulators_of(optimizer: Any, pairs: list[tuple[Any, Any]]) -> list[Any]:
    accumulation = compat.accumulation(optimizer)
    assert accumulation is not None
    accumulators = accumulation[2]
    return [accumulators[compat.index_of(optimizer, variable)] for _, variable in pairs]


def _add_up(
    optimizer: Any,
    pairs: list[tuple[Any, Any]],
    others: list[tuple[Any, Any]],
    sum_over_replicas: Callable[[list[Any]], list[Any]],
    updating: AbstractContextManager[Any],
    original: Apply,
) -> None:
    """Adds a replica's gradients to its own accumulators, and makes the optimizer's
    step.

    Args:
        pairs: The gradients with their variables.
        others: What the optimizer is given as it is, likewise.
        sum_over_replicas: Of what has been added up, on the last micro-step.
        updating: Around the assignments.
    """
    accumulation = compat.accumulation(optimizer)
    assert accumulation is not None
    num_steps, counter, _ = accumulation
    own = _accumulators_of(optimizer, pairs)
    before = [accumulator.value for accumulator in own]
    totals = [old + grad for old, (grad, _) in zip(before, pairs, strict=True)]
    updates = (counter.value + 1) % num_steps == 0
    shapes, dtypes = [a.shape for a in before], [a.dtype for a in totals]
    summed = lax.cond(
        updates,
        lambda: sum_over_replicas(totals),
        lambda: list(map(jnp.zeros, shapes, dtypes)),
    )
    after = [jnp.where(updates, jnp.zeros_like(a), a) for a in totals]
    with updating:
        # The optimizer's own step runs each time, with empty accumulators: on the sum
        # where it updates, and on zeros where it discards the update anyway.
        for accumulator, value in zip(own, before, strict=True):
            accumulator.assign(jnp.zeros_like(value))
        trained = [variable for _, variable in (*pairs, *others)]
        original(optimizer, [*summed, *(value for value, _ in others)], trained)
        for accumulator, value in zip(own, after, strict=True):
            accumulator.assign(value)
