"""The program of one replica as one over all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from keras_distribute.devices import divided, in_series, on_cpus, unknown
from keras_distribute.devices.axes import REPLICA_AXIS
from keras_distribute.devices.collectives import OVER_REPLICAS_ALONE
from keras_distribute.devices.convolutions import IN_ORDER
from keras_distribute.devices.in_turn import in_turn
from keras_distribute.devices.merging import merged
from keras_distribute.devices.mesh import ReplicaMesh
from keras_distribute.devices.rewriting import all_rewritten, rewritten
from keras_distribute.devices.series import Series, Value

_IN_LOOPS_OF_CPUS = (*on_cpus.OF_ONE_DEVICE, IN_ORDER)


def over_replicas(
    mesh: ReplicaMesh, body: Callable[..., Any], in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """The program of one replica as one over all: manual over the replicas, automatic
    over their logical devices.

    Args:
        body: Takes and returns parts of arrays, as under `jax.shard_map`.
        in_specs: As of `jax.shard_map`: split over the replicas along one axis, or not.
        out_specs: Likewise.
    """
    if mesh.series is not None:
        return _in_series(mesh, mesh.series, body, in_specs, out_specs)
    on_cpu = mesh.platform == "cpu"
    rewritings = on_cpus.OF_ONE_DEVICE if on_cpu else ()
    if mesh.logical_axes:  # Over which XLA divides it.
        rewritings = divided.rewritings(None)
    if mesh.num_replicas > 1 or not mesh.logical_axes:
        return jax.shard_map(
            in_turn(body, rewritings) if on_cpu else rewritten(body, rewritings),
            mesh=mesh.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names={REPLICA_AXIS},
            check_vma=False,
        )

    def alone(*arguments: Any) -> Any:
        # XLA has no collectives of one device beside automatic axes.
        function = rewritten(body, rewritings)
        results = jax.vmap(lambda _: function(*arguments), axis_name=REPLICA_AXIS)(
            jnp.zeros(1)
        )
        return jax.tree.map(lambda result: result[0], results)

    return alone


def _in_series(
    mesh: ReplicaMesh,
    series: Series,
    body: Callable[..., Any],
    in_specs: Any,
    out_specs: Any,
) -> Callable[..., Any]:
    """`over_replicas` where each device runs its replicas one after the other."""
    count, each = series.num_replicas, series.each
    axes = [(REPLICA_AXIS, count)]
    rewritings = [OVER_REPLICAS_ALONE, *(_IN_LOOPS_OF_CPUS if series.on_cpu else [])]

    def mapped(*arguments: Any) -> Any:
        leaves, structure = jax.tree.flatten(arguments)
        specs = _for_leaves(in_specs, arguments)
        given = list(map(_split_axis, specs))

        def one_replica(*own: Any) -> Any:
            return body(*jax.tree.unflatten(structure, own))

        shapes = [
            jax.ShapeDtypeStruct(
                _own_shape(leaf.shape, axis, count),
                leaf.dtype,
                weak_type=leaf.weak_type,
            )
            for leaf, axis in zip(leaves, given, strict=True)
        ]
        program, results = jax.make_jaxpr(
            one_replica, axis_env=axes, return_shape=True
        )(*shapes)
        parts = merged(all_rewritten(program, rewritings, axes))
        out = _for_leaves(out_specs, results)
        returned = list(map(_split_axis, out))

        def one_device(*arrays: Any) -> list[Any]:
            inputs = [
                _entering(array, axis, each)
                for array, axis in zip(arrays, given, strict=True)
            ]
            outputs = in_series.run(series, parts, inputs, unknown.zero(arrays))
            return [
                _leaving(value, axis, each)
                for value, axis in zip(outputs, returned, strict=True)
            ]

        arrays = jax.shard_map(
            in_turn(one_device) if series.on_cpu else one_device,
            mesh=mesh.mesh,
            in_specs=tuple(specs),
            out_specs=out,
            check_vma=False,
        )(*leaves)
        arrays = _with_weak_types(arrays, program.out_avals)
        return jax.tree.unflatten(jax.tree.structure(results), arrays)

    return mapped


def _entering(array: Any, axis: int | None, each: int) -> Value:
    """What the replicas of a device get of an array that it has."""
    if axis is None:
        return Value(array, True)
    return Value(_apart(array, each, axis), False)


def _leaving(value: Value, axis: int | None, each: int) -> Any:
    """The array that a device has, of what its replicas have made."""
    return value.alone() if axis is None else _together(value.stacked(each), axis)


def _with_weak_types(arrays: Sequence[Any], avals: Sequence[Any]) -> list[Any]:
    """The arrays, those weak that were; loops and conditions have made them strong."""
    return [
        lax.convert_element_type_p.bind(
            array, new_dtype=array.dtype, weak_type=True, sharding=None
        )
        if aval.weak_type
        else array
        for array, aval in zip(arrays, avals, strict=True)
    ]


def _for_leaves(specs: Any, values: Any) -> list[PartitionSpec]:
    """The specification of each leaf, from one for each part of the structure."""
    whole = jax.tree.map(
        lambda spec, part: jax.tree.map(lambda _: spec, part),
        specs,
        values,
        is_leaf=_is_spec,
    )
    return jax.tree.leaves(whole, is_leaf=_is_spec)


def _is_spec(value: Any) -> bool:
    return isinstance(value, PartitionSpec)


def _split_axis(spec: PartitionSpec) -> int | None:
    axes = tuple(spec)
    return axes.index(REPLICA_AXIS) if REPLICA_AXIS in axes else None


def _own_shape(shape: Sequence[int], axis: int | None, count: int) -> tuple[int, ...]:
    """The shape of a replica's part."""
    if axis is None:
        return tuple(shape)
    return (*shape[:axis], shape[axis] // count, *shape[axis + 1 :])


def _apart(array: Any, each: int, axis: int) -> Any:
    """The parts of a device's replicas, with a first axis for these."""
    own = array.shape[axis] // each
    shape = (*array.shape[:axis], each, own, *array.shape[axis + 1 :])
    return jnp.moveaxis(array.reshape(shape), axis, 0)


def _together(stacked: Any, axis: int) -> Any:
    return lax.collapse(jnp.moveaxis(stacked, 0, axis), axis, axis + 2)
