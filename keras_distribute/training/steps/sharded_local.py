"""The training step on divided weights whose collectives are written down: each replica
gathers the weights where its rows need them, and keeps its part of each gradient's sum.

Of a step over the global batch (`sharded.py`) XLA decides what is communicated, and may
sum whole gradients before it divides them. Here the forward and the backward pass are
programs of one replica. What it needs of a model is in `plan.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.sharding import PartitionSpec

from keras_distribute import context
from keras_distribute._compat import rows as compat
from keras_distribute._compat.trainer import TrainState
from keras_distribute.devices import where_used
from keras_distribute.devices.mesh import REPLICA_AXIS
from keras_distribute.devices.over_replicas import over_replicas
from keras_distribute.strategies.base import Strategy
from keras_distribute.training.steps import forward
from keras_distribute.training.steps.forward import Forward, OneReplica, Parts
from keras_distribute.training.steps.gather import divided_axis, whole_in_replica
from keras_distribute.training.steps.sharded import tie_of
from keras_distribute.training.steps.step_programs import Step
from keras_distribute.values import reductions

_SPLIT, _SAME = PartitionSpec(REPLICA_AXIS), PartitionSpec()


def sharded_local_step(
    trainer: Any,
    strategy: Strategy,
    groups: Sequence[Sequence[Any]],
    global_step: Step,
) -> Step:
    """Keras's training step, for a model whose plan is local.

    Args:
        groups: The variables behind its state.
        global_step: For batches whose rows do not divide.
    """
    axes = [[divided_axis(v.value_sharding) for v in group] for group in groups[:2]]
    parts = Parts(axes[0], axes[1], whole_in_replica)

    def step(state: Any, data: Any) -> Any:
        own = _forward(trainer, strategy, parts, TrainState(*state), data)
        if own is None:
            return global_step(state, data)
        logs, grads, new = forward.loss_and_gradients(
            trainer, own, list, TrainState(*state), data
        )
        return logs, forward.updated(trainer.optimizer, new, grads)

    return step


def _forward(
    trainer: Any, strategy: Strategy, parts: Parts, state: TrainState, data: Any
) -> Forward | None:
    """The forward pass per replica; `None` where the rows do not divide, or the parts
    do not make up the whole.
    """
    batch = context.frame().batch
    if batch is None or batch.shards != strategy.num_replicas_in_sync:
        return None
    x = compat.unpack_x_y_sample_weight(data)[0]
    own = forward.one_replica(
        trainer, strategy, list, state.weights, state.others, x, parts=parts
    )
    if own is None:
        return None
    passes = _Passes(strategy, own, parts)
    function = jax.custom_vjp(lambda *given: passes.forward(*given)[0])
    function.defvjp(passes.forward, passes.backward)

    def whole(weights: list[Any], others: list[Any], x: Any) -> Any:
        outputs, masks, new, losses = function(weights, others, jax.tree.leaves(x))
        kept = [
            old if axis is not None else value
            for old, value, axis in zip(others, new, parts.others, strict=True)
        ]
        return own.predictions(outputs, masks), kept, losses

    return whole


class _Passes:
    """The forward and the backward pass of all replicas.

    Args:
        own: The forward pass of one replica.
        parts: How what it takes is divided.
    """

    def __init__(self, strategy: Strategy, own: OneReplica, parts: Parts) -> None:
        self._strategy, self._parts = strategy, parts
        self._mesh, self._tie = strategy.replica_mesh, tie_of(strategy.replica_mesh)
        self._sizes = own.sizes
        self._differentiable = _differentiable(own, parts)
        self._weights = list(map(_spec, parts.weights))
        self._others = list(map(_spec, parts.others))
        self._known: list[bool] = []
        self._trace(own.program)

    def _trace(self, program: core.ClosedJaxpr) -> None:
        """The forward pass with what the backward pass needs of it, and that one."""
        evaluate, count = core.jaxpr_as_fun(program), len(self._parts.weights)
        found: dict[str, Any] = {}

        def forward_pass(*given: Any) -> Any:
            def of_weights(weights: Sequence[Any]) -> Any:
                outputs = evaluate(*weights, *given[count:])
                return self._apart(outputs)

            results, pull, rest = jax.vjp(of_weights, given[:count], has_aux=True)
            leaves, found["pull"] = jax.tree.flatten(pull)
            return results, rest, leaves

        def backward_pass(leaves: Any, gradients: Any) -> Any:
            return jax.tree.unflatten(found["pull"], leaves)(gradients)[0]

        axis = [(REPLICA_AXIS, self._mesh.num_replicas)]
        with self._mesh.tracing():
            self._program, (results, _, leaves) = jax.make_jaxpr(
                forward_pass, axis_env=axis, return_shape=True
            )(*map(_form, program.in_avals))
            self._back = jax.make_jaxpr(backward_pass, axis_env=axis)(leaves, results)

    def _apart(self, outputs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Those that have gradients, and the others."""
        pairs = list(zip(outputs, self._differentiable, strict=True))
        return [o for o, own in pairs if own], [o for o, own in pairs if not own]

    def _joined(self, outputs: Sequence[Any]) -> list[Any]:
        """The reverse, of one list after the other."""
        count = sum(self._differentiable)
        first, second = iter(outputs[:count]), iter(outputs[count:])
        return [next(first if own else second) for own in self._differentiable]

    def _in_groups(self, values: Sequence[Any]) -> tuple[list[Any], ...]:
        left = iter(values)
        return tuple([next(left) for _ in range(size)] for size in self._sizes)

    def _given(self, values: Sequence[Any], axes: Sequence[int | None]) -> list[Any]:
        """What is divided, late."""
        return [
            value if axis is None else where_used.Input(value)
            for value, axis in zip(values, axes, strict=True)
        ]

    def _given_weights(self, weights: Sequence[Any]) -> list[Any]:
        given = self._given(weights, self._parts.weights)
        late = where_used.Input
        return [w if isinstance(w, late) else where_used.fixed(w) for w in given]

    def forward(
        self, weights: list[Any], others: list[Any], x: list[Any]
    ) -> tuple[Any, Any]:
        """What `OneReplica` returns, of all; and all that the backward pass takes."""

        def body(weights: list[Any], others: list[Any], x: list[Any]) -> Any:
            given = [*self._given_weights(weights)]
            given += [*self._given(others, self._parts.others), *x]
            outputs = where_used.outputs(self._program, given, self._tie)
            count = sum(self._sizes)
            results = list(map(where_used.now, outputs[:count]))
            self._known = list(map(where_used.is_known, outputs[count:]))
            saved = [
                jnp.asarray(leaf)[None]
                for leaf, known in zip(outputs[count:], self._known, strict=True)
                if known
            ]
            outputs, masks, new, losses = self._in_groups(self._joined(results))
            # Parts stay where they are.
            zero = jnp.zeros(())
            new = [
                value if axis is None else zero
                for value, axis in zip(new, self._parts.others, strict=True)
            ]
            return (outputs, masks, new, losses), saved

        results, saved = over_replicas(
            self._mesh,
            body,
            in_specs=(self._weights, self._others, _SPLIT),
            out_specs=((_SPLIT, _SPLIT, _SAME, _SAME), _SPLIT),
        )(weights, others, x)
        return results, (weights, others, saved)

    def backward(self, kept: Any, gradients: Any) -> tuple[Any, None, None]:
        """The gradients with respect to the weights."""
        weights, others, saved = kept
        outputs, masks, new, losses = gradients
        ops = self._strategy.extended.cross_device_ops
        dtype = self._strategy.placement.communication_dtype

        def body(weights: Any, others: Any, saved: Any, rows: Any, same: Any) -> Any:
            known, unknown = iter(saved), where_used.UNKNOWN
            given = self._given_weights(weights)
            given += [
                value if isinstance(value, where_used.Input) else unknown
                for value in self._given(others, self._parts.others)
            ]
            given += [unknown] * (len(self._program.in_avals) - len(given))
            again = where_used.outputs(self._program, given, self._tie)
            leaves = [
                next(known)[0] if is_known else late
                for late, is_known in zip(
                    again[sum(self._sizes) :], self._known, strict=True
                )
            ]
            # What is the same on all replicas has a gradient there; the sum is its.
            shares = [g / self._mesh.num_replicas for g in same]
            found = where_used.outputs(self._back, [*leaves, *rows, *shares], self._tie)
            return self._summed(list(map(where_used.now, found)), ops, dtype)

        of_all, _ = self._apart([*outputs, *masks, *new, *losses])
        num_rows = sum(self._differentiable[: len(outputs) + len(masks)])
        rows, same = of_all[:num_rows], of_all[num_rows:]
        found = over_replicas(
            self._mesh,
            body,
            in_specs=(self._weights, self._others, _SPLIT, _SPLIT, _SAME),
            out_specs=self._weights,
        )(weights, others, saved, rows, same)
        return found, None, None

    def _summed(self, gradients: list[Any], ops: Any, dtype: str | None) -> list[Any]:
        """Those of whole weights, over the replicas; the others are."""
        axes = self._parts.weights
        whole = [g for g, axis in zip(gradients, axes, strict=True) if axis is None]
        left = iter(reductions.sum_gradients(ops, whole, dtype))
        return [
            next(left) if axis is None else g
            for g, axis in zip(gradients, axes, strict=True)
        ]


def _differentiable(own: OneReplica, parts: Parts) -> list[bool]:
    """Which results of a forward pass have gradients: numbers, but for parts of
    variables, which it returns as it got them.
    """
    found = [jnp.issubdtype(aval.dtype, jnp.floating) for aval in own.program.out_avals]
    first = sum(own.sizes[:2])  # After predictions and their masks.
    for i, axis in enumerate(parts.others):
        found[first + i] &= axis is None
    return found


def _form(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def _spec(axis: int | None) -> PartitionSpec:
    return _SAME if axis is None else PartitionSpec(*[None] * axis, REPLICA_AXIS)
