"""The program of one replica as one over all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from keras_distribute.devices import in_series, unknown
from keras_distribute.devices.axes import REPLICA_AXIS
from keras_distribute.devices.mesh import ReplicaMesh
from keras_distribute.devices.series import Series, Value


def over_replicas(
    mesh: ReplicaMesh, body: Callable[..., Any], in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """The program of one replica as one over all: manual over the replicas, automatic
    over their logical devices.

    Args:
        body: Takes and returns parts of arrays, as under `jax.shard_map`.
        in_specs: As of `jax.shard_map`: split over the replicas along axis 0, or not.
        out_specs: Likewise.
    """
    if mesh.series is not None:
        return _in_series(mesh, mesh.series, body, in_specs, out_specs)
    if mesh.num_replicas > 1 or not mesh.logical_axes:
        return jax.shard_map(
            body,
            mesh=mesh.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names={REPLICA_AXIS},
            check_vma=False,
        )

    def alone(*arguments: Any) -> Any:
        # XLA has no collectives of one device beside automatic axes.
        results = jax.vmap(lambda _: body(*arguments), axis_name=REPLICA_AXIS)(
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

    def mapped(*arguments: Any) -> Any:
        leaves, structure = jax.tree.flatten(arguments)
        given = _for_leaves(in_specs, arguments)

        def one_replica(*own: Any) -> Any:
            return body(*jax.tree.unflatten(structure, own))

        shapes = [
            jax.ShapeDtypeStruct(
                (leaf.shape[0] // count, *leaf.shape[1:]) if split else leaf.shape,
                leaf.dtype,
            )
            for leaf, split in zip(leaves, map(_is_split, given), strict=True)
        ]
        program, results = jax.make_jaxpr(
            one_replica, axis_env=[(REPLICA_AXIS, count)], return_shape=True
        )(*shapes)
        returned = _for_leaves(out_specs, results)

        def one_device(*arrays: Any) -> list[Any]:
            inputs = [
                Value(_apart(array, each), False) if split else Value(array, True)
                for array, split in zip(arrays, map(_is_split, given), strict=True)
            ]
            zero = unknown.zero(arrays)
            outputs = in_series.run(series, program, inputs, zero)
            return [
                _together(value.stacked(each)) if split else value.alone()
                for value, split in zip(outputs, map(_is_split, returned), strict=True)
            ]

        arrays = jax.shard_map(
            one_device,
            mesh=mesh.mesh,
            in_specs=tuple(given),
            out_specs=returned,
            check_vma=False,
        )(*leaves)
        return jax.tree.unflatten(jax.tree.structure(results), arrays)

    return mapped


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


def _is_split(spec: PartitionSpec) -> bool:
    return REPLICA_AXIS in tuple(spec)


def _apart(array: Any, each: int) -> Any:
    """The rows of a device's replicas, with an axis for these."""
    return array.reshape((each, array.shape[0] // each, *array.shape[1:]))


def _together(stacked: Any) -> Any:
    shape: Sequence[int] = stacked.shape
    return stacked.reshape((shape[0] * shape[1], *shape[2:]))
