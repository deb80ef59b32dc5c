"""What counts as an array, and arrays in the form that JAX takes. Knows no
`PerReplica`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.dtypes
import jax.numpy as jnp
import numpy as np
from jax import lax

from keras_distribute import checks
from keras_distribute._compat.jax_internals import is_key
from keras_distribute._compat.variables import Variable
from keras_distribute.devices.axes import REPLICA_AXIS
from keras_distribute.errors import StructureTypeError, ValueStructureError


def is_array(value: Any) -> bool:
    """Whether `value` is an array, or a number that stands for one."""
    if isinstance(value, np.ndarray | np.generic):
        kind, char = value.dtype.kind, value.dtype.char
        # "g", "G": numbers of 128 bits, which JAX has not. 2: its small floats.
        return (kind in "biufc" and char not in "gG") or value.dtype.isbuiltin == 2
    return isinstance(value, jax.Array | int | float | complex) and not isinstance(
        value, bool
    )


def from_library(value: Any) -> Any:
    """A tensor of another library, as TensorFlow's or PyTorch's, as NumPy's array;
    anything else as it is.
    """
    if isinstance(value, jax.Array | np.ndarray | np.generic | Variable):
        return value
    if not all(hasattr(value, name) for name in ("__array__", "shape", "dtype")):
        return value
    array = np.asarray(value)
    return array if is_array(array) else value


def on_host(value: Any) -> Any:
    """The array as NumPy's; keys of random numbers as they are."""
    return value if is_key(value) else np.asarray(value)


def check_adds(value: Any) -> None:
    """Raises `StructureTypeError` for keys of random numbers, which have no sum."""
    if is_key(value):
        raise StructureTypeError(
            "Keys of random numbers have neither a sum nor a mean.",
            received=f"an array of {value.dtype}.",
            fix="strategy.experimental_local_results(keys); or strategy.gather(keys, "
            "axis=0) for those of all replicas, of key[None] where each has one.",
        )


def form_of(component: Any) -> tuple[tuple[int, ...], str] | None:
    """A component's shape, and its dtype in JAX; `None` for what is no array."""
    if not is_array(component):
        return None
    if isinstance(component, jax.Array):
        return tuple(component.shape), _name_of(component.dtype)
    array = np.asarray(component)
    return array.shape, _canonical_name(array.dtype, is_x64())


@functools.lru_cache(maxsize=64)
def _name_of(dtype: Any) -> str:
    return str(dtype)  # Takes NumPy 10 microseconds.


@functools.lru_cache(maxsize=64)
def _canonical_name(dtype: Any, x64: bool) -> str:
    """Of the dtype that JAX makes of NumPy's, with numbers of 64 bits or without."""
    del x64  # JAX asks by itself.
    return str(jax.dtypes.canonicalize_dtype(dtype.newbyteorder("=")))


def is_x64() -> bool:
    """Whether JAX has numbers of 64 bits."""
    config: Any = jax.config
    return config.jax_enable_x64  # `config.values` is a new dict each time: 30 us.


def filled_up(array: Any, shape: tuple[int, ...]) -> Any:
    """The array in `shape`, filled up with zeros at the end of each dimension."""
    if array.shape == shape:
        return array
    widths = [
        (0, after - before) for before, after in zip(array.shape, shape, strict=True)
    ]
    if not isinstance(array, jax.Array):
        return np.pad(array, widths)
    if is_key(array):  # XLA cannot pad them.
        return lax.dynamic_update_slice(
            lax.full(shape, 0, array.dtype), array, (0,) * array.ndim
        )
    return lax.pad(
        array,
        lax.full((), 0, array.dtype),
        [(before, after, 0) for before, after in widths],
    )


def summed(values: Sequence[Any]) -> list[jax.Array]:
    """The sums of arrays over the replicas, inside a program.

    Of complex numbers the two parts by themselves: XLA (JAX 0.10) ends the process
    where it finds that a complex array repeats one number.
    """
    parts = [(v.real, v.imag) if jnp.iscomplexobj(v) else (v,) for v in values]
    sums = lax.psum(parts, REPLICA_AXIS) if parts else []
    return [lax.complex(*each) if len(each) == 2 else each[0] for each in sums]


def fitting(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The array in this machine's byte order; its integers must survive JAX's."""
    kind, x64 = array.dtype.kind, is_x64()
    # "O": Python's own, of more than 64 bits.
    if kind == "O" or (kind in "iu" and array.dtype.itemsize == 8 and not x64):
        limits = np.iinfo(np.int32 if kind == "i" else np.uint32)
        if array.size and (array.max() > limits.max or array.min() < limits.min):
            raise ValueStructureError(
                f"JAX computes with {64 if x64 else 32}-bit integers, and these do not "
                "fit.",
                received=f"{'int' if kind == 'O' else array.dtype} values from "
                f"{array.min()} to {array.max()}.",
                fix='jax.config.update("jax_enable_x64", True) at the start of the '
                "program, or floating values.",
            )
    if array.dtype.isnative:
        return array
    return array.astype(array.dtype.newbyteorder("="))


def kept(array: Any) -> Any:
    """The array as it is now. On a CPU, JAX's arrays and programs use the memory of
    NumPy's, also when it has been the caller's to change for long.
    """
    is_numpy = isinstance(array, np.ndarray) and is_array(array)
    return array.copy() if is_numpy else array


def as_array(value: Any, what: str) -> jax.Array:
    """The value as JAX's array; a `StructureTypeError` for what is none."""
    try:
        if any(isinstance(leaf, str | bytes) for leaf in jax.tree.leaves(value)):
            raise TypeError("text")  # Which JAX may take for a dtype.
        return jnp.asarray(value)
    except StructureTypeError:
        raise
    except (TypeError, ValueError, OverflowError) as error:
        raise StructureTypeError(
            what,
            received=f"{checks.shown(value)}, a {type(value).__name__}.",
            fix="an array of numbers, or a number of at most 32 bits.",
        ) from error


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
