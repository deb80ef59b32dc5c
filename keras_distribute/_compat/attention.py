"""Keras's attention on TPUs and GPUs, where it takes kernels: XLA cannot divide one of
them over devices, and of none can be seen that it treats each row alone.

- `nn.dot_product_attention`, by the name that `ops.dot_product_attention` and all
  attention layers look it up. On a TPU it takes JAX's splash attention, which a program
  over several devices refuses ("Mosaic kernels cannot be automatically partitioned"),
  and which does not scale the logits as Keras 3.15 expects, and hides what is after a
  query where no mask is given. Goes when Keras divides the kernel and gives the numbers
  of its other backends there.
- `splash_attention_kernel`: JAX's kernel, which is in `jax.experimental`.
"""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from keras_distribute._compat.names import jax_nn
from keras_distribute._compat.seams import Replacements, check

check(jax_nn, "dot_product_attention")

BLOCKS = (512, 256, 128)
"""How many queries and keys the kernel may take at once, the best first; MaxText takes
512 (https://github.com/AI-Hypercomputer/maxtext, `sa_block_q`).
"""


def install(replaced: Replacements, attention: Callable[..., Any]) -> None:
    """Hooks the attention of a strategy's models.

    Args:
        attention: In place of `dot_product_attention`, with this one as its first
            argument.
    """
    new = functools.partial(attention, jax_nn.dot_product_attention)
    replaced.replace(jax_nn, "dot_product_attention", new)


def splash_attention(
    query: Any,
    key: Any,
    value: Any,
    *,
    is_causal: bool,
    soft_cap: float | None,
    interpret: bool,
) -> Any:
    """The outputs of JAX's kernel for scaled queries.

    Args:
        query: Of shape `(batch, heads, length, size)`.
        key: Of shape `(batch, key heads, key length, size)`; the number of heads is a
            multiple of theirs.
        value: Likewise.
        is_causal: Whether a query sees no key after it.
        soft_cap: What the logits are kept below.
        interpret: Whether to run it by XLA's operations, on any device.
    """
    # Pallas takes a second to import, and few programs need it.
    from jax import vmap
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel as kernels,
    )
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_mask as masks,
    )

    shape = query.shape[2], key.shape[2]
    mask = masks.CausalMask(shape) if is_causal else masks.FullMask(shape)
    of_query, of_key = (next(b for b in BLOCKS if n % b == 0) for n in shape)
    sizes = kernels.BlockSizes(
        block_q=of_query,
        block_kv=of_key,
        block_q_dkv=of_query,
        block_kv_dkv=of_key,
        block_q_dq=of_query,
        block_kv_dq=of_key,
    )
    kernel = kernels.make_splash_mha(
        masks.MultiHeadMask([mask] * query.shape[1]),
        block_sizes=sizes,
        head_shards=1,
        q_seq_shards=1,
        attn_logits_soft_cap=soft_cap,
        interpret=interpret,
    )
    return vmap(kernel)(query, key, value)
