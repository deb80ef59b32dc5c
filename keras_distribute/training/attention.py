"""Attention by kernels, on each replica's rows. They never have all logits in memory,
so long sequences fit. What is replaced in Keras, and why, is in `_compat/attention.py`.

On TPUs it is JAX's kernel, in the programs of a step and of `Strategy.run`; XLA's
operations where the kernel does not fit. On GPUs it is whatever Keras takes there, such
as cuDNN's.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from keras_distribute import context
from keras_distribute._compat import attention as compat
from keras_distribute.devices.mesh import ReplicaMesh
from keras_distribute.training.own_rows import is_in_program, is_of_gpus, of_rows

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
    if is_of_gpus(mesh) and flash_attention is not False:
        # A bias has a gradient of all rows.
        if bias is not None or not is_in_program(mesh) or jnp.ndim(query) != 4:
            return by_keras(flash_attention)
        own = functools.partial(by_keras, flash_attention)
        given = [query, key, value] if mask is None else [query, key, value, mask]
        return _of_own_rows(mesh, own, list(map(jnp.asarray, given)))
    if not _is_of_tpus(mesh):
        # Keras asks for the process's devices, not for the strategy's.
        return by_keras(flash_attention or False)
    is_plain = bias is None and mask is None and flash_attention is not False
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    if not (is_plain and is_in_program(mesh) and _fits(query, key, value)):
        if attn_logits_soft_cap is None:
            return by_keras(flash_attention=False)
        # Keras leaves the cap away.
        cap = attn_logits_soft_cap
        return _capped(query, key, value, bias, mask, factor, is_causal, cap)
    scaled = query * jnp.asarray(factor, query.dtype)
    arrays = scaled, key, value
    return _by_kernel_of_tpus(mesh, arrays, is_causal, attn_logits_soft_cap)


def _by_kernel_of_tpus(
    mesh: ReplicaMesh, arrays: Sequence[Any], is_causal: bool, soft_cap: float | None
) -> Any:
    kernel = functools.partial(
        compat.splash_attention,
        is_causal=is_causal,
        soft_cap=soft_cap,
        interpret=mesh.platform != "tpu",
    )
    heads_first = [jnp.swapaxes(array, 1, 2) for array in arrays]
    return jnp.swapaxes(_of_own_rows(mesh, kernel, heads_first), 1, 2)


def _of_own_rows(
    mesh: ReplicaMesh, function: Callable[..., Any], arrays: Sequence[Any]
) -> Any:
    """A function on each replica's rows; a mask may be the same for all rows."""
    has_rows = [array.shape[0] == arrays[0].shape[0] for array in arrays]
    return of_rows(mesh, function, arrays, has_rows)


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
    return mesh.platform == "tpu"


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
