"""Small structures of Python values as JSON, with their arrays and bytes beside it.

What comes back has the types that went in: tuples stay tuples, keys need not be
strings, and a NumPy scalar stays one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from keras_distribute import checks
from keras_distribute._compat.jax_internals import is_key
from keras_distribute.errors import CheckpointError

Arrays = dict[str, np.ndarray[Any, Any]]
Special = Callable[[Any, str], Any]


def encode(
    value: Any, name: str, arrays: Arrays, special: Special | None = None
) -> Any:
    """`value` as what `json.dumps` takes.

    Args:
        value: `None`, booleans, numbers, strings, bytes, arrays, and lists, tuples and
            dictionaries of them.
        name: Its name in error texts, and that of its arrays in `arrays`.
        arrays: Takes copies of the arrays and bytes.
        special: Encodes types of the caller's: returns a dictionary of one item with a
            key of its own, or `None` for what it leaves to this function.

    Raises:
        CheckpointError: For a value of another type, and for one that contains itself.
    """
    try:
        return _encoded(value, name, arrays, special)
    except RecursionError:
        raise CheckpointError(
            f"{name!r} contains itself, or has hundreds of values inside each other.",
            received=f"{checks.shown(value)}.",
            fix="lists, tuples and dictionaries of plain values, without one in "
            "itself.",
        ) from None


def _encoded(value: Any, name: str, arrays: Arrays, special: Special | None) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value

    def inner(part: Any, key: Any) -> Any:
        return _encoded(part, f"{name}/{key}", arrays, special)

    if kind is list:
        return [inner(item, i) for i, item in enumerate(value)]
    if kind is tuple:
        return {"tuple": _encoded(list(value), name, arrays, special)}
    if kind is bytes:
        return {"bytes": _keep(np.frombuffer(value, np.uint8), name, arrays)}
    if is_key(value):
        data = inner(np.asarray(jax.random.key_data(value)), "key")
        return {"key": [str(jax.random.key_impl(value)), data]}
    if special is not None and kind is not dict:
        form = special(value, name)
        if form is not None:
            return form
    if isinstance(value, dict):  # Also of a subclass: what is restored are the items.
        return {"dict": [[inner(k, "key"), inner(v, k)] for k, v in value.items()]}
    if isinstance(value, np.generic) and is_plain(value):
        return {"scalar": _keep(np.asarray(value), name, arrays)}
    if isinstance(value, np.ndarray | jax.Array) and is_plain(value):
        return {"array": _keep(np.array(value), name, arrays)}
    raise CheckpointError(
        f"{name!r} is of a type that a checkpoint cannot keep.",
        received=f"{value!r}, a {kind.__name__}.",
        fix="None, bool, int, float, str, bytes, arrays without fields and masks, and "
        "lists, tuples and dictionaries of them.",
    )


def can_encode(value: Any) -> bool:
    """Whether `encode` takes `value`, which may contain itself; makes no copies."""
    try:
        return _is_known(value)
    except RecursionError:
        return False


def _is_known(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_known(key) and _is_known(item) for key, item in value.items())
    if type(value) in (list, tuple):
        return all(map(_is_known, value))
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        return is_key(value) or is_plain(value)
    return value is None or type(value) in (bool, int, float, str, bytes)


def decode(
    form: Any, arrays: Arrays, special: Mapping[str, Callable[[Any], Any]] | None = None
) -> Any:
    """The value that `encode` was given.

    Args:
        special: Decodes the caller's types, by the key of their form.
    """

    def inner(part: Any) -> Any:
        return decode(part, arrays, special)

    if isinstance(form, list):
        return list(map(inner, form))
    if not isinstance(form, dict):
        return form
    ((kind, content),) = form.items()
    if special is not None and kind in special:
        return special[kind](content)
    if kind == "tuple":
        return tuple(map(inner, content))
    if kind == "dict":
        return {inner(key): inner(value) for key, value in content}
    if kind == "key":
        return jax.random.wrap_key_data(inner(content[1]), impl=content[0])
    array = arrays[content]
    if kind == "bytes":
        return array.tobytes()
    return array[()] if kind == "scalar" else array.copy()


def is_plain(value: np.ndarray[Any, Any] | np.generic | jax.Array) -> bool:
    """Whether an array is one of elements that files name, and no more than these."""
    dtype = np.dtype(value.dtype)
    plain = not dtype.hasobject and dtype.names is None
    return plain and not isinstance(value, np.ma.MaskedArray)


def _keep(array: np.ndarray[Any, Any], name: str, arrays: Arrays) -> str:
    count, unique = 1, name
    while unique in arrays:
        count += 1
        unique = f"{name}#{count}"
    arrays[unique] = array
    return unique
