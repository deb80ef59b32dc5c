"""Messages between processes as bytes: JSON, with the arrays in it.

Reading a message runs no code of its writer. Only named tuples, enumerations and
exceptions are found by the name of their class. Any other object is a pickle, which is
written and read only where messages are signed with the token.
"""

from __future__ import annotations

import base64
import collections
import contextlib
import enum
import importlib
import json
import pathlib
import pickle
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from keras_distribute import checks
from keras_distribute.cluster import signing
from keras_distribute.cluster.encoding import Arrays, decode, encode, is_plain
from keras_distribute.errors import CheckpointError, ClusterError, StructureTypeError

_MOST_SHOWN = 200


def to_bytes(said: Any, *, signed: bool) -> bytes:
    """The message that says `said`.

    Args:
        said: `None`, booleans, numbers, strings, bytes, paths, arrays, enumerations,
            exceptions, and lists, tuples, named tuples, sets and dictionaries of them.
            In a signed message, anything that can be pickled.

    Raises:
        StructureTypeError: For another object in a message that is not signed, and for
            one that contains itself.
    """
    arrays: Arrays = {}
    try:
        form = encode(said, "said", arrays, _Writer(arrays, signed))
        written = {name: _form_of(array) for name, array in arrays.items()}
        return json.dumps([form, written]).encode()
    except (CheckpointError, RecursionError):
        raise StructureTypeError(
            "What a process says to the others is plain data, which neither contains "
            "itself nor has hundreds of values inside each other.",
            received=f"{checks.shown(said)}.",
            fix="numbers, strings, arrays, and lists, tuples and dictionaries of them.",
        ) from None


def from_bytes(message: bytes, *, signed: bool) -> Any:
    """What a message of `to_bytes` says; a `ClusterError` where it cannot be read."""
    try:
        form, written = json.loads(message)
        arrays = {name: _array_of(*parts) for name, parts in written.items()}
        return decode(form, arrays, _readers(arrays, signed))
    except Exception as error:  # A stranger may have written anything.
        raise ClusterError(
            f"A message between processes cannot be read: {_shown(error)}",
            received=f"{len(message)} bytes.",
            fix="the same program and versions in every process, and a token, which "
            f"keeps others out: {signing.HOW_TO_GIVE}",
        ) from error


class _Writer:
    """Encodes what `encode` does not know; adds its arrays to `arrays`."""

    def __init__(self, arrays: Arrays, signed: bool) -> None:
        self._arrays, self._signed = arrays, signed

    def __call__(self, value: Any, name: str) -> Any:
        def part(of: Any) -> Any:
            return encode(of, name, self._arrays, self)

        kind = type(value)
        if kind in (set, frozenset):
            return {kind.__name__: part(list(value))}
        if kind is complex:
            return {"complex": [value.real, value.imag]}
        if kind is collections.OrderedDict:
            return {"ordered": part(dict(value))}
        if isinstance(value, pathlib.Path):
            return {"path": str(value)}
        if isinstance(value, enum.Enum) and _is_known(kind):
            return {"member": [*_name_of(kind), value.name]}
        if isinstance(value, tuple) and hasattr(kind, "_fields") and _is_known(kind):
            return {"named": [*_name_of(kind), part(list(value))]}
        if isinstance(value, BaseException):
            return {"error": self._error(value, part)}
        if isinstance(value, jax.Array) and is_plain(value):
            return {"jax": part(np.asarray(value))}
        array: Any = value
        of_numpy = kind is np.ndarray or isinstance(value, np.generic)
        if of_numpy and is_plain(array):
            return None  # As any array.
        if not self._signed:
            raise _no_data(value)
        return {"object": base64.b64encode(pickle.dumps(value)).decode()}

    def _error(self, error: BaseException, part: Callable[[Any], Any]) -> Any:
        """Its class, text, and where they are data, its arguments and attributes."""
        shown = [*_name_of(type(error)), str(error)]
        try:
            maker, args, *_ = error.__reduce__()  # An OSError's file is no argument.
            args = args if maker is type(error) else error.args
            return [*shown, part(list(args)), part(dict(vars(error)))]
        except Exception:
            return shown


def _readers(arrays: Arrays, signed: bool) -> dict[str, Callable[[Any], Any]]:
    def part(form: Any) -> Any:
        return decode(form, arrays, readers)

    def unpickled(content: str) -> Any:
        if not signed:
            raise ValueError("an object in a message without a signature")
        return pickle.loads(base64.b64decode(content))

    def error(content: list[Any]) -> BaseException:
        module, name, shown, *parts = content
        known = _class_at(module, name, BaseException, find=signed)
        if known is not None and parts:
            args, attributes = map(part, parts)
            with contextlib.suppress(Exception):
                # Of others than Python's own without what their classes do besides.
                made = known.__new__(known, *args)
                if module == "builtins":
                    made.__init__(*args)
                vars(made).update(attributes)
                return made
        return ClusterError(
            f"{name} in another process: {shown}",
            received=f"an exception of {module} that only that process can show.",
            fix="look at the log of that process.",
        )

    def named(content: list[Any]) -> Any:
        module, name, items = content
        known = _class_at(module, name, tuple, find=signed)
        if known is None or not hasattr(known, "_fields"):
            raise ValueError(f"there is no named tuple {module}.{name} here")
        return tuple.__new__(known, part(items))

    def member(content: list[Any]) -> Any:
        module, name, of = content
        known = _class_at(module, name, enum.Enum, find=signed)
        if known is None:
            raise ValueError(f"there is no enumeration {module}.{name} here")
        return known.__members__[of]

    readers: dict[str, Callable[[Any], Any]] = {
        "set": lambda content: set(part(content)),
        "frozenset": lambda content: frozenset(part(content)),
        "complex": lambda content: complex(*content),
        "ordered": lambda content: collections.OrderedDict(part(content)),
        "path": pathlib.Path,
        "jax": lambda content: jnp.asarray(part(content)),
        "object": unpickled,
        "error": error,
        "named": named,
        "member": member,
    }
    return readers


def _name_of(kind: type) -> tuple[str, str]:
    return kind.__module__, kind.__qualname__


def _is_known(kind: type) -> bool:
    return _class_at(*_name_of(kind), kind, find=False) is kind


def _class_at(module: str, name: str, base: type, *, find: bool) -> Any:
    """The class of this name, if it is a subclass of `base`, else `None`.

    Imports the module only with `find`.
    """
    found: Any = sys.modules.get(module)
    if found is None and find:
        try:
            found = importlib.import_module(module)
        except ImportError:
            return None
    for step in name.split("."):
        found = getattr(found, "__dict__", {}).get(step)
    return found if isinstance(found, type) and issubclass(found, base) else None


def _form_of(array: np.ndarray[Any, Any]) -> list[Any]:
    dtype = array.dtype
    name = dtype.name if dtype.isbuiltin == 2 else dtype.str  # 2: JAX's small floats.
    content = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
    return [name, list(array.shape), content]


def _array_of(name: str, shape: list[int], content: str) -> np.ndarray[Any, Any]:
    dtype = np.dtype(name)
    if dtype.hasobject:
        raise ValueError("an array of objects")
    if not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError("an invalid shape")
    return np.frombuffer(base64.b64decode(content), dtype).reshape(shape)


def _shown(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:_MOST_SHOWN]


def _no_data(value: Any) -> StructureTypeError:
    return StructureTypeError(
        "What a process says to the others is plain data, where the job has no token.",
        received=f"{repr(value)[:_MOST_SHOWN]}, a {type(value).__qualname__}.",
        fix="numbers, strings, arrays, and lists, tuples and dictionaries of them; or "
        f"a token, the same in every process:\n    {signing.HOW_TO_MAKE}\n"
        f"    {signing.HOW_TO_GIVE}",
    )
