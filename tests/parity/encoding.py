"""How values are written in the record: tagged JSON that keeps dtypes, containers and
replicas apart.

Owns the mapping between JSON and NumPy or Python values. Knows neither TensorFlow nor
JAX: each side says by a `split` function which of its objects are distributed.

    null, "text"                        None and strings, as they are
    {"float32": [1.5, 2]}               an array (a number alone is a scalar; "shape" beside it where it holds nothing)
    {"str": ["a", "b"]}                 an array of text
    {"python": 3}                       a Python number
    {"list": []} {"tuple": []} {"dict": {}} {"Pair": {}}   containers; Pair is the named tuple below
    {"PerReplica": []} {"Mirrored": []} {"Variable": []}   a value of several replicas, by component
    {"object": "Marker"}                anything else, by its class
    {"error": "ValueError", "message": "first line"}       what was raised, by its first builtin class
"""

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

JSON = Any
Split = Callable[[Any], tuple[str, Sequence[Any]] | None]
DISTRIBUTED = ("PerReplica", "Mirrored", "Variable")


class Pair(NamedTuple):
    """The named tuple that the record uses."""

    first: Any
    second: Any


class Marker:
    """An object that no framework knows."""


def encode(value: Any, split: Split = lambda value: None) -> JSON:
    """The tagged JSON of `value`; `split` gives the tag and the components of a
    distributed value, or None.
    """
    distributed = split(value)
    if distributed is not None:
        tag, components = distributed
        return {tag: [encode(component, split) for component in components]}
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, (bool, int, float)):
        return {"python": value}
    if isinstance(value, Pair):
        return {
            "Pair": {
                name: encode(item, split) for name, item in value._asdict().items()
            }
        }
    if isinstance(value, (list, tuple)):
        return {type(value).__name__: [encode(item, split) for item in value]}
    if isinstance(value, dict):
        return {"dict": {name: encode(item, split) for name, item in value.items()}}
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return encode_array(np.asarray(value))
    return {"object": type(value).__name__}


def encode_array(array: np.ndarray) -> JSON:
    """An array by its dtype, floats with the fewest digits that give them back."""
    if array.dtype.kind == "O":
        array = array.astype(str)  # bytes, as TensorFlow keeps text
    if array.dtype.kind == "U":
        return {
            "str": array.tolist(),
            **({} if array.size else {"shape": list(array.shape)}),
        }
    numbers = array
    if array.dtype.kind == "f":
        numbers = np.asarray([float(str(number)) for number in array.ravel()]).reshape(
            array.shape
        )
    encoded: dict[str, Any] = {array.dtype.name: numbers.tolist()}
    return encoded if array.size else {**encoded, "shape": list(array.shape)}


def encode_error(error: BaseException) -> JSON:
    """The first builtin class of `error`, its own class where that is another, and the
    first line of its message.
    """
    builtin = next(
        cls.__name__ for cls in type(error).__mro__ if cls.__module__ == "builtins"
    )
    name = type(error).__name__
    return {
        "error": builtin,
        **({} if name == builtin else {"class": name}),
        "message": _first_line(str(error)),
    }


def _first_line(message: str) -> str:
    """The first line that says something: errors from inside a tf.function end with
    theirs. Without what varies.
    """
    lines = [line.strip() for line in message.splitlines() if line.strip()] or [""]
    line = lines[0]
    if line == "in user code:":
        line = next((line for line in lines if re.match(r"\w+Error: ", line)), line)
    if line == "Graph execution error:":
        line = next(
            (
                line
                for line in lines[1:]
                if not line.startswith(("File ", "Detected at "))
            ),
            line,
        )
    line = re.sub(r"^\w+Error: |\{\{.*?\}\} ?", "", line)
    # which replica complains varies
    line = re.sub(r"(Shape mismatch in the collective).*", r"\1", line)
    line = re.sub(
        r"0x[0-9a-f]+|instance \d+|/job:\S*/device:|goo\.gle/debug\w+", "", line
    ).strip()
    return line if len(line) <= 120 else line[:117] + "..."


def decode(encoded: JSON) -> Any:
    """The value that `encode` wrote; a distributed one as a list of components."""
    if encoded is None or isinstance(encoded, str):
        return encoded
    tag, content = next(iter(encoded.items()))
    if tag == "python":
        return content
    if tag == "Pair":
        return Pair(**{name: decode(item) for name, item in content.items()})
    if tag == "dict":
        return {name: decode(item) for name, item in content.items()}
    if tag == "tuple":
        return tuple(decode(item) for item in content)
    if tag == "list" or tag in DISTRIBUTED:
        return [decode(item) for item in content]
    return np.asarray(content, dtype=tag).reshape(
        encoded["shape"] if "shape" in encoded else np.shape(content)
    )


def is_distributed(encoded: JSON) -> bool:
    """Whether `encoded` has one component per replica."""
    return isinstance(encoded, dict) and next(iter(encoded)) in DISTRIBUTED


def is_error(encoded: JSON) -> bool:
    """Whether `encoded` says that something was raised."""
    return isinstance(encoded, dict) and "error" in encoded
