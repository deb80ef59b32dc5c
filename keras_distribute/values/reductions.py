"""Reductions and gathers over the replicas. Knows no Keras.

Two kinds of function: those on `local` values run inside a program over all replicas,
where a value is this replica's own; those on a `PerReplica` outside compile the former.
Components whose shapes differ are reduced and gathered on the devices, too: masked or
cut to their true shapes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from keras_distribute import context
from keras_distribute.devices.mesh import REPLICA_AXIS, mesh_of_array
from keras_distribute.devices.placement import narrowed
from keras_distribute.errors import StructureTypeError, ValueStructureError
from keras_distribute.types import CommunicationOptions, ReduceOp
from keras_distribute.values.arrays import (
    check_adds,
    checked_arrays,
    filled_up,
    on_host,
    summed,
)
from keras_distribute.values.cross_device_ops import CrossDeviceOps, scaled, widened
from keras_distribute.values.per_replica import PerReplica
from keras_distribute.values.stacked import compiled, of_this_replica
from keras_distribute.values.trace_exchange import Form

Shapes = tuple[tuple[int, ...], ...]


def reduce_locals(
    ops: CrossDeviceOps,
    reduce_op: ReduceOp,
    values: Sequence[Any],
    options: CommunicationOptions | None = None,
) -> list[jax.Array]:
    """Reduces this replica's `values` over the replicas, inside a program."""
    pairs = [(PerReplica(local=jnp.asarray(value)), None) for value in values]
    return ops.batch_reduce(reduce_op, pairs, options)


def reduce_alone(reduce_op: ReduceOp, value: Any) -> jax.Array:
    """What `reduce_locals` makes of a value of one replica, without a program."""
    value = jnp.asarray(value)
    kept = jnp.issubdtype(value.dtype, jnp.floating)
    return value if kept else widened(reduce_op, value)


def sum_gradients(
    ops: CrossDeviceOps, gradients: Sequence[Any], dtype: str | None
) -> list[jax.Array]:
    """The sums over the replicas of this replica's gradients, inside a program, each of
    its own dtype.

    Args:
        ops: How to reduce.
        dtype: Travels in place of a wider float; `None`: as they are.
    """
    sums = reduce_locals(
        ops, ReduceOp.SUM, [narrowed(jnp.asarray(g), dtype) for g in gradients]
    )
    return [
        total.astype(gradient.dtype)
        for total, gradient in zip(sums, gradients, strict=True)
    ]


def all_gather_locals(values: Sequence[Any], axis: int) -> list[jax.Array]:
    """The replicas' values, of any sizes, joined along `axis`; inside a program."""
    values = [jnp.asarray(value) for value in values]
    axes = [check_axis(axis, value.ndim) for value in values]
    trace = context.ragged_trace()
    if trace is None:
        shapes = [(value.shape,) * lax.axis_size(REPLICA_AXIS) for value in values]
    else:
        of_all = trace.of_all([(value.shape, str(value.dtype)) for value in values])
        _check_joinable(of_all, axes)
        shapes = [
            tuple(shape for shape, _ in forms) for forms in zip(*of_all, strict=True)
        ]
    return [_gathered(*each) for each in zip(shapes, axes, values, strict=True)]


def _gathered(shapes: Shapes, axis: int, value: jax.Array) -> jax.Array:
    """The replicas' values joined, of which these are the true shapes."""
    largest = tuple(map(max, zip(*shapes, strict=True)))
    if 0 in largest:  # XLA does not gather what has no elements.
        return jnp.zeros(_joined_shape(shapes, axis), value.dtype)
    if len(set(shapes)) == 1:
        return lax.all_gather(value, REPLICA_AXIS, axis=axis, tiled=True)
    return gather_and_cut(filled_up(value, largest), shapes, axis)


JOINING = "gather_and_cut"  # The name in a program of the calls of what follows.


@functools.partial(jax.jit, static_argnums=(1, 2))
def gather_and_cut(value: jax.Array, shapes: Shapes, axis: int) -> jax.Array:
    """The replicas' values joined at their true shapes, to the largest of which they
    are filled up.

    One call in the program: its shapes stay beside its communication, and
    `run/uneven.py`
    sees where the traces of two replicas do not agree on them.
    """
    length = value.shape[axis]
    whole = lax.all_gather(value, REPLICA_AXIS, axis=axis, tiled=True)
    parts = [
        lax.slice_in_dim(whole, i * length, i * length + s[axis], axis=axis)
        for i, s in enumerate(shapes)
    ]
    return jnp.concatenate(parts, axis)


def total_count(count: int) -> Any:
    """The sum over the replicas of how many of something this one has, inside a
    program.

    Returns:
        A number, or a traced one where the replicas' shapes differ.
    """
    if context.in_ragged_program():
        return lax.psum(of_this_replica(count), REPLICA_AXIS)
    return count * lax.axis_size(REPLICA_AXIS)


def reduce_along_axes_local(
    reduce_op: ReduceOp, axes: tuple[int, ...], value: Any
) -> jax.Array:
    """Reduces over `axes` of this replica's value and over the replicas; the mean is
    over all elements.
    """
    value = jnp.asarray(value)
    axes = check_axes(axes, value.ndim)
    own = jnp.sum(widened(reduce_op, of_this_replica(value)), axes)
    count = total_count(math.prod(value.shape[a] for a in axes))
    return scaled(reduce_op, summed([own])[0], count, value)


def reduce_values(
    ops: CrossDeviceOps, reduce_op: ReduceOp, value: PerReplica, axes: tuple[int, ...]
) -> Any:
    """`Strategy.reduce` of a `PerReplica`: over the replicas, and over `axes` of the
    components.

    Returns:
        One array, on every replica.
    """
    if value.local is not None:
        if axes:
            return reduce_along_axes_local(reduce_op, axes, value.local)
        return ops.reduce(reduce_op, value)
    if value.stacked is not None:
        if not axes:
            return ops.reduce(reduce_op, value).value
        mesh = mesh_of_array(value.stacked)
        return compiled(reduce_along_axes_local, mesh, reduce_op, axes)(value.stacked)
    if value.padded is not None and value.shapes is not None:
        shapes = value.shapes
        axes = check_axes(axes, len(shapes[0]))
        _check_reducible(
            [tuple(np.delete(shape, axes)) for shape in shapes], shapes, axes
        )
        mesh = mesh_of_array(value.padded)
        program = compiled(_reduce_padded_local, mesh, reduce_op, shapes, axes)
        return program(value.padded)
    return _reduce_unlike(reduce_op, value.values, axes)


def gather_values(value: PerReplica, axis: int) -> jax.Array:
    """`Strategy.gather` of a `PerReplica`: joined along `axis`, on every replica."""
    if value.local is not None:
        return all_gather_locals([value.local], axis)[0]
    array = value.padded if value.stacked is None else value.stacked
    if array is None:
        parts = checked_arrays(value.values, "gathered")
        check_axis(axis, parts[0].ndim)
        raise _ungatherable([(part.dtype, part.shape) for part in parts], axis)
    shapes = value.shapes or (array.shape[1:],) * array.shape[0]
    axis = check_axis(axis, array.ndim - 1)
    if len({shape[:axis] + shape[axis + 1 :] for shape in shapes}) > 1:
        raise _ungatherable([(array.dtype, shape) for shape in shapes], axis)
    if not array.size:
        return jnp.zeros(_joined_shape(shapes, axis), array.dtype)
    return compiled(_gathered, mesh_of_array(array), shapes, axis)(array)


def _joined_shape(shapes: Shapes, axis: int) -> tuple[int, ...]:
    return (
        *shapes[0][:axis],
        sum(shape[axis] for shape in shapes),
        *shapes[0][axis + 1 :],
    )


def check_axis(axis: int, ndim: int) -> int:
    """`axis` as a number from 0 to `ndim - 1`."""
    if isinstance(axis, bool) or not isinstance(axis, int | np.integer):
        raise StructureTypeError(
            "An axis is an integer.", received=f"axis={axis!r}.", fix="axis=0"
        )
    if not -ndim <= axis < ndim:
        raise ValueStructureError(
            f"There is no axis {axis} in a value of {ndim} dimension(s).",
            received=f"axis={axis}.",
            fix="axis=None to reduce it; value[None] to gather it, in the function "
            "given to strategy.run."
            if ndim == 0
            else f"an axis from {-ndim} to {ndim - 1}.",
        )
    return int(axis) % ndim


def check_axes(axes: Sequence[int], ndim: int) -> tuple[int, ...]:
    """`axes` as numbers from 0 to `ndim - 1`, each once."""
    checked = tuple(check_axis(axis, ndim) for axis in axes)
    if len(set(checked)) < len(checked):
        raise ValueStructureError(
            "Each axis can be reduced once.",
            received=f"axis={list(axes)}.",
            fix="name each axis once.",
        )
    return checked


def _reduce_padded_local(
    reduce_op: ReduceOp, shapes: Shapes, axes: tuple[int, ...], value: jax.Array
) -> jax.Array:
    """`reduce_along_axes_local` of a padded component: its true elements count."""
    own = jnp.asarray(np.asarray(shapes, "int32"))[lax.axis_index(REPLICA_AXIS)]
    true = functools.reduce(
        jnp.logical_and,
        [lax.broadcasted_iota("int32", value.shape, a) < own[a] for a in axes],
    )
    (total,) = summed([jnp.sum(widened(reduce_op, value), axes, where=true)])
    count = sum(math.prod(shape[a] for a in axes) for shape in shapes)
    return scaled(reduce_op, total, count, value)


def _reduce_unlike(
    reduce_op: ReduceOp, components: Sequence[Any], axes: tuple[int, ...]
) -> jax.Array:
    """Of components of several ranks or dtypes, on the host; all this process's."""
    parts = [on_host(part) for part in checked_arrays(components, "reduced")]
    for part in parts:
        check_adds(part)
    normal = [check_axes(axes, part.ndim) for part in parts]
    sums = [np.sum(part, axis) for part, axis in zip(parts, normal, strict=True)]
    _check_reducible([s.shape for s in sums], [part.shape for part in parts], axes)
    count = sum(
        math.prod(p.shape[a] for a in axis)
        for p, axis in zip(parts, normal, strict=True)
    )
    total = functools.reduce(np.add, sums)
    return jnp.asarray(total / count if reduce_op is ReduceOp.MEAN else total)


def _check_reducible(
    reduced: Sequence[Any], shapes: Sequence[Any], axes: tuple[int, ...]
) -> None:
    if len(set(reduced)) > 1:
        raise ValueStructureError(
            "The components' shapes differ outside the reduced axes.",
            received=", ".join(map(str, shapes)) + f" with axis={list(axes) or None}.",
            fix="reduce over the axis whose size differs: strategy.reduce(op, value, "
            "axis=0).",
        )


def _check_joinable(of_all: Sequence[tuple[Form, ...]], axes: Sequence[int]) -> None:
    """Raises unless replicas gather values that differ along the axis alone."""
    if len({len(forms) for forms in of_all}) > 1:
        raise ValueStructureError(
            "The replicas gather structures of different numbers of values.",
            received=", ".join(
                f"{len(forms)} on replica {i}" for i, forms in enumerate(of_all)
            )
            + ".",
            fix="gather the same structure on every replica.",
        )
    for axis, forms in zip(axes, zip(*of_all, strict=True), strict=True):
        alike = {
            (dtype, len(shape), shape[:axis], shape[axis + 1 :])
            for shape, dtype in forms
        }
        if len(alike) > 1:
            raise _ungatherable([(dtype, shape) for shape, dtype in forms], axis)


def _ungatherable(forms: Sequence[tuple[Any, Any]], axis: int) -> ValueStructureError:
    return ValueStructureError(
        f"Values are gathered along axis {axis}; all other dimensions, and the dtypes, "
        "must be equal.",
        received=", ".join(f"{dtype}{list(shape)}" for dtype, shape in forms) + ".",
        fix="gather along the axis whose size differs.",
    )
