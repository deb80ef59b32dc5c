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
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from keras_distribute import checks, context
from keras_distribute.devices.launches import launches
from keras_distribute.devices.mesh import REPLICA_AXIS, ReplicaMesh, mesh_of_array
from keras_distribute.errors import StructureTypeError, ValueStructureError
from keras_distribute.types import CommunicationOptions, ReduceOp
from keras_distribute.values.per_replica import Mirrored, PerReplica, is_array

# The most that XLA for CPUs concatenates together with what yields them (JAX 0.10).
_FUSED_ARRAYS = 8


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
            own = [PerReplica(local=of_this_replica(value.local)) for value in values]
            return self.batch_reduce_implementation(
                op, [(value, None) for value in own], options
            )
        stacked = [_stacked(value) for value in values]
        mesh = mesh_of_array(stacked[0])

        def implementation(*locals_: jax.Array) -> list[Any]:
            return self.batch_reduce_implementation(
                op, [(PerReplica(local=x), None) for x in locals_], options
            )

        return [
            Mirrored(x)
            for x in compiled(self, op, options, mesh, implementation)(*stacked)
        ]

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
        return _scaled(reduce_op, self._sums([value])[0], per_replica_value.local)

    def batch_reduce_implementation(
        self,
        reduce_op: ReduceOp,
        value_destination_pairs: Sequence[tuple[PerReplica, Any]],
        options: Any,
    ) -> list[jax.Array]:
        values = [widened(reduce_op, pair[0].local) for pair in value_destination_pairs]
        packs = _packs(
            values, self._num_packs, options.bytes_per_pack or self._bytes_per_pack
        )
        results: list[Any] = [None] * len(values)
        joined = [
            _joined([values[i] for i in pack]) if len(pack) > 1 else values[pack[0]]
            for pack in packs
        ]
        for pack, total in zip(packs, self._sums(joined), strict=True):
            offset = 0
            for i in pack:
                size = values[i].size
                piece = (
                    total
                    if len(pack) == 1
                    else total[offset : offset + size].reshape(values[i].shape)
                )
                results[i] = _scaled(
                    reduce_op, piece, value_destination_pairs[i][0].local
                )
                offset += size
        return results

    def _sums(self, values: list[Any]) -> list[jax.Array]:
        return (
            lax.psum(values, REPLICA_AXIS) if values else []
        )  # One operation, which XLA need not combine.


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
        gathered = lax.all_gather(
            widened(reduce_op, per_replica_value.local), REPLICA_AXIS
        )
        total = self._accumulate([gathered[i] for i in range(gathered.shape[0])])
        return _scaled(reduce_op, total, per_replica_value.local)


def mesh_of(destinations: Any) -> ReplicaMesh | None:
    """The mesh on which a value, a variable or a strategy lives; `None` for a plain
    value.
    """
    if isinstance(destinations, ReplicaMesh):
        return destinations
    if isinstance(destinations, PerReplica):
        destinations = (
            destinations.padded
            if destinations.stacked is None
            else destinations.stacked
        )
    if isinstance(destinations, Mirrored):
        destinations = destinations.value
    own = getattr(destinations, "replica_mesh", None)
    if isinstance(own, ReplicaMesh):
        return own
    sharding = getattr(destinations, "sharding", None)
    return (
        ReplicaMesh(mesh_of_array(destinations))
        if isinstance(sharding, jax.sharding.NamedSharding)
        else None
    )


def checked_pairs(pairs: Any) -> list[tuple[Any, Any]]:
    """The pairs of values and destinations that are reduced together."""
    what = "Values are reduced together as a list of pairs of a value and destinations."
    pairs_of = list(pairs) if isinstance(pairs, list | tuple) else None
    for pair in (None,) if pairs_of is None else pairs_of:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            received = f"value_destination_pairs={checks.shown(pairs)}."
            raise StructureTypeError(what, received=received, fix="[(value, None)]")
    return [(value, destinations) for value, destinations in pairs_of or ()]


def as_per_replica(value: Any) -> PerReplica:
    """What each replica has of a distributed value or variable.

    Raises:
        StructureTypeError: For anything else.
    """
    own = getattr(value, "components", None)  # Of a variable that differs per replica.
    if isinstance(value, PerReplica):
        return value
    mesh = mesh_of(value)
    if mesh is None or not hasattr(value, "value"):
        raise StructureTypeError(
            "Only distributed values and variables can be reduced.",
            received=f"{checks.shown(value)}.",
            fix="pass a result of strategy.run, or "
            "strategy.experimental_distribute_values_from_function.",
        )
    if context.frame().per_replica:
        return PerReplica(local=value.value)
    if isinstance(own, PerReplica):
        return own
    return PerReplica(stacked=_copied(mesh)(value.value))


@functools.lru_cache(maxsize=64)
def _copied(mesh: ReplicaMesh) -> Callable[[Any], jax.Array]:
    """Each replica's copy of an array that all have."""

    def copies(array: jax.Array) -> jax.Array:
        return jnp.broadcast_to(array, (mesh.num_replicas, *array.shape))

    return jax.jit(copies, out_shardings=mesh.split)


def of_this_replica(value: Any) -> Any:
    """A value that may be another one on each replica, inside a program.

    JAX sums a number that it knows while tracing by multiplying it, which is wrong
    where each shape is traced by itself: where shapes differ, no number counts as
    known.
    """
    known = not isinstance(value, jax.core.Tracer)
    return (
        lax.optimization_barrier(value)
        if known and context.in_ragged_program()
        else value
    )


@functools.lru_cache(maxsize=512)
def _compiled_for(
    key: tuple[Any, ...], mesh: jax.sharding.Mesh, box: _Box
) -> Callable[..., Any]:
    split = PartitionSpec(REPLICA_AXIS)

    def body(*stacked: jax.Array) -> Any:
        return box.function(*(x[0] for x in stacked))

    mapped = jax.shard_map(
        body, mesh=mesh, in_specs=split, out_specs=PartitionSpec(), check_vma=False
    )
    return launches.ordered(jax.jit(mapped))


class _Box:
    """Carries a function past a cache: equal to every other box, so that the rest of
    the key decides.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Box)

    def __hash__(self) -> int:
        return 0


def compiled(
    ops: Any, reduce_op: Any, extra: Any, mesh: Any, function: Callable[..., Any]
) -> Callable[..., Any]:
    """`function` of local values as a program on stacked ones, compiled once for the
    arguments before it.
    """
    return _compiled_for((ops, reduce_op, extra), mesh, _Box(function))


def widened(reduce_op: ReduceOp, value: Any) -> jax.Array:
    """What is summed: booleans are counted, and the sum behind a 16-bit mean must not
    overflow.
    """
    value = jnp.asarray(value)
    if value.dtype == jnp.bool_:
        return value.astype(jnp.int32)
    half = reduce_op is ReduceOp.MEAN and value.dtype in (jnp.float16, jnp.bfloat16)
    return value.astype(jnp.float32) if half else value


def _scaled(reduce_op: ReduceOp, total: Any, value: Any) -> Any:
    if reduce_op is not ReduceOp.MEAN:
        return total
    mean = total / lax.axis_size(REPLICA_AXIS)
    return (
        mean.astype(value.dtype) if jnp.issubdtype(value.dtype, jnp.floating) else mean
    )


def _add_in_order(parts: list[jax.Array]) -> jax.Array:
    return functools.reduce(jnp.add, parts)


def _packs(
    values: Sequence[Any], num_packs: int, bytes_per_pack: int
) -> list[list[int]]:
    """Indices of the values that go into one buffer together, in order; a buffer holds
    one dtype.
    """
    if num_packs == 0 and bytes_per_pack == 0:
        return [[i] for i in range(len(values))]
    by_dtype: dict[Any, list[int]] = {}
    for i, value in enumerate(values):
        by_dtype.setdefault(value.dtype, []).append(i)
    packs: list[list[int]] = []
    for indices in by_dtype.values():
        total = sum(values[i].nbytes for i in indices)
        limit = bytes_per_pack or max(1, -(-total // num_packs))
        pack: list[int] = []
        filled = 0
        for i in indices:
            if pack and filled + values[i].nbytes > limit:
                packs.append(pack)
                pack, filled = [], 0
            pack.append(i)
            filled += values[i].nbytes
        packs.append(pack)
    return packs


def _joined(values: Sequence[Any]) -> jax.Array:
    """Values of one dtype as one flat buffer.

    XLA for CPUs makes one loop of the concatenation of few arrays and of what yields
    them, and divides it over threads that the processes of one machine take from each
    other. Where the arrays are written one by one, a step of the smaller model of
    `benchmarks/processes.py` takes two thirds of the time. A concatenation of many it
    leaves alone, as the faster one.
    """
    flat = list(map(jnp.ravel, values))
    if len(flat) > _FUSED_ARRAYS:
        return jnp.concatenate(flat)
    buffer, offset = jnp.zeros(sum(value.size for value in flat), flat[0].dtype), 0
    for value in flat:
        buffer = lax.dynamic_update_slice(buffer, value, (offset,))
        offset += value.size
    return buffer


def checked_arrays(components: Sequence[Any], verb: str) -> list[Any]:
    """The components, all of which must be arrays or numbers, as arrays."""
    for component in components:
        if not is_array(component):
            raise StructureTypeError(
                f"Only arrays can be {verb} over the replicas.",
                received=f"a {type(component).__name__}.",
                fix="strategy.experimental_local_results(value) gives the objects "
                "themselves.",
            )
    return [
        np.asarray(c) if isinstance(c, int | float | complex) else c for c in components
    ]


def as_array(value: Any, what: str) -> jax.Array:
    """The value as JAX's array; a `StructureTypeError` for what is none."""
    try:
        return jnp.asarray(value)
    except StructureTypeError:
        raise
    except (TypeError, ValueError, OverflowError) as error:
        raise StructureTypeError(
            what,
            received=f"{checks.shown(value)}, a {type(value).__name__}.",
            fix="an array of numbers, or a number of at most 32 bits.",
        ) from error


def _stacked(value: PerReplica) -> jax.Array:
    if value.stacked is None:
        known = value.shapes or [
            np.shape(part) for part in checked_arrays(value.values, "reduced")
        ]
        shapes = ", ".join(map(str, known))
        raise ValueStructureError(
            "Components of different shapes cannot be reduced element by element.",
            received=f"the shapes {shapes}.",
            fix="reduce over the axis whose size differs: strategy.reduce(op, value, "
            "axis=0).",
        )
    return value.stacked
