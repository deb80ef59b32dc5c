"""What an argument has to be, said in one form. Knows nothing of JAX or Keras.

An argument of the wrong kind is a `TypeError`, one with a wrong value a `ValueError`;
a room that has an error of its own names that for both.
"""

from __future__ import annotations

import importlib
import math
import numbers
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_distribute.errors import (
    BackendError,
    DistributeError,
    StructureTypeError,
    ValueStructureError,
)

_LONGEST = 300
_Error = type[DistributeError]


def shown(value: Any) -> str:
    """An argument in an error's text: not longer than a reader can use."""
    try:
        text = repr(value)
    except Exception:  # The error to raise is ours, not that of somebody's `repr`.
        text = f"a {type(value).__name__}"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def listed(names: Sequence[str], most: int = 5) -> str:
    """`"a, b, c"`, or if there are more than `most`, `"a, b, c and 7 more"`."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def counted(number: int, word: str) -> str:
    """`"1 row"`, `"2 rows"`."""
    return f"{number} {word}{'' if number == 1 else 's'}"


def bytes_in_words(count: float) -> str:
    """`"17 B"`, `"1.5 KiB"`, `"15.75 GiB"`: in units of 1024 (IEC 80000-13)."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1023.95:
            digits = {"B": 0, "GiB": 2}.get(unit, 1)
            return f"{count:.{digits}f} {unit}"
        count /= 1024
    return f"{count:.2f} TiB"


def instance(
    name: str,
    value: Any,
    kinds: Any,
    what: str,
    fix: str,
    error: _Error = StructureTypeError,
) -> None:
    """Raises unless `value` is an instance of `kinds`."""
    if not isinstance(value, kinds):
        raise error(what, received=f"{name}={shown(value)}.", fix=fix)


def items(value: Any) -> list[Any] | None:
    """What a collection has; `None` for what is none, as a number."""
    try:
        return list(value)
    except TypeError:
        return None


def imported(name: str, what: str, fix: str) -> Any:
    """A module of a package that only some programs need.

    Args:
        what: Who needs it.
        fix: How to install it.

    Raises:
        BackendError: Where it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise BackendError(what, received=f"{error}.", fix=fix) from error


def function(
    name: str, value: Any, what: str, fix: str, error: _Error = StructureTypeError
) -> None:
    """Raises unless `value` can be called."""
    if not callable(value):
        raise error(what, received=f"{name}={shown(value)}.", fix=fix)


def flag(name: str, value: Any, error: _Error = StructureTypeError) -> None:
    """Raises unless `value` is `True` or `False`."""
    instance(name, value, bool | np.bool_, f"{name} is a flag.", f"{name}=True", error)


def text(name: str, value: Any, fix: str | None = None) -> None:
    """Raises unless `value` is a string."""
    instance(name, value, str, f"{name} is a string.", fix or f'{name}="..."')


def path(
    name: str, value: Any, fix: str | None = None, error: _Error = StructureTypeError
) -> None:
    """Raises unless `value` names a file or folder."""
    kinds, what = (str, os.PathLike), f"{name} is a path."
    instance(name, value, kinds, what, fix or f'{name}="folder"', error)
    if "\0" in os.fspath(value):
        wrong = ValueStructureError if error is StructureTypeError else error
        raise wrong(what, received=f"{name}={value!r}.", fix=fix or f'{name}="folder"')


def one_of(name: str, value: Any, known: Sequence[Any]) -> None:
    """Raises unless `value` is one of a few strings or other constants."""
    if any(type(value) is type(each) and value == each for each in known):
        return
    wrong = ValueStructureError if isinstance(value, str) else StructureTypeError
    raise wrong(
        f"There is no {name} {shown(value)}.",
        received=f"{name}={shown(value)}.",
        fix=f"one of {', '.join(map(repr, known))}.",
    )


def is_integer(value: Any) -> bool:
    """Whether it is an integer of Python or NumPy; `True` and `False` are none."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def count(
    name: str,
    value: Any,
    least: int = 0,
    *,
    most: int | None = None,
    what: str | None = None,
    fix: str | None = None,
    error: _Error | None = None,
) -> int:
    """`value` as Python's integer.

    Raises:
        StructureTypeError: For anything else than an integer.
        ValueStructureError: For one that is less than `least`, or more than `most`.
    """
    right = is_integer(value)
    if right and value >= least and (most is None or value <= most):
        return int(value)
    limits = f"of at least {least}" if most is None else f"from {least} to {most}"
    raise (error or (ValueStructureError if right else StructureTypeError))(
        what or f"{name} is an integer {limits}.",
        received=f"{name}={shown(value)}.",
        fix=fix or f"{name}={max(least, 1)}",
    )


def number(
    name: str,
    value: Any,
    *,
    zero: bool = False,
    what: str | None = None,
    fix: str | None = None,
    error: _Error | None = None,
) -> None:
    """Raises unless `value` is a finite number above zero, or zero where that may be.

    Raises:
        StructureTypeError: For anything else than a real number.
        ValueStructureError: For one that is not finite, or too small.
    """
    right = isinstance(value, numbers.Real) and not isinstance(value, bool)
    given: Any = value
    if right and _is_finite(given) and (given > 0 or (zero and given == 0)):
        return
    limits = "of at least 0" if zero else "above 0"
    raise (error or (ValueStructureError if right else StructureTypeError))(
        what or f"{name} is a finite number {limits}.",
        received=f"{name}={shown(value)}.",
        fix=fix or f"{name}=60",
    )


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # An integer beyond the floats.
        return False
