"""The `CrossDeviceOps`, which choose how values are summed over the replicas. Knows no
Keras.

An implementation works on *local* values, inside a program over all replicas, where a
value is this replica's own; called outside, it is compiled.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from keras_distribute import checks
from keras_distribute.devices.mesh import REPLICA_AXIS, mesh_of_array
from keras_distribute.errors import StructureTypeError
from keras_distribute.types import CommunicationOptions, ReduceOp
from keras_distribute.values.arrays import as_array, check_adds, is_array, summed
from keras_distribute.values.packs import joined, packs_of
from keras_distribute.values.per_replica import Mirrored, PerReplica
from keras_distribute.values.stacked import (
    as_per_replica,
    compiled,
    mesh_of,
    of_this_replica,
    stacked_array,
)


class CrossDeviceOps:
    """How values are reduced over the replicas: the base of the choices that
    `MirroredStrategy` takes.

    A subclass implements `reduce_implementation` (and, where several values can go
    together, `batch_reduce_implementation`). Both may be called while a program over
    all replicas is traced: the values are then this replica's own, and the
    implementation uses JAX's collectives over the mesh axis `"replica"`. Source:
    `tf.distribute.CrossDeviceOps`.
    """

    def reduce(
        self,
        reduce_op: ReduceOp | str,
        per_replica_value: Any,
        destinations: Any = None,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """The sum or mean of a `PerReplica` over the replicas.

        Args:
            reduce_op: `ReduceOp.SUM` or `ReduceOp.MEAN`, or its name.
            per_replica_value: A `PerReplica`; of a `Mirrored` or a variable, the copies
                or components on the replicas are reduced.
            destinations: Accepted for compatibility: the result is on every replica of
                the strategy.
            options: How to pack and communicate.

        Returns:
            A `Mirrored` of the components' shape; inside a program, the array itself.
        """
        return self.batch_reduce(
            reduce_op, [(per_replica_value, destinations)], options
        )[0]

    def batch_reduce(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Sequence[tuple[Any, Any]],
        options: CommunicationOptions | None = None,
    ) -> list[Any]:
        """`reduce` of several values together; one result for each pair of a value and
        its destinations.
        """
        op = ReduceOp.parse(reduce_op)
        options = CommunicationOptions.checked(options)
        options.refuse_for_one_collective()
        pairs = checked_pairs(value_destination_pairs)
        values = [as_per_replica(value) for value, _ in pairs]
        if not values:
            return []
        if values[0].local is not None:
            own = [of_this_replica(value.local) for value in values]
            return _reduced(self, op, options, *own)
        stacked = [stacked_array(value) for value in values]
        program = compiled(_reduced, mesh_of_array(stacked[0]), self, op, options)
        return list(map(Mirrored, program(*stacked)))

    def reduce_implementation(
        self,
        reduce_op: ReduceOp,
        per_replica_value: PerReplica,
        destinations: Any,
        options: CommunicationOptions,
    ) -> jax.Array:
        """Reduces one value, inside a program: `per_replica_value.local` is this
        replica's component.
        """
        raise StructureTypeError(
            f"{type(self).__name__} does not say how to reduce.",
            fix="override reduce_implementation, or use kd.NcclAllReduce().",
        )

    def batch_reduce_implementation(
        self,
        reduce_op: ReduceOp,
        value_destination_pairs: Sequence[tuple[PerReplica, Any]],
        options: Any,
    ) -> list[jax.Array]:
        """Reduces several values, inside a program; by default one after the other."""
        return [
            self.reduce_implementation(reduce_op, v, d, options)
            for v, d in value_destination_pairs
        ]

    def broadcast(self, tensor: Any, destinations: Any) -> Mirrored:
        """`tensor` on every device of `destinations` (a value, a variable or a
        strategy's mesh).
        """
        return self.broadcast_implementation(tensor, destinations)

    def broadcast_implementation(self, tensor: Any, destinations: Any) -> Mirrored:
        """Copies one array to the devices of `destinations`."""
        mesh = mesh_of(destinations)
        known = is_array(destinations) or hasattr(destinations, "__array__")
        if mesh is None and not known:
            raise StructureTypeError(
                "The destinations of a broadcast are the devices of something.",
                received=f"destinations={checks.shown(destinations)}.",
                fix="a variable, a distributed value, or an array.",
            )
        tensor = as_array(tensor, "Only arrays can be copied to the replicas.")
        return Mirrored(tensor if mesh is None else mesh.put_replicated(tensor))


class _Packed(CrossDeviceOps):
    """Reduces values as a few flat buffers a dtype, or one by one."""

    def __init__(self, num_packs: int = 1, *, bytes_per_pack: int = 0) -> None:
        what = "num_packs is the number of buffers; 0 reduces each value by itself."
        fix = "a number >= 0."
        self._num_packs = checks.count("num_packs", num_packs, what=what, fix=fix)
        self._bytes_per_pack = checks.count("bytes_per_pack", bytes_per_pack, fix=fix)

    def reduce_implementation(
        self,
        reduce_op: ReduceOp,
        per_replica_value: PerReplica,
        destinations: Any,
        options: CommunicationOptions,
    ) -> jax.Array:
        value = widened(reduce_op, per_replica_value.local)
        count = lax.axis_size(REPLICA_AXIS)
        return scaled(reduce_op, self._sums([value])[0], count, per_replica_value.local)

    def batch_reduce_implementation(
        self,
        reduce_op: ReduceOp,
        value_destination_pairs: Sequence[tuple[PerReplica, Any]],
        options: Any,
    ) -> list[jax.Array]:
        values = [widened(reduce_op, pair[0].local) for pair in value_destination_pairs]
        packs = packs_of(
            values, self._num_packs, options.bytes_per_pack or self._bytes_per_pack
        )
        results: list[Any] = [None] * len(values)
        buffers = [
            joined([values[i] for i in pack]) if len(pack) > 1 else values[pack[0]]
            for pack in packs
        ]
        count = lax.axis_size(REPLICA_AXIS)
        for pack, total in zip(packs, self._sums(buffers), strict=True):
            offset = 0
            for i in pack:
                size = values[i].size
                piece = total
                if len(pack) > 1:
                    piece = total[offset : offset + size].reshape(values[i].shape)
                local = value_destination_pairs[i][0].local
                results[i] = scaled(reduce_op, piece, count, local)
                offset += size
        return results

    def _sums(self, values: list[Any]) -> list[jax.Array]:
        return summed(values)  # One operation, which XLA need not combine.


class NcclAllReduce(_Packed):
    """All-reduce: NCCL on GPUs, ICI on TPUs, XLA's own on CPUs, of at most `num_packs`
    buffers a dtype.

    Source: `tf.distribute.NcclAllReduce`. Differs from TF: it also works, with the same
    numbers, where there is no NCCL.

    Args:
        num_packs: Into how many buffers the gradients are packed; 0 reduces each by
            itself, which leaves the packing to XLA (it combines by itself on GPU and
            TPU, not on CPU).
        bytes_per_pack: The size of the buffers instead, where a reduction says none; 0
            leaves it to `num_packs`.
    """


class HierarchicalCopyAllReduce(_Packed):
    """Reduces in two phases: each replica sums one part of the buffer, then the parts
    are gathered.

    Source: `tf.distribute.HierarchicalCopyAllReduce`. Differs from TF, whose two phases
    are copies over a hierarchy of links that XLA does not expose: the phases are a
    reduce-scatter and an all-gather over all replicas.

    Args:
        num_packs: As for `NcclAllReduce`.
        bytes_per_pack: Likewise.
    """

    def _sums(self, values: list[Any]) -> list[jax.Array]:
        return list(map(self._sum, values))

    def _sum(self, value: Any) -> jax.Array:
        replicas = lax.axis_size(REPLICA_AXIS)
        flat = jnp.ravel(value)
        if not flat.size:  # XLA does not scatter what has no elements.
            return value
        padded = jnp.pad(flat, (0, -flat.size % replicas))
        part = lax.psum_scatter(padded, REPLICA_AXIS, tiled=True)
        return lax.all_gather(part, REPLICA_AXIS, tiled=True)[: flat.size].reshape(
            jnp.shape(value)
        )


class ReductionToOneDevice(CrossDeviceOps):
    """Gathers the components and adds them in replica order, so that the order never
    depends on the topology.

    Source: `tf.distribute.ReductionToOneDevice`. Differs from TF: a program over all
    replicas has no single device to reduce on, so each device does the same additions;
    `reduce_to_device` is accepted and has no effect.

    Args:
        reduce_to_device: Accepted for compatibility.
        accumulation_fn: Takes the list of components in replica order and returns their
            sum; `sum` by default.
    """

    def __init__(
        self,
        reduce_to_device: Any = None,
        accumulation_fn: Callable[[list[jax.Array]], jax.Array] | None = None,
    ) -> None:
        what = "Components are added by a function of a list of them."
        fix = "ReductionToOneDevice(accumulation_fn=sum), or None."
        self._accumulate = _add_in_order if accumulation_fn is None else accumulation_fn
        checks.function("accumulation_fn", self._accumulate, what, fix)

    def reduce_implementation(
        self,
        reduce_op: ReduceOp,
        per_replica_value: PerReplica,
        destinations: Any,
        options: CommunicationOptions,
    ) -> jax.Array:
        local = per_replica_value.local
        gathered = lax.all_gather(widened(reduce_op, local), REPLICA_AXIS)
        count = gathered.shape[0]
        total = self._accumulate([gathered[i] for i in range(count)])
        return scaled(reduce_op, total, count, local)


def _reduced(
    ops: CrossDeviceOps,
    reduce_op: ReduceOp,
    options: CommunicationOptions,
    *values: jax.Array,
) -> list[jax.Array]:
    """What `ops` makes of this replica's values."""
    pairs = [(PerReplica(local=value), None) for value in values]
    return ops.batch_reduce_implementation(reduce_op, pairs, options)


def checked_pairs(pairs: Any) -> list[tuple[Any, Any]]:
    """The pairs of values and destinations that are reduced together."""
    what = "Values are reduced together as a list of pairs of a value and destinations."
    pairs_of = list(pairs) if isinstance(pairs, list | tuple) else None
    for pair in (None,) if pairs_of is None else pairs_of:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            received = f"value_destination_pairs={checks.shown(pairs)}."
            raise StructureTypeError(what, received=received, fix="[(value, None)]")
    return [(value, destinations) for value, destinations in pairs_of or ()]


def widened(reduce_op: ReduceOp, value: Any) -> jax.Array:
    """What is summed: booleans are counted, and the sum behind a mean must not
    overflow, neither in a narrow float nor in the bits of an integer.
    """
    value = jnp.asarray(value)
    check_adds(value)
    exact = value.dtype == jnp.bool_ or jnp.issubdtype(value.dtype, jnp.integer)
    if exact and reduce_op is ReduceOp.MEAN:
        return value / 1  # Of the dtype that the mean has.
    if value.dtype == jnp.bool_:
        return value.astype(jnp.int32)
    floating = jnp.issubdtype(value.dtype, jnp.floating)
    if reduce_op is ReduceOp.MEAN and floating and jnp.finfo(value.dtype).bits < 32:
        return value.astype(jnp.float32)
    return value


def scaled(reduce_op: ReduceOp, total: Any, count: Any, value: Any) -> jax.Array:
    """The sum or the mean, of the values' dtype where that can hold one."""
    if reduce_op is not ReduceOp.MEAN:
        return total
    # JAX takes no number of Python's for an integer if it has more than 32 bits.
    mean = total / (float(count) if isinstance(count, int) else count)
    kept = jnp.issubdtype(value.dtype, jnp.floating)
    return mean.astype(value.dtype) if kept else mean


def _add_in_order(parts: list[jax.Array]) -> jax.Array:
    return functools.reduce(jnp.add, parts)
