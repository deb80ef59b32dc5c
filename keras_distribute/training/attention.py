"""Attention by kernels, on each replica's rows. They never have all logits in memory,
so long sequences fit. What is replaced in Keras, and why, is in `_compat/attention.py`.

On TPUs it is JAX's kernel, in the programs of a step and of `Strategy.run`; XLA's
operations where the kernel does not fit. On GPUs it is whatever Keras takes there, such
as cuDNN's. A step over the global batch maps it over the replicas, which a program of
one replica's rows then unpacks (`devices/by_rows/`): XLA cannot divide the one, and
neither is it seen in an operation of the other that it treats each row alone.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from keras_distribute import context
from keras_distribute._compat import attention as compat
from keras_distribute.devices.axes import REPLICA_AXIS
from keras_distribute.devices.mesh import ReplicaMesh

_WITHOUT = ("TPU v2", "TPU v3")  # Their matrix units are not what the kernel needs.
_DTYPES = ("bfloat16", "float32")


def dot_product_attention(
    original: Callable[..., Any],
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    scale: float | None = None,
    is_causal: bool = False,
    flash_attention: bool | None = None,
    attn_logits_soft_cap: float | None = None,
) -> Any:
    """`keras.ops.dot_product_attention` of a strategy's programs; arrays are of shape
    `(batch, length, heads, size)`.
    """

    def by_keras(
        flash_attention: bool | None,
        query: Any = query,
        key: Any = key,
        value: Any = value,
        mask: Any = mask,
    ) -> Any:
        return original(
            query,
            key,
            value,
            bias=bias,
            mask=mask,
            scale=scale,
            is_causal=is_causal,
            flash_attention=flash_attention,
            attn_logits_soft_cap=attn_logits_soft_cap,
        )

    if not context.has_strategy():
        return by_keras(flash_attention)
    mesh: ReplicaMesh = context.get_strategy().replica_mesh
    if _is_of_gpus(mesh) and flash_attention is not False:
        # A bias has a gradient of all rows.
        if bias is not None or not _is_in_program(mesh) or jnp.ndim(query) != 4:
            return by_keras(flash_attention)
        given = [query, key, value] if mask is None else [query, key, value, mask]
        own = functools.partial(by_keras, flash_attention)
        return _of_rows(mesh, own, list(map(jnp.asarray, given)))
    if not _is_of_tpus(mesh):
        return by_keras(flash_attention)
    is_plain = bias is None and mask is None and flash_attention is not False
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    if not (is_plain and _is_in_program(mesh) and _fits(query, key, value)):
        if attn_logits_soft_cap is None:
            return by_keras(flash_attention=False)
        # Keras leaves the cap away.
        cap = attn_logits_soft_cap
        return _capped(query, key, value, bias, mask, factor, is_causal, cap)
    scaled = query * jnp.asarray(factor, query.dtype)

    def kernel(*arrays: Any) -> Any:
        return compat.splash_attention(
            *arrays,
            is_causal=is_causal,
            soft_cap=attn_logits_soft_cap,
            interpret=mesh.devices[0].platform != "tpu",
        )

    heads_first = [jnp.swapaxes(array, 1, 2) for array in (scaled, key, value)]
    return jnp.swapaxes(_of_rows(mesh, kernel, heads_first), 1, 2)


def _capped(
    query: Any,
    key: Any,
    value: Any,
    bias: Any,
    mask: Any,
    scale: float,
    is_causal: bool,
    cap: float,
) -> Any:
    """Attention by XLA's operations, with logits that are kept below `cap` (Gemma 2,
    https://arxiv.org/abs/2408.00118, section 2).
    """
    groups = query.shape[2] // key.shape[2]
    key, value = (jnp.repeat(array, groups, axis=2) for array in (key, value))
    logits = jnp.einsum("btnh,bsnh->bnts", query, key, preferred_element_type="float32")
    logits *= scale
    if bias is not None:
        logits += bias
    logits = cap * jnp.tanh(logits / cap)
    seen = jnp.ones(logits.shape[-2:], bool)
    seen = jnp.tril(seen) if is_causal else seen
    seen = seen if mask is None else seen & mask.astype(bool)
    logits = jnp.where(seen, logits, -0.7 * jnp.finfo(logits.dtype).max)
    weights = jax.nn.softmax(logits, axis=-1).astype(value.dtype)
    return jnp.einsum("bnts,bsnh->btnh", weights, value)


def _is_of_tpus(mesh: ReplicaMesh) -> bool:
    return mesh.devices[0].platform == "tpu"


def _is_of_gpus(mesh: ReplicaMesh) -> bool:
    return mesh.devices[0].platform == "gpu"


def _is_in_program(mesh: ReplicaMesh) -> bool:
    """Whether the code that is traced is of a step, or of one replica, and no replica
    is divided over logical devices, whose layouts XLA alone follows.
    """
    current = context.frame()
    return mesh.num_logical == 1 and (current.per_replica or current.batch is not None)


def _fits(query: Any, key: Any, value: Any) -> bool:
    """Whether the kernel takes arrays like these."""
    arrays = query, key, value
    if any(a.ndim != 4 or a.dtype not in _DTYPES for a in arrays):
        return False
    if len({a.dtype for a in arrays}) > 1 or key.shape[:3] != value.shape[:3]:
        return False
    device = context.get_strategy().replica_mesh.devices[0]
    if device.device_kind in _WITHOUT or query.shape[2] % key.shape[2]:
        return False
    return query.shape[1] % compat.BLOCKS[-1] == key.shape[1] % compat.BLOCKS[-1] == 0


def _of_rows(
    mesh: ReplicaMesh, kernel: Callable[..., Any], arrays: list[jax.Array]
) -> jax.Array:
    """A kernel that treats each row alone, for the rows that are on a device.

    Args:
        arrays: Of all rows; what has another number of them is for all rows.
    """
    is_mapped = context.frame().per_replica or mesh.series is not None
    if is_mapped or len(mesh.devices) == 1:
        return kernel(*arrays)
    rows, split = arrays[0].shape[0], PartitionSpec(REPLICA_AXIS)
    has_rows = [array.shape[0] == rows for array in arrays]
    missing = -rows % mesh.num_replicas
    if missing:
        arrays = [
            jnp.pad(array, [(0, missing), *[(0, 0)] * (array.ndim - 1)])
            if has
            else array
            for array, has in zip(arrays, has_rows, strict=True)
        ]
    mapped = jax.shard_map(
        kernel,
        mesh=mesh.mesh,
        in_specs=tuple(split if has else PartitionSpec() for has in has_rows),
        out_specs=split,
        check_vma=False,
    )
    outputs = mapped(*arrays)
    return outputs[:rows] if missing else outputs
