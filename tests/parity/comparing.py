"""Our side of the comparison: the record's inputs as our values, our results as the
record writes them, the verdict.
"""

import builtins
import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import keras_distribute as kd

from .differences import because
from .encoding import DISTRIBUTED, JSON, decode, is_distributed, is_error
from .ours import arrays, encoded, per_replica

RTOL = 1e-5
ATOL = 1e-6

Entry = dict[str, JSON]


@cache
def record() -> dict[str, list[Entry]]:
    """The whole record."""
    return json.loads(Path(__file__).with_name("tensorflow.json").read_text())


def entries(
    topic: str, *names: str, where: Callable[[Entry], bool] = lambda entry: True
) -> Any:
    """Parametrises a test by a topic's entries, as `entry`; `names` are the keys that
    make a readable id.
    """

    def identify(entry: Entry) -> str:
        said = [str(entry[name]) for name in names if entry.get(name) is not None]
        return "-".join([*said, f"{entry['replicas']} replicas"])

    return pytest.mark.parametrize(
        "entry", list(filter(where, record()[topic])), ids=identify
    )


def cases(topic: str, name: str = "name") -> Any:
    """Parametrises a test by every item of all "results", as `entry` and `case`."""

    def all_cases() -> Iterator[Any]:
        for entry in record()[topic]:
            for *arguments, result in entry["results"]:
                said = ", ".join(map(str, arguments))
                yield pytest.param(
                    entry,
                    (*arguments, result),
                    id=f"{entry[name]}-{said}-{entry['replicas']} replicas",
                )

    return pytest.mark.parametrize(("entry", "case"), list(all_cases()))


def value_of(strategy: kd.Strategy, encoded: JSON) -> Any:
    """The record's value as ours: a PerReplica, a structure of them, or a plain one."""
    value = decode(encoded)
    return per_replica(strategy, value) if is_distributed(encoded) else arrays(value)


def check(strategy: kd.Strategy, call: Callable[[], Any], expected: JSON) -> None:
    """Asserts that `call` returns, or raises, what the record says."""
    if is_error(expected):
        check_error(call, expected)
    else:
        assert_same(encoded(strategy, call()), expected)


def check_error(call: Callable[[], Any], expected: JSON, *, fix: bool = True) -> None:
    """Asserts that `call` raises the builtin class that the record names, with a remedy
    in the text.
    """
    if expected["error"] in ("Exception", "AssertionError"):
        assert because("op errors")
        allowed: Any = (ValueError, TypeError)
    else:
        allowed = getattr(builtins, expected["error"])
    with pytest.raises(allowed) as raised:
        call()
    if fix:
        assert "Fix:" in str(raised.value)


def assert_same(actual: JSON, expected: JSON) -> None:
    """Asserts that two encoded values have the same form, and close numbers."""
    expected = without_64_bit(expected)
    assert form(actual) == form(expected)
    for ours, theirs in zip(numbers(actual), numbers(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=RTOL, atol=ATOL)


def form(encoded: JSON) -> JSON:
    """An encoded value without its numbers: tags, containers, dtypes and shapes."""
    if _is_array(encoded):
        return f"{next(iter(encoded))}{list(np.shape(decode(encoded)))}"
    return _mapped(form, encoded)


def numbers(encoded: JSON) -> list[np.ndarray]:
    """The arrays in an encoded value, in order."""
    found: list[np.ndarray] = []

    def look(item: JSON) -> JSON:
        if _is_array(item):
            found.append(decode(item))
        return _mapped(look, item)

    look(encoded)
    return found


def without_64_bit(encoded: JSON) -> JSON:
    """float64, which TensorFlow makes of the mean of integers, as float32."""
    if isinstance(encoded, dict) and "float64" in encoded:
        assert because("no 64-bit")
        return {"float32": encoded["float64"]}
    return _mapped(without_64_bit, encoded)


def as_run_returns(encoded: JSON, replicas: int) -> JSON:
    """TensorFlow's result of `run` as ours: every array a PerReplica."""
    if _is_array(encoded):
        assert (
            because("one replica") if replicas == 1 else because("always per replica")
        )
        return {"PerReplica": [encoded] * replicas}
    if is_distributed(encoded):
        return encoded
    return _mapped(lambda item: as_run_returns(item, replicas), encoded)


def _is_array(encoded: JSON) -> bool:
    containers = ("list", "tuple", "dict", "Pair", *DISTRIBUTED)
    plain = ("python", "object", "error")
    return isinstance(encoded, dict) and next(iter(encoded)) not in containers + plain


def _mapped(fn: Callable[[JSON], JSON], encoded: JSON) -> JSON:
    """`fn` of the items of a container."""
    if not isinstance(encoded, dict):
        return encoded
    tag, content = next(iter(encoded.items()))
    if tag in ("list", "tuple", *DISTRIBUTED):
        return {tag: [fn(item) for item in content]}
    if tag in ("dict", "Pair"):
        return {tag: {name: fn(item) for name, item in content.items()}}
    return encoded
