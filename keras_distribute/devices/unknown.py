"""What XLA must not know while it compiles: it would make of one program another on one
device than on several, whose results differ in the last bit. Knows no Keras.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from keras_distribute._compat.jax_internals import is_key


def zero(arrays: Sequence[Any]) -> Any:
    """A zero of which the compiler does not know that it is one.

    Args:
        arrays: Arguments of the program: a number is never 1 and 2, which XLA does not
            find out. What no argument is a part of, as a barrier, it sees through.
    """
    known = (a for a in arrays if jnp.size(a) and not is_key(a))
    some = next((a for a in known if a.dtype != jnp.bool_), None)
    if some is None:
        return lax.optimization_barrier(jnp.int32(0))
    first = lax.slice(jnp.ravel(some), (0,), (1,))[0]
    return ((first == 1) & (first == 2)).astype("int32")


def zero_after(arrays: Sequence[Any], unknown_zero: Any) -> Any:
    """The zero, which is not known before these arrays are."""
    for each in arrays:
        if jnp.size(each) and not is_key(each):
            first = lax.slice(jnp.ravel(each), (0,), (1,))[0]
            unknown_zero = unknown_zero & (first == 1).astype(unknown_zero.dtype)
    return unknown_zero


def array(constant: Any, unknown_zero: Any) -> Any:
    """An array of which the compiler does not know what is in it.

    On one device it would find that out where a loop takes it, on several
    it would not: with a known length, the division in a mean became another operation.
    """
    known = jnp.asarray(constant)
    both = jnp.stack([known, jnp.zeros_like(known)])
    return lax.dynamic_index_in_dim(both, unknown_zero, 0, keepdims=False)


def rounded(array: Any, unknown_zero: Any) -> Any:
    """An array of which the compiler does not know how it was made, without a copy.

    Else LLVM adds a product to something before the product is rounded, and XLA what is
    of 16 bits before that is.
    """
    if jnp.iscomplexobj(array):
        parts = lax.real(array), lax.imag(array)
        return lax.complex(*(rounded(part, unknown_zero) for part in parts))
    if not jnp.issubdtype(array.dtype, jnp.floating):
        return array
    bits = lax.bitcast_convert_type(array, f"uint{8 * array.dtype.itemsize}")
    bits ^= unknown_zero.astype(bits.dtype)
    return lax.bitcast_convert_type(bits, array.dtype)
