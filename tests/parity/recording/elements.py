"""What comes out of a distributed dataset, element by element, and what its specs say,
for the record.
"""

from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

import tensorflow as tf

# PerReplicaSpec has no public name
from tensorflow.python.distribute import values as tf_values

from ..encoding import JSON, encode_error
from .session import Entry, encoded

ENDLESS = 5
MOST = 40


def elements_of(distribute: Callable[[], Any], most: int = MOST) -> Entry:
    """The elements of what `distribute` returns, and how they ended: "StopIteration",
    "more", or an error.

    An error says in "in" which of "distribute", "iter" and "next" raised it.
    """
    elements: list[JSON] = []
    stage = "distribute"
    try:
        dataset = distribute()
        stage = "iter"
        iterator = iter(dataset)
        stage = "next"
        while len(elements) < most:
            elements.append(encoded(next(iterator)))
    except StopIteration:
        return {"elements": elements, "end": "StopIteration"}
    except Exception as error:  # every error is a result here
        return {"elements": elements, "end": {**encode_error(error), "in": stage}}
    return {"elements": elements, "end": "more"}


def said_of(distribute: Callable[[], Any], most: int = MOST, **more: JSON) -> Entry:
    """The elements of what `distribute` returns, `more`, and what it says of them."""
    kept: list[Any] = []

    def distribute_once() -> Any:
        kept.append(distribute())
        return kept[0]

    entry = elements_of(distribute_once, most) | more
    if kept:
        entry["element_spec"] = spec(kept[0].element_spec)
        entry["cardinality"] = cardinality_of(kept[0])
    return entry


def plain(dataset: Iterable[Any], most: int = MOST) -> list[JSON]:
    """The elements of a dataset that is not distributed."""
    return [encoded(element) for element in islice(dataset, most)]


def spec(value: Any) -> JSON:
    """An element_spec: {"PerReplica": []}, or {"spec": dtype, "shape": []}."""
    if isinstance(value, tf_values.PerReplicaSpec):
        return {"PerReplica": [spec(component) for component in value._value_specs]}
    if type(value) is tf.TensorSpec:
        return {
            "spec": value.dtype.name,
            "shape": value.shape.as_list() if value.shape.rank is not None else None,
        }
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {
            type(value).__name__: {
                name: spec(item) for name, item in value._asdict().items()
            }
        }
    if isinstance(value, (list, tuple)):
        return {type(value).__name__: [spec(item) for item in value]}
    if isinstance(value, dict):
        return {"dict": {name: spec(item) for name, item in value.items()}}
    return {"object": type(value).__name__}


def cardinality_of(dataset: Any) -> int | None:
    """The number of elements that a dataset says it has: a property where it is
    distributed, else a method.
    """
    cardinality = getattr(dataset, "cardinality", None)
    return (
        None
        if cardinality is None
        else int(cardinality() if callable(cardinality) else cardinality)
    )
