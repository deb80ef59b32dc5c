"""Records how distributed datasets are iterated, reduced and misused."""

from collections.abc import Callable, Iterator
from typing import Any

from ..encoding import JSON
from ..scenarios import iteration as scenario
from . import session
from .elements import spec
from .session import Entry, mirrored, result_of

TEXTS: dict[str, Callable[[Any], JSON]] = {
    "iterator element_spec": lambda element_spec: str(spec(element_spec)),
    "text of element_spec": str,
    "text of element_spec, static": str,
}


def iteration(replicas: int) -> Iterator[Entry]:
    """Iterators, their ends, `reduce`, use in functions; what cannot be distributed."""
    for name, call in scenario.iteration(session, mirrored(replicas)).items():
        written = TEXTS.get(name, lambda value: value)
        yield {"name": name, "result": result_of(lambda: written(call()))}
